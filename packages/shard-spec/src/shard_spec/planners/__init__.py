"""Planners: from a module to a `ShardingPlan`. `compose` runs several in sequence."""

from shard_spec.planners.base import (
    ComposedPlanner,
    Decisions,
    ExpertParallelPlanner,
    FullyShardPlanner,
    LayoutPlanner,
    OptimalityBound,
    PlannedSharding,
    ShardingPlanner,
    StagePlanner,
    compose,
)
from shard_spec.planners.megatron import MegatronPlanner

__all__ = [
    "ShardingPlanner",
    "LayoutPlanner",
    "Decisions",
    "ComposedPlanner",
    "compose",
    "PlannedSharding",
    "OptimalityBound",
    "MegatronPlanner",
    "FullyShardPlanner",
    "ExpertParallelPlanner",
    "StagePlanner",
]
