"""Plans of least modelled time. Each operation and tensor takes one strategy. All are optimised jointly and exactly."""

from shard_spec.optimal.model import Workload
from shard_spec.optimal.planner import OptimalPlanner

__all__ = ["OptimalPlanner", "Workload"]
