"""Acting: scatter, swap, hook. The only part of this package that communicates."""

from shard_spec.acting.handle import ShardHandle
from shard_spec.acting.module import shard_module, shard_parameter

__all__ = ["ShardHandle", "shard_module", "shard_parameter"]
