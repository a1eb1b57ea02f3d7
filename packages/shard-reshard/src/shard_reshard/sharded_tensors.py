"""Reshard torch's ShardedTensor; a new one comes out, the old one stays as it is."""

from __future__ import annotations

from typing import Any

from shard_spec.specs import as_spec, from_torch, to_torch

from shard_reshard import _torch_compat
from shard_reshard.agreement import tell
from shard_reshard.box_bound import BoxBound
from shard_reshard.local_tensors import as_list
from shard_reshard.members import members_of
from shard_reshard.problems import PlanError, Problem
from shard_reshard.resharder import reshard


def reshard_sharded_tensor(st: Any, spec: Any) -> Any:
    """A new ShardedTensor with the data of ``st`` under another sharding spec.

    Every rank of its process group calls. Works for several shards on a rank and for enumerable specs, which
    ``ShardedTensor.reshard`` refuses, and does not change ``st``, which that does.

    Args:
        st: A ``torch.distributed._shard.sharded_tensor.ShardedTensor``.
        spec: A chunk or enumerable spec, of shard-spec or of torch.

    Returns:
        A ``ShardedTensor`` in fresh memory.

    Raises:
        PlanError: On every rank alike, before any data moves.
    """
    if not _torch_compat.is_sharded_tensor(st):
        hint = "pass a ShardedTensor; reshard() takes local tensors, redistribute() DTensors"
        raise PlanError(Problem("not-a-sharded-tensor", "st", found=type(st).__qualname__, hint=hint))
    metadata, group = _torch_compat.sharded_tensor_parts(st)
    members = members_of(group)
    wanted = as_spec(spec)
    if wanted is None:
        hint = "a chunk or enumerable spec, of shard-spec or torch"
        tell(members, PlanError(Problem("unknown-spec", "spec", found=repr(spec), hint=hint)))
    shape = tuple(metadata.size)
    # What lies where is in the tensor's metadata, whatever spec it was made from.
    boxes: dict[int, list[Any]] = {}
    for shard in map(from_torch, metadata.shards_metadata):
        boxes.setdefault(members.to_group(shard.rank), []).append(shard.box)
    local = [shard.tensor for shard in st.local_shards()]
    moved = reshard(local or None, BoxBound(shape, boxes), wanted, shape=shape, group=group, dtype=st.dtype)
    own_rank = members.global_ranks[members.rank]
    own = [shard for shard in wanted.shards_for(shape) if shard.rank == own_rank]
    shards = [
        _torch_compat.torch_shard(tensor, to_torch(shard)) for tensor, shard in zip(as_list(moved), own, strict=True)
    ]
    return _torch_compat.make_sharded_tensor(shards, to_torch(wanted, shape), shape, group, st)
