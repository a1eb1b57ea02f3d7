"""Turn an unmodified single-device train step into a data-parallel fx graph.

`compile` is the front end. The stages it runs stand beside it for graphs that come from elsewhere: `gradients_tagging`,
`build_data_parallel_strategies`, `mark_data_parallel_shardings`, `partitioner`, and all of them as
`partition_data_parallel`. `dp_partition.legacy` has the decorator of torch 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dp_partition.__about__ import __version__
from dp_partition._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from dp_partition import legacy as legacy
    from dp_partition.capture.tagging import gradients_tagging as gradients_tagging
    from dp_partition.compiling import compile as compile
    from dp_partition.data_parallel.batch_dim import BatchDimAnalyzer as BatchDimAnalyzer
    from dp_partition.data_parallel.marking import mark_data_parallel_shardings as mark_data_parallel_shardings
    from dp_partition.data_parallel.marking import partitioner as partitioner
    from dp_partition.data_parallel.partition import partition_data_parallel as partition_data_parallel
    from dp_partition.data_parallel.strategies import build_data_parallel_strategies as build_data_parallel_strategies
    from dp_partition.estimated import Estimate as Estimate
    from dp_partition.estimated import estimate as estimate
    from dp_partition.failure import StepInterrupted as StepInterrupted
    from dp_partition.link import Link as Link
    from dp_partition.link import Machine as Machine
    from dp_partition.placements import DataParallelStrategy as DataParallelStrategy
    from dp_partition.placements import PerRank as PerRank
    from dp_partition.placements import PlacementSpec as PlacementSpec
    from dp_partition.placements import PlacementStrategy as PlacementStrategy
    from dp_partition.placements import TupleStrategy as TupleStrategy
    from dp_partition.plan import ParamPlan as ParamPlan
    from dp_partition.plan import PartitionPlan as PartitionPlan
    from dp_partition.plan import TensorInfo as TensorInfo
    from dp_partition.plan import plan_placements as plan_placements
    from dp_partition.problems import PlanError as PlanError
    from dp_partition.problems import Problem as Problem
    from dp_partition.reducing import GradientGroup as GradientGroup
    from dp_partition.reducing import bf16_compress as bf16_compress
    from dp_partition.reducing import fp16_compress as fp16_compress
    from dp_partition.settings import Batch as Batch
    from dp_partition.step import Step as Step
    from dp_partition.styles import DataParallelStyle as DataParallelStyle
    from dp_partition.styles import NodeType as NodeType
    from dp_partition.verification import Verified as Verified
    from dp_partition.verification import verify as verify

__all__ = [
    "__version__",
    "compile",
    "verify",
    "Verified",
    "Step",
    "Batch",
    "GradientGroup",
    "bf16_compress",
    "fp16_compress",
    "plan_placements",
    "PartitionPlan",
    "ParamPlan",
    "TensorInfo",
    "DataParallelStyle",
    "NodeType",
    "PlacementSpec",
    "PlacementStrategy",
    "DataParallelStrategy",
    "TupleStrategy",
    "PerRank",
    "gradients_tagging",
    "build_data_parallel_strategies",
    "mark_data_parallel_shardings",
    "partitioner",
    "partition_data_parallel",
    "BatchDimAnalyzer",
    "legacy",
    "estimate",
    "Estimate",
    "Link",
    "Machine",
    "StepInterrupted",
    "PlanError",
    "Problem",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "compiling": ("compile",),
        "verification": (
            "verify",
            "Verified",
        ),
        "step": ("Step",),
        "settings": ("Batch",),
        "reducing": (
            "GradientGroup",
            "bf16_compress",
            "fp16_compress",
        ),
        "plan": (
            "plan_placements",
            "PartitionPlan",
            "ParamPlan",
            "TensorInfo",
        ),
        "styles": (
            "DataParallelStyle",
            "NodeType",
        ),
        "placements": (
            "PlacementSpec",
            "PlacementStrategy",
            "DataParallelStrategy",
            "TupleStrategy",
            "PerRank",
        ),
        "capture.tagging": ("gradients_tagging",),
        "data_parallel.strategies": ("build_data_parallel_strategies",),
        "data_parallel.marking": (
            "mark_data_parallel_shardings",
            "partitioner",
        ),
        "data_parallel.partition": ("partition_data_parallel",),
        "data_parallel.batch_dim": ("BatchDimAnalyzer",),
        "estimated": (
            "estimate",
            "Estimate",
        ),
        "link": (
            "Link",
            "Machine",
        ),
        "failure": ("StepInterrupted",),
        "problems": (
            "PlanError",
            "Problem",
        ),
    },
    ("legacy",),
)
