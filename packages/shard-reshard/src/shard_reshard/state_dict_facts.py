"""What a rank knows of the tensors of a state dict: shape, dtype, layout, and which are one memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from shard_reshard._torch_compat import PLAIN_TYPES, is_fake, waited_for
from shard_reshard.bind import LayoutLike, bind
from shard_reshard.dtypes import dtype_name
from shard_reshard.members import Members, data_device
from shard_reshard.problems import PlanError, Problem
from shard_reshard.state_dict_plan import Facts, Known
from shard_reshard.state_dict_told import own_layout, told_problems

VERSION_KEY = "_shard_reshard_version"


def tensors_of(given: torch.nn.Module | Mapping[str, Any] | None) -> dict[str, Any]:
    """The tensors of a module or mapping; parameters of a module keep their ``_sharding_info``."""
    if given is None:
        return {}
    if isinstance(given, torch.nn.Module):
        everything: dict[str, Any] = dict(given.named_buffers(remove_duplicate=False))
        everything.update(given.named_parameters(remove_duplicate=False))
        kept = given.state_dict(keep_vars=True)
        return {name: value for name, value in everything.items() if name in kept}
    return {name: value for name, value in given.items() if name != VERSION_KEY}


def facts_of(
    state_dict: Mapping[str, Any],
    outs: Mapping[str, Any],
    src_layouts: Mapping[str, LayoutLike],
    shapes: Mapping[str, Any],
    members: Members,
) -> Facts:
    """What this rank knows of its source and destination tensors, with the problems that it found."""
    given: list[Any] = [*state_dict, *outs]
    strange = [name for name in given if not isinstance(name, str)]
    if strange:
        raise PlanError(Problem("bad-name", "state_dict", found=repr(strange[0]), hint="names of tensors are text"))
    problems: list[Problem] = []
    for name in src_layouts:
        if name not in state_dict and state_dict:
            hint = "src_layouts names tensors of state_dict"
            problems.append(Problem("unknown-key", "src_layouts", found=repr(name), hint=hint))
    sources: dict[str, Known] = {}
    for name, value in state_dict.items():
        try:
            sources[name] = known_of(name, value, src_layouts.get(name), shapes.get(name), members)
        except PlanError as error:
            problems += [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    known_outs: dict[str, Known] = {}
    for name, value in outs.items():
        if not isinstance(value, torch.Tensor):
            continue
        try:
            known_outs[name] = known_of(name, value, None, None, members)
        except PlanError as error:
            problems += [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    return Facts(_with_ties(sources, state_dict), _with_ties(known_outs, outs), tuple(problems))


def known_of(name: str, value: Any, layout: LayoutLike | None, shape: Any, members: Members) -> Known:
    if not isinstance(value, torch.Tensor):
        found = f"a {type(value).__qualname__}"
        raise PlanError(Problem("not-a-tensor", name, found=found, hint="leave it out of the state dict"))
    if layout is None:
        own = own_layout(name, value, members.to_group)
        if own is None:
            return Known(tuple(value.shape), dtype_name(value.dtype), "", name)
        return Known(own.shape, dtype_name(value.dtype), json.dumps(own.to_json()), name)
    bound = bind(layout, shape, members.to_group)
    differs = told_problems(name, value, bound, members)
    if differs:
        raise PlanError(differs)
    return Known(bound.shape, dtype_name(value.dtype), json.dumps(bound.to_json()), name)


def _with_ties(known: dict[str, Known], tensors: Mapping[str, Any]) -> dict[str, Known]:
    """Marks tensors that are one memory."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, Known] = {}
    for name in sorted(known):
        local = local_tensor(tensors[name])
        if local.numel() and not is_fake((local,)):
            # On meta every tensor has address 0, so that one is known only by itself.
            place = id(tensors[name]) if local.is_meta else local.data_ptr()
            key = (place, local.device, local.stride(), *known[name][:3])
            tied[name] = known[name]._replace(tied_to=first.setdefault(key, name))
        else:
            tied[name] = known[name]._replace(tied_to="")  # says nothing either way, resolved below
    return {name: entry if entry.tied_to else entry._replace(tied_to=name) for name, entry in tied.items()}


def local_tensor(value: Any) -> torch.Tensor:
    """The local part of a tensor: of a DTensor its own, else the tensor; without a graph."""
    local = value if type(value) in PLAIN_TYPES or not hasattr(value, "to_local") else value.to_local()
    if not isinstance(local, torch.Tensor):
        found = f"a {type(value).__qualname__}"
        raise PlanError(Problem("not-a-tensor", found=found, hint="leave it out of the state dict"))
    if type(local) not in PLAIN_TYPES and getattr(local, "_sharding_info", None) is not None:
        local = local.as_subclass(torch.Tensor)  # such a class may give the global shape as its own
    local = local if type(local) in PLAIN_TYPES else waited_for(local)
    return local.detach() if local.requires_grad else local


def local_tensors(outs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The local parts of all that are tensors; a mapping may hold other things, which are left as they are."""
    return {name: local_tensor(value) for name, value in outs.items() if isinstance(value, torch.Tensor)}


def device_of(state_dict: Mapping[str, Any], outs: Mapping[str, Any], members: Members) -> torch.device:
    """Where the tensors lie; for a rank without any that have memory, where the group's do."""
    for value in (*state_dict.values(), *outs.values()):
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return local_tensor(value).device
    return data_device(members.group)


def stamp_version(out: torch.nn.Module | Mapping[str, Any], version: int | None) -> None:
    """Say which version a module or mapping holds; None says that it holds no complete one."""
    if isinstance(out, torch.nn.Module):
        setattr(out, VERSION_KEY, version)
    elif isinstance(out, dict) and version is None:
        out.pop(VERSION_KEY, None)  # no name that ``load_state_dict`` would not know
    elif isinstance(out, dict):
        out[VERSION_KEY] = version
