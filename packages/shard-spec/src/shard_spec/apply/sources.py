"""Sources of values for ``plan.apply``: one rank, every rank's own copy, or an initializer."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_spec._shared.problems import Problem
from shard_spec.apply.tensors import TensorAction
from shard_spec.distributed.exchange import broadcast_, scatter, take
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import ReplicateSpec

Source: TypeAlias = Literal["scatter", "local", "meta"]
Initializer: TypeAlias = Callable[[str, torch.Tensor], object]
SOURCES = ("scatter", "local", "meta")


def scatter_to_all(
    full: torch.Tensor | None,
    layout: Layout,
    action: TensorAction,
    device: torch.device,
    group: dist.ProcessGroup,
    src: int,
    mesh: DeviceMesh,
) -> torch.Tensor:
    """Return this rank's shard: from ``src`` to each first replica, then broadcast along replicating axes.

    ``src`` sends every element once, for any number of replicas.
    """
    local = scatter(full, layout, action.shape, action.dtype, device, group, src, primaries=True)
    for axis, spec in enumerate(layout.specs):  # mesh order on all ranks
        if isinstance(spec, ReplicateSpec) and mesh.size(axis) > 1:
            broadcast_(local, mesh.get_group(axis), 0)
    return local


def local_shard(full: torch.Tensor, layout: Layout, device: torch.device, rank: int) -> torch.Tensor:
    """Copy this rank's shard; the full tensor can be freed afterwards."""
    return take(full, layout, rank).to(device).clone(memory_format=torch.contiguous_format)


# ---- meta -----------------------------------------------------------------------------------------------------------


def materialize(
    action: TensorAction,
    device: torch.device,
    rank: int,
    init: Initializer | None,
    seed: int,
) -> torch.Tensor:
    """Create this rank's shard of a meta tensor.

    Args:
        action: The tensor.
        device: Device of the shard.
        rank: Global rank.
        init: Fills a full tensor, ``init(fqn, tensor)``; None: floating shards become NaN, others 0.
        seed: Seed of the generators, with the FQN, for each tensor: the values depend neither on the layout nor on the
            rank.
    """
    assert action.layout is not None
    if init is None:
        local = torch.empty(action.layout.local_shape(rank, action.shape), dtype=action.dtype, device=device)
        return fill_nan_(local)
    full = fill_nan_(torch.empty(action.shape, dtype=action.dtype, device=device))  # unwritten entries show
    with seeded(seed, action.names[0], device), torch.no_grad():
        init(action.names[0], full)
    return local_shard(full, action.layout, device, rank)


def fill_nan_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, which cannot be mistaken for weights, or 0 for dtypes without NaN."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.zero_()


@contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed random numbers by ``seed`` and ``name`` alone; the generators are restored afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 63))
        yield


def reset_parameters_of(module: nn.Module, device: torch.device, seed: int) -> Initializer:
    """Return an initializer that calls the owning module's ``reset_parameters()``.

    The module's full tensors are created on ``device``, one module at a time, in a copy.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}

    def init(name: str, tensor: torch.Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        if path not in tensors:
            tensors.clear()  # one module's tensors at a time
            with seeded(seed, path, device):
                tensors[path] = _reset(module.get_submodule(path), device)
        tensor.copy_(tensors[path][attribute])

    return init


def _reset(owner: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    twin = copy.copy(owner)  # the module itself is unchanged until the end
    tensors: dict[str, torch.Tensor] = {}
    for table_name in ("_parameters", "_buffers"):
        table = dict(owner.__dict__[table_name])
        for name, value in table.items():
            if value is not None:
                full = torch.empty(value.shape, dtype=value.dtype, device=device)
                is_parameter = table_name == "_parameters"
                table[name] = nn.Parameter(full, requires_grad=value.requires_grad) if is_parameter else full
                tensors[name] = table[name]
        twin.__dict__[table_name] = table
    method: Any = getattr(twin, "reset_parameters", None) or twin._reset_parameters  # both spellings occur in torch
    method()  # writes to the copy's tensors
    return {name: tensor.detach() for name, tensor in tensors.items()}


def reset_problems(module: nn.Module, names: tuple[str, ...]) -> list[Problem]:
    """Report tensors of modules without ``reset_parameters``."""
    problems = []
    for name in names:
        owner = module.get_submodule(name.rpartition(".")[0])
        if not any(callable(getattr(owner, each, None)) for each in ("reset_parameters", "_reset_parameters")):
            reason = f"{type(owner).__qualname__} has no reset_parameters()"
            hint = "pass init= a function of name and tensor, or load a checkpoint after init=None"
            problems.append(Problem("uninitialized-buffer", name, found=reason, hint=hint))
    return problems
