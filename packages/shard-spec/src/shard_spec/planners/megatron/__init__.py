"""Tensor parallelism by structure. Recognisers propose blocks; `block_simulator` gives evidence. `planner` decides."""

from shard_spec.planners.megatron.blocks import Cut, Evidence, TPBlock, TPBlockKind
from shard_spec.planners.megatron.planner import Analysis, MegatronPlanner

__all__ = ["MegatronPlanner", "Analysis", "TPBlock", "TPBlockKind", "Cut", "Evidence"]
