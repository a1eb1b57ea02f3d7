"""The two calls for DDP around tensor parallelism: bridge, or bridge and wrap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ddp_bridge._shared.problems import PlanError, Problem, raise_problems
from tp_ddp_bridge._torch_compat import flatten_axes
from tp_ddp_bridge.consistency.replicas import (
    Scope,
    all_replica_problems,
    data_axes,
    mixing_problems,
    raise_on_all_ranks,
    shard_problems,
    structure_lines,
)
from tp_ddp_bridge.ddp import BridgedDDP, guard_ddp, guard_of, tensor_ranks
from tp_ddp_bridge.layout import tensor_groups
from tp_ddp_bridge.module.transform import bridging_problems, is_bridged, survey, transform, undo_dp_transform
from tp_ddp_bridge.optim.elementwise import check_steps
from tp_ddp_bridge.optim.state import as_list

M = TypeVar("M", bound=nn.Module)


def pre_dp_module_transform(module: M, *, optimizers: Iterable[Optimizer] | Optimizer = ()) -> M:
    """Prepare a tensor-parallel module for ``DistributedDataParallel``.

    Local leaves permanently replace all DTensor parameters and buffers; reading one as an attribute gives a DTensor
    of the same layout. Names, order, ties, ``requires_grad``, gradients, user attributes and gradient hooks stay.
    Calling it again changes nothing, except that new DTensors, and ``optimizers`` left out
    before, are bridged too. Communicates nothing, unless a gradient or optimizer state has another layout than
    its parameter.

    From now on every DDP around leaves is guarded in this process, and every optimizer with shards is tried at
    its first step.

    Args:
        module: Changed in place. Its parameters may come from torch's ``parallelize_module``, tp-styles, or by hand.
        optimizers: Optimizers with DTensor parameters of ``module``; re-pointed in place, their state is kept.

    Returns:
        ``module``.

    Raises:
        PlanError: All problems in one error; ``module`` and ``optimizers`` are unchanged.
    """
    guard_ddp()
    check_steps()
    return transform(module, as_list(optimizers))


_pre_dp_module_transform = pre_dp_module_transform  # its name in torch


@contextmanager
def dp_bridge(module: M, *, optimizers: Iterable[Optimizer] | Optimizer = ()) -> Iterator[M]:
    """Bridge ``module`` for a ``with`` block, also one that raises; arguments as above."""
    listed = as_list(optimizers)
    pre_dp_module_transform(module, optimizers=listed)
    try:
        yield module
    finally:
        undo_dp_transform(module, optimizers=listed)


def wrap_ddp(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    **ddp_kwargs: Any,
) -> DistributedDataParallel:
    """Bridge ``module`` and wrap it in ``DistributedDataParallel`` over the ranks with the same shards.

    Before DDP broadcasts anything, the ranks compare shards and values: members of the data-parallel group must hold
    the same shards, and replicated parameters must be equal on tensor-parallel ranks, bit for bit. They
    raise together: all ranks of ``mesh`` if it has several axes, else all ranks connected by the groups.

    Args:
        module: A tensor-parallel module, bridged or not.
        mesh: A mesh with the data axis: the 2-D mesh around the tensor-parallel mesh, or the data axis
            alone. All axes without parameters are data axes (several are flattened into one).
        group: Instead of ``mesh``, the process group of ranks with the same shards.
        optimizers: As in ``pre_dp_module_transform``.
        **ddp_kwargs: Passed to ``DistributedDataParallel`` unchanged.

    Returns:
        The DDP. Its state dict has DTensors of global shape.

    Raises:
        PlanError: The problems of all ranks, on all ranks. Nothing was changed and nothing was broadcast.
        TypeError: A DDP argument names the group in another way.
    """
    _check_arguments(mesh, group, ddp_kwargs)
    listed = as_list(optimizers)
    surveyed = survey(module)
    problems = bridging_problems(surveyed, listed)
    data_group, group_problems = _data_group(module, mesh, group)
    problems += group_problems
    if mesh is not None and mesh.ndim > 1:
        scope: Scope = [mesh]
    else:  # from arguments of all ranks; wrong groups are wrong on each of them
        raise_problems(problems if data_group is None else (), "no data-parallel group")
        scope = [cast(dist.ProcessGroup, data_group), *tensor_groups(module.parameters())]

    # In this order: every exchange is one that all ranks make, because the one before has shown that they can.
    settings = sorted(item for item in ddp_kwargs.items() if isinstance(item[1], int | float | str | None))
    lines = [f"{name}={value!r}" for name, value in settings]  # buckets are cut by them
    raise_on_all_ranks(scope, "wrap_ddp", problems, [*lines, *structure_lines(module)])
    assert data_group is not None  # else there were problems
    raise_on_all_ranks(scope, "wrap_ddp", shard_problems(module, data_group))
    tensors = (*module.named_parameters(), *module.named_buffers())
    differences = all_replica_problems(tensors, tensor_groups(module.parameters()))
    raise_on_all_ranks(scope, "wrap_ddp", differences)

    bridged_before = is_bridged(module)
    pre_dp_module_transform(module, optimizers=listed)
    try:
        ddp = BridgedDDP(module, process_group=data_group, **ddp_kwargs)
    except Exception:  # leaves no half-wrapped module
        if not bridged_before:
            undo_dp_transform(module, optimizers=listed)
        raise
    guard_of(ddp).scope = scope
    return ddp


def _check_arguments(mesh: Any, group: Any, ddp_kwargs: dict[str, Any]) -> None:
    for name in ("process_group", "device_mesh"):
        if name in ddp_kwargs:
            raise TypeError(f"wrap_ddp() takes the data-parallel ranks as mesh= or group=, not as {name}=")
    if (mesh is None) == (group is None):
        code, count = ("missing-mesh", "neither") if mesh is None else ("conflicting-arguments", "both")
        raise PlanError(
            Problem(
                code,
                "mesh, group",
                found=f"{count} of them given",
                hint="name the data-parallel ranks: mesh= with a data axis (the 2-D mesh), or group=, one of them",
            )
        )
    if not isinstance(mesh, DeviceMesh | None) or not isinstance(group, dist.ProcessGroup | None):
        raise PlanError(
            Problem(
                "wrong-type",
                "mesh, group",
                found=f"{mesh or group!r:.100}",
                hint="mesh= takes a DeviceMesh, group= a process group, as mesh.get_group('dp') returns it",
            )
        )
    if mesh is not None and mesh.get_coordinate() is None:
        raise PlanError(
            Problem(
                "rank-outside-mesh",
                "mesh",
                found=f"rank {dist.get_rank()} is not in it",
                hint="call it on the mesh's ranks only",
            )
        )


def _data_group(
    module: nn.Module, mesh: DeviceMesh | None, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, list[Problem]]:
    """Return the group of ranks with this one's shards, or problems; communicates nothing."""
    rank, ranks_by_name = dist.get_rank(), tensor_ranks(module)
    if mesh is None:
        assert group is not None
        mixing = mixing_problems(rank, frozenset(dist.get_process_group_ranks(group)), ranks_by_name)
        return (None if mixing else group), mixing
    groups = [mesh.get_group(index) for index in range(mesh.ndim)]
    named = dict(zip(mesh.mesh_dim_names or (f"axis{index}" for index in range(mesh.ndim)), groups, strict=True))
    axes = {name: frozenset(dist.get_process_group_ranks(each)) for name, each in named.items()}
    names, problems = data_axes(rank, axes, ranks_by_name)
    if problems:
        return None, list(problems)
    return flatten_axes(mesh, names).get_group() if len(names) > 1 else named[names[0]], []
