"""Tensor parallelism by structure: recognisers propose blocks, `planner` collects them and decides.

Values (`blocks`, `linear`, `names`), then recognisers (`attention`, `mlp`, `inner`, `others`), then evidence
(`shard_spec.planners.block_simulator`).
"""

from shard_spec.planners.megatron.blocks import Cut, Evidence, TPBlock, TPBlockKind
from shard_spec.planners.megatron.planner import Analysis, MegatronPlanner

__all__ = ["MegatronPlanner", "Analysis", "TPBlock", "TPBlockKind", "Cut", "Evidence"]
