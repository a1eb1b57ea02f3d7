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
    from dp_partition import legacy
    from dp_partition._shared.problems import PlanError, Problem
    from dp_partition.api import CompiledStep, DistributedStep, compile, distribute
    from dp_partition.capture.phases import gradients_tagging
    from dp_partition.cost_estimate import Estimate, estimate
    from dp_partition.legacy import (
        BatchDimAnalyzer,
        build_data_parallel_strategies,
        mark_data_parallel_shardings,
        partition_data_parallel,
        partitioner,
    )
    from dp_partition.plan.placements import (
        DataParallelStrategy,
        DataParallelStyle,
        NodeType,
        PlacementSpec,
        PlacementStrategy,
        TupleStrategy,
    )
    from dp_partition.plan.plan import Batch, PartitionPlan
    from dp_partition.runtime.state import StepInterrupted

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
