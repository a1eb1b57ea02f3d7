"""Metadata of a rank's tensors: shape, dtype, layout, ties; and modules on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import PLAIN_TYPES, dtensor_local, is_fake, plain_locals, storage_key, waited_for
from shard_reshard.execution.checks import memory_of
from shard_reshard.group import GroupInfo, data_device
from shard_reshard.layout.parse import LayoutLike, layout_mismatches, own_layout, resolve_layout
from shard_reshard.layout.shard_map import ShardMap, dtype_name
from shard_reshard.state_dict.plan import RankMeta, TensorMeta


def tensors_of(given: torch.nn.Module | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the tensors of a module or mapping; parameters of a module keep their ``_sharding_info``."""
    if given is None:
        return {}
    if isinstance(given, torch.nn.Module):
        tensors = given.state_dict(keep_vars=True)  # first: FSDP2 shards a module again that a forward has gathered
        everything: dict[str, Any] = dict(given.named_buffers(remove_duplicate=False))
        everything.update(given.named_parameters(remove_duplicate=False))
        return {name: value for name, value in everything.items() if name in tensors}
    return dict(given)


def collect_metadata(
    state_dict: Mapping[str, Any],
    outs: Mapping[str, Any],
    src_layouts: Mapping[str, LayoutLike],
    shapes: Mapping[str, Any],
    members: GroupInfo,
) -> RankMeta:
    """Collect the metadata of source and destination tensors, and their problems."""
    tensors: list[Any] = [*state_dict, *outs]
    strange = [name for name in tensors if not isinstance(name, str)]
    if strange:
        raise PlanError(
            Problem("invalid-argument", "state_dict", found=repr(strange[0]), hint="names of tensors are text")
        )
    problems: list[Problem] = []
    sources: dict[str, TensorMeta] = {}
    known_outs: dict[str, TensorMeta] = {}
    alike: dict[ShardMap | None, ShardMap | None] = {}  # equal layouts as one object, pickled once
    others = {name: value for name, value in outs.items() if isinstance(value, torch.Tensor)}
    for table, given_tensors in ((sources, state_dict), (known_outs, others)):
        for name, value in given_tensors.items():
            given_layout = (src_layouts.get(name), shapes.get(name)) if table is sources else (None, None)
            try:
                metadata = tensor_metadata(name, value, *given_layout, members)
                table[name] = metadata._replace(layout=alike.setdefault(metadata.layout, metadata.layout))
            except Exception as error:
                listed = problems_of(error)
                problems += [p.named(name) for p in listed]
    elsewhere = tuple(name for name in src_layouts if name not in state_dict)
    return RankMeta(_tied(sources, state_dict), _tied(known_outs, outs), tuple(problems), elsewhere)


def tensor_metadata(name: str, value: Any, layout: LayoutLike | None, shape: Any, members: GroupInfo) -> TensorMeta:
    if not isinstance(value, torch.Tensor):
        reason = f"a {type(value).__qualname__}"
        raise PlanError(Problem("wrong-type", name, found=reason, hint="leave it out of the state dict"))
    if value.is_nested or value.layout is not torch.strided:
        reason = "a nested tensor" if value.is_nested else f"a {value.layout} tensor"
        raise PlanError(Problem("unsupported-tensor", name, found=reason, hint="only dense tensors can be moved"))
    if layout is None:  # declared by the tensor, or plain
        own = own_layout(name, value, members.to_group)  # None: a full tensor
        full = tuple(value.shape) if own is None else own.shape
        if shape is not None and tuple(shape) != full:
            reason, hint = f"shapes={tuple(shape)}, the tensor is of {full}", "say how it is sharded in src_layouts"
            raise PlanError(Problem("shape-mismatch", name, found=reason, hint=hint))
        return TensorMeta(full, dtype_name(value.dtype), own, name, value.is_meta)
    bound = resolve_layout(layout, shape, members.to_group)
    differs = layout_mismatches(name, value, bound, members)
    if differs:
        raise PlanError(differs)
    return TensorMeta(bound.shape, dtype_name(value.dtype), bound, name, value.is_meta)


def _tied(known: dict[str, TensorMeta], tensors: Mapping[str, Any]) -> dict[str, TensorMeta]:
    """Mark tensors that are one memory and one shard."""
    first: dict[object, str] = {}
    tied_to: dict[str, str] = {}
    for name in sorted(known):
        local = local_tensor(tensors[name])
        if local.numel() and not is_fake((local,)):
            # On meta every tensor has address 0.
            place = (storage_key(local), local.storage_offset()) if local.is_meta else ()
            tied_to[name] = first.setdefault((place, *memory_of(local), *known[name][:3]), name)
    return {name: meta._replace(tied_to=tied_to.get(name, name)) for name, meta in known.items()}


def local_tensor(value: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, else the tensor itself; detached."""
    local = dtensor_local(value)
    if local is None:
        local = value if type(value) in PLAIN_TYPES or not hasattr(value, "to_local") else value.to_local()
    if not isinstance(local, torch.Tensor):
        reason = f"a {type(value).__qualname__}"
        raise PlanError(Problem("wrong-type", found=reason, hint="leave it out of the state dict"))
    if type(local) not in PLAIN_TYPES:
        if getattr(local, "_sharding_info", None) is not None:
            local = local.as_subclass(torch.Tensor)  # such a class may report the global shape
        local = waited_for(local)
    return local.detach() if local.requires_grad else local


def local_tensors(outs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the local tensors of all tensors; other values of a mapping are left out."""
    locals_ = plain_locals(list(outs.values()))  # fast path of most state dicts
    if locals_ is not None:
        return dict(zip(outs, locals_, strict=True))
    return {name: local_tensor(value) for name, value in outs.items() if isinstance(value, torch.Tensor)}


def device_of(state_dict: Mapping[str, Any], outs: Mapping[str, Any], members: GroupInfo) -> torch.device:
    """Return the device of the tensors; the group's if none has memory."""
    for value in (*state_dict.values(), *outs.values()):
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return local_tensor(value).device
    return data_device(members.group)


def declared_mismatches(
    tensors: Mapping[str, Any], wanted: Callable[[str], ShardMap | None], members: GroupInfo
) -> list[Problem]:
    """Report tensors that declare another layout than the planned one, even of equal local shape."""
    problems: list[Problem] = []
    for name, value in tensors.items():
        if hasattr(value, "device_mesh") or getattr(value, "_sharding_info", None) is not None:
            layout = wanted(name)
            problems += [] if layout is None else layout_mismatches(name, value, layout, members)
    return problems
