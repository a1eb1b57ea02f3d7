"""What can be wrong with a reshard: the one error and the one problem record that shard-spec defines."""

from shard_spec.problems import PlanError, Problem

__all__ = ["PlanError", "Problem"]
