"""Conversions from and to torch's own spec objects, which are accepted like ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.specs.base import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, as_shard
from shard_spec.specs.shards import RemoteDevice, Sharder, ShardMetadata


def from_torch(value: object) -> Any:
    """Convert an object of ``torch.distributed._shard`` to ours.

    Args:
        value: A chunk or enumerable sharding spec, a shard metadata, or a remote device of torch.

    Returns:
        The equivalent object of this package.

    Raises:
        PlanError: ``wrong-type`` for anything else, a subclass of torch's ``ShardingSpec`` of one's own included.
    """
    kind = _torch_compat.shard_kind(value)  # None before torch's module is imported
    spec: Any = value
    if kind == "chunk":
        return ChunkShardingSpec(spec.dim, spec.placements)
    if kind == "enumerable":
        return EnumerableShardingSpec(spec.shards)
    if kind == "shard":
        return as_shard(spec)
    if kind == "device":
        return RemoteDevice(spec)
    raise PlanError(unknown_spec("", value))


def to_torch(value: ShardingSpec | ShardMetadata | RemoteDevice, shape: Sequence[int] | None = None) -> Any:
    """Convert one of our objects to torch's.

    Args:
        value: A spec, a shard or a device.
        shape: Global shape; needed for a ``ShardingSpec`` subclass of your own, which becomes an enumerable spec.

    Raises:
        PlanError: ``missing-argument`` if it is needed and missing, ``wrong-type`` for other objects.
    """
    if isinstance(value, RemoteDevice):
        return _torch_compat.torch_class("device")(str(value))
    if isinstance(value, ShardMetadata):
        placement = None if value.placement is None else to_torch(value.placement)
        return _torch_compat.torch_class("shard")(list(value.shard_offsets), list(value.shard_sizes), placement)
    if isinstance(value, ChunkShardingSpec):
        return _torch_compat.torch_class("chunk")(value.dim, [to_torch(device) for device in value.placements])
    if isinstance(value, EnumerableShardingSpec):
        return _torch_compat.torch_class("enumerable")([to_torch(shard) for shard in value.shards])
    if isinstance(value, ShardingSpec):
        if shape is None:
            reason = f"a {type(value).__qualname__}, which torch does not know"
            raise PlanError(Problem("missing-argument", "shape", found=reason, hint="pass shape=, the global shape"))
        return to_torch(EnumerableShardingSpec(value.shards_for(shape)))  # torch has no subclass of ours
    raise PlanError(unknown_spec("", value))


def as_spec(value: object) -> ShardingSpec | None:
    """Convert a spec, ours or torch's, to one of ours; None for other values."""
    if isinstance(value, ShardingSpec):
        return value
    if _torch_compat.shard_kind(value) in ("chunk", "enumerable"):
        spec: ShardingSpec = from_torch(value)
        return spec
    return None


def as_sharder(value: object) -> Sharder | None:
    """Return ``value`` if it is a sharder, ours or torch's; else None."""
    if isinstance(value, Sharder):
        return value
    if _torch_compat.shard_kind(value) == "sharder":
        sharder: Any = value  # torch's class has the same one method
        return sharder  # type: ignore[no-any-return]  # ruled out by its kind
    return None


def unknown_spec(name: str, value: object) -> Problem:
    """Return the problem of an object that is no spec."""
    hint = "use ChunkShardingSpec, EnumerableShardingSpec, a subclass of shard_spec.ShardingSpec, or a Sharder"
    return Problem("wrong-type", name, found=f"{value!r} of type {type(value).__qualname__}", hint=hint)
