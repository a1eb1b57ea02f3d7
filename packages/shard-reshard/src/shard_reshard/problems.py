"""What can be wrong with a reshard: the one error and the one problem record that shard-spec defines."""

from shard_spec import PlanError, Problem

__all__ = ["PlanError", "Problem"]
