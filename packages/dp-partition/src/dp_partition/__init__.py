"""Run an unmodified single-device train step data-parallel: as it is written, or as one fx graph.

`distribute` runs any step as it is written, `compile` makes it a graph. The graph's stages are public too, for graphs
from elsewhere: `gradients_tagging`, `build_data_parallel_strategies`, `mark_data_parallel_shardings`, `partitioner`,
and all of them as `partition_data_parallel`. `dp_partition.legacy` has the decorator of torch 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dp_partition.__about__ import __version__ as __version__
from dp_partition._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from dp_partition import legacy as legacy
    from dp_partition._shared.problems import PlanError as PlanError
    from dp_partition._shared.problems import Problem as Problem
    from dp_partition.api import CompiledStep as CompiledStep
    from dp_partition.api import DistributedStep as DistributedStep
    from dp_partition.api import compile as compile
    from dp_partition.api import distribute as distribute
    from dp_partition.capture.phases import gradients_tagging as gradients_tagging
    from dp_partition.cost_estimate import Estimate as Estimate
    from dp_partition.cost_estimate import estimate as estimate
    from dp_partition.legacy import BatchDimAnalyzer as BatchDimAnalyzer
    from dp_partition.legacy import build_data_parallel_strategies as build_data_parallel_strategies
    from dp_partition.legacy import mark_data_parallel_shardings as mark_data_parallel_shardings
    from dp_partition.legacy import partition_data_parallel as partition_data_parallel
    from dp_partition.legacy import partitioner as partitioner
    from dp_partition.plan.placements import DataParallelStrategy as DataParallelStrategy
    from dp_partition.plan.placements import DataParallelStyle as DataParallelStyle
    from dp_partition.plan.placements import NodeType as NodeType
    from dp_partition.plan.placements import PlacementSpec as PlacementSpec
    from dp_partition.plan.placements import PlacementStrategy as PlacementStrategy
    from dp_partition.plan.placements import TupleStrategy as TupleStrategy
    from dp_partition.plan.plan import Batch as Batch
    from dp_partition.plan.plan import PartitionPlan as PartitionPlan
    from dp_partition.runtime.state import StepInterrupted as StepInterrupted

__all__ = [
    "distribute",
    "compile",
    "DistributedStep",
    "CompiledStep",
    "Batch",
    "PartitionPlan",
    "DataParallelStyle",
    "NodeType",
    "PlacementSpec",
    "PlacementStrategy",
    "DataParallelStrategy",
    "TupleStrategy",
    "gradients_tagging",
    "build_data_parallel_strategies",
    "mark_data_parallel_shardings",
    "partitioner",
    "partition_data_parallel",
    "BatchDimAnalyzer",
    "legacy",
    "estimate",
    "Estimate",
    "StepInterrupted",
    "PlanError",
    "Problem",
]

_MODULES = {
    "api": "distribute compile DistributedStep CompiledStep",
    "plan.plan": "Batch PartitionPlan",
    "plan.placements": "DataParallelStyle NodeType PlacementSpec PlacementStrategy DataParallelStrategy TupleStrategy",
    "capture.phases": "gradients_tagging",
    "legacy": "build_data_parallel_strategies mark_data_parallel_shardings partitioner "
    "partition_data_parallel BatchDimAnalyzer",
    "cost_estimate": "estimate Estimate",
    "runtime.state": "StepInterrupted",
    "_shared.problems": "PlanError Problem",
}
_names = {module: names.split() for module, names in _MODULES.items()}
__getattr__, __dir__ = lazy_exports(__name__, _names, ("legacy",))
