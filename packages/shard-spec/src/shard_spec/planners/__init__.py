"""Planners: from a module to a `ShardingPlan`."""
