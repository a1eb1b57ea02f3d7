"""Acting: scatter, swap, hook. The only part of this package that communicates."""

from shard_spec.acting.apply import apply_plan
from shard_spec.acting.handle import ShardHandle
from shard_spec.acting.module import shard_module, shard_parameter

__all__ = ["ShardHandle", "apply_plan", "shard_module", "shard_parameter"]
