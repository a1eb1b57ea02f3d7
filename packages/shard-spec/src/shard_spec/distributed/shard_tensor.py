"""One tensor scattered from one rank: what a spec's ``shard`` does, without a module around it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.distributed.mesh_cache import GroupRef, MeshCache
from shard_spec.distributed.parameter_format import ParameterFormat, choose_format
from shard_spec.distributed.rank_state import RankState, capture_errors, group_or_default, raise_on_all_ranks
from shard_spec.distributed.scatter import scatter
from shard_spec.layout.layout import Layout


def shard_tensor(
    tensor: torch.Tensor,
    place: Callable[[tuple[int, ...]], tuple[Layout, torch.device | None]],
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> DTensor:
    """Scatter one tensor from ``src_rank`` of the group; a collective. The tensor itself is left alone.

    Args:
        tensor: The full tensor on the source; its shape and dtype on every rank.
        place: Global shape -> layout over the ranks of the group, and this rank's device where one is named.
        src_rank: Rank in the group that has the values.
        process_group: Default: the default group.

    Raises:
        PlanError: Before anything moved, on every rank.
    """
    group = group_or_default(process_group)
    planned, problems = capture_errors(lambda: _planned(tensor, place, src_rank, group))
    lines: tuple[str, ...] = ()
    if planned is not None:
        layout, device = planned
        frozen = "" if tensor.requires_grad else ", frozen"
        where = f"{layout} on ranks {list(layout.mesh.ranks)}, source {src_rank}, on {device.type}"
        lines = (f"tensor {tensor.dtype} {list(tensor.shape)}{frozen} -> {where}",)
    raise_on_all_ranks(group, RankState(lines, problems), "shard")
    assert planned is not None
    layout, device = planned
    shape = tuple(tensor.shape)
    meshes = MeshCache(GroupRef(group), device.type)
    meshes.prepare([layout])
    full = tensor.detach() if dist.get_rank(group) == src_rank else None
    local = scatter(full, layout, shape, tensor.dtype, device, group, src_rank)
    value = as_dtensor(local, layout, shape, "tensor", meshes)
    value.requires_grad_(tensor.requires_grad)
    return value


def _planned(
    tensor: object,
    place: Callable[[tuple[int, ...]], tuple[Layout, torch.device | None]],
    src_rank: int,
    group: dist.ProcessGroup,
) -> tuple[Layout, torch.device]:
    """Return where the shards go; sends nothing."""
    if not isinstance(tensor, torch.Tensor):
        found = f"{tensor!r:.200} of type {type(tensor).__qualname__}"
        raise PlanError(Problem("wrong-type", "tensor", found=found, hint="give the full tensor"))
    shape, ranks = tuple(tensor.shape), tuple(dist.get_process_group_ranks(group))
    layout, device = place(shape)
    problems = [*source_problems(src_rank, len(ranks)), *rank_problems("tensor", tuple(layout.mesh.ranks), ranks)]
    expression = choose_format(layout, shape, "tensor")
    problems += [expression] if isinstance(expression, Problem) else []
    if tensor.is_meta and dist.get_rank(group) == src_rank:
        hint = "give the source rank real values; only the other ranks may have meta tensors"
        problems.append(Problem("no-data", "tensor", found="a meta tensor on src_rank", hint=hint))
    raise_problems(problems)
    return layout, device or (group_device(group) if tensor.is_meta else tensor.device)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the kind of device that the group communicates on."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def source_problems(src_rank: object, size: int) -> list[Problem]:
    """Return the problem of a source that is no rank of the group."""
    if isinstance(src_rank, int) and not isinstance(src_rank, bool) and 0 <= src_rank < size:
        return []
    hint = f"a rank in the group, 0 to {size - 1}"
    return [Problem("invalid-argument", "src_rank", found=repr(src_rank), hint=hint)]


def as_dtensor(local: torch.Tensor, layout: Layout, shape: tuple[int, ...], name: str, meshes: MeshCache) -> DTensor:
    """Return this rank's shard as a DTensor."""
    expression = choose_format(layout, shape, name)
    assert isinstance(expression, ParameterFormat)  # planned
    stride = torch.empty(shape, device="meta").stride()
    mesh = meshes.mesh_of(layout)
    return DTensor.from_local(
        local, mesh, expression.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def rank_problems(name: str, named: tuple[int, ...], ranks: tuple[int, ...]) -> list[Problem]:
    """Return the problems of a layout that does not name every rank of the group."""
    outside = sorted(set(named) - set(ranks))
    missing = sorted(set(ranks) - set(named))
    problems = []
    if outside:
        found, hint = f"ranks {outside} are not in the group {list(ranks)}", "name global ranks of the group"
        problems.append(Problem("rank-outside-mesh", name, found=found, hint=hint))
    if missing:
        found = f"ranks {missing} of the group hold nothing"
        hint = "name every rank of the group once, or pass a smaller process_group"
        problems.append(Problem("rank-outside-mesh", name, found=found, hint=hint))
    return problems
