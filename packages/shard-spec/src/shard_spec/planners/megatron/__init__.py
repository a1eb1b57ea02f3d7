"""Tensor parallelism by structure: `planner` decides, `analysis` collects what the recognisers find.

Values (`units`, `linear`, `heads`, `names`), then recognisers (`attention`, `mlp`, `others`), then evidence (`probe`
before, `verify` after the fact).
"""

from shard_spec.planners.megatron.analysis import Analysis
from shard_spec.planners.megatron.blocks import Cut, Evidence, TPBlock, TPBlockKind
from shard_spec.planners.megatron.planner import MegatronPlanner
from shard_spec.planners.megatron.verify import verify_units

__all__ = ["MegatronPlanner", "Analysis", "TPBlock", "TPBlockKind", "Cut", "Evidence", "verify_units"]
