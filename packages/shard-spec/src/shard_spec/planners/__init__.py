"""Planners: from a module to a `ShardingPlan`. All are `ShardingPlanner`s; `compose` puts them one after the other."""

from shard_spec.planners.base import (
    ComposedPlanner,
    Decisions,
    LayoutPlanner,
    OptimalityBound,
    PlannedSharding,
    ShardingPlanner,
    compose,
)
from shard_spec.planners.fully_shard import FullyShardPlanner
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
]
