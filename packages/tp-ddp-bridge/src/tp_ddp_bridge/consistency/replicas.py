"""Comparison of ranks: the same shards, and bit-equal values of replicas.

Data axes of a mesh, with the same shards along them. Pure: global ranks alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ddp_bridge._shared.consensus import (
    all_gather_header,
    assert_consistent,
    named_collective,
    ranks_of,
    tensor_hash,
)
from tp_ddp_bridge._shared.problems import PlanError, Problem, raise_problems
from tp_ddp_bridge._torch_compat import local_of
from tp_ddp_bridge.layout import is_replicated_tag, layout_of


def data_axes(
    rank: int, axes: Mapping[str, frozenset[int]], tensor_ranks: Mapping[str, frozenset[int]]
) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """Find the axes with copies of the same shards along them.

    Args:
        rank: This global rank.
        axes: For every axis of the user's mesh, the global ranks along it, this rank among them.
        tensor_ranks: For every distributed tensor, the global ranks of its mesh.

    Returns:
        Names of the data axes, and problems: an axis that is neither data nor tensor parallel, or no data axis at all.
    """
    connected = frozenset({rank}).union(*tensor_ranks.values())
    problems: list[Problem] = []
    names: list[str] = []
    for name, ranks in axes.items():
        if ranks & connected == {rank}:  # meets no other rank of a sharded tensor
            names.append(name)
        elif not ranks <= connected:
            problems += mixing_problems(rank, ranks, tensor_ranks, name)
    if len(names) > 1:  # an axis of one rank is no data axis beside a real one
        names = [name for name in names if len(axes[name]) > 1] or names[:1]
    if not names and not problems:
        problems.append(
            Problem(
                "missing-mesh",
                "mesh",
                found=f"every axis of the mesh ({', '.join(axes)}) is tensor parallel",
                hint="pass the mesh with the data axis, such as the 2-D mesh that the tensor-parallel one was sliced"
                " from",
            )
        )
    return tuple(names), tuple(problems)


def mixing_problems(
    rank: int, data_ranks: frozenset[int], tensor_ranks: Mapping[str, frozenset[int]], axis: str | None = None
) -> list[Problem]:
    """Return a problem for every tensor whose mesh has another rank of the data-parallel group."""
    reason = "its mesh runs over ranks {}, the data-parallel group over {}: DDP would average different shards"
    return [
        Problem(
            "mesh-mismatch",
            name,
            axis=axis,
            found=reason.format(sorted(ranks), sorted(data_ranks)),
            hint="put the parameter on the tensor-parallel mesh (mesh['tp']), or pass the group of ranks with the same"
            " shards",
        )
        for name, ranks in tensor_ranks.items()
        if ranks & data_ranks != {rank}
    ]


Scope: TypeAlias = Sequence[DeviceMesh | dist.ProcessGroup]
"""Ranks that raise together: of a mesh, or all that groups connect, in one order."""


def raise_on_all_ranks(scope: Scope, subject: str, problems: Sequence[Problem], lines: Sequence[str] = ()) -> None:
    """Return on every rank, or raise on every rank; a collective.

    Args:
        scope: For example the data-parallel group and then the tensor-parallel ones: a problem of one rank reaches its
            peers in the first, and theirs in the next.
        subject: The call, for messages.
        problems: All problems of this rank.
        lines: Metadata to be equal on all ranks.

    Raises:
        PlanError: The problems of all ranks.
    """
    error: Exception | None = PlanError(problems) if problems else None
    for where in scope:
        try:
            assert_consistent(where, subject, lines, error)
        except Exception as agreed:
            error = agreed  # also for the next group: its other members do not have it yet
    if not isinstance(error, PlanError):
        if error is not None:
            raise error
        return
    merged: dict[Problem, Problem] = {}  # several groups may have found the same, each on its ranks
    for problem in error.problems:
        present = merged.setdefault(replace(problem, found=""), problem)
        if problem.found not in present.found:
            merged[replace(problem, found="")] = replace(present, found=f"{present.found}; {problem.found}")
    raise PlanError(merged.values(), error.summary) from None


@dataclass(eq=False)
class Replica:
    """Local values of a tensor or section, possibly held by other ranks too.

    Attributes:
        name: FQN.
        local: The local values.
        shard: The shard of each rank of the group. Ranks with equal entries hold equal values.
    """

    name: str
    local: torch.Tensor
    shard: tuple[Hashable, ...]


def check_replicas(module: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Compare, bit for bit, the values that ranks of ``group`` hold in common.

    In a tensor-parallel group these are all parameters and buffers not sharded over it, and copies of key-value
    heads; in a data-parallel group, all of them. Communicates two small all-gathers. Call it whenever ranks may have
    drifted apart.

    Args:
        module: A module, bridged or not, or a DDP.
        group: The default group if ``None``.

    Returns:
        Number of compared tensors.

    Raises:
        PlanError: On all ranks of the group alike: the different tensors with their ranks, or different
            modules.
    """
    replicas = replicas_in((*module.named_parameters(), *module.named_buffers()), ranks_of(group))
    raise_problems(replica_problems(replicas, group), "replicas differ")
    return len(replicas)


def replicas_in(tensors: Iterable[tuple[str, torch.Tensor]], ranks: Sequence[int]) -> list[Replica]:
    """Return this rank's values in common with others of ``ranks``, in the order of ``tensors``."""
    return [
        replica
        for name, tensor in tensors
        for replica in _replicas_of(name, tensor, ranks)
        if len(ranks) == 1 or len(set(replica.shard)) < len(ranks)
    ]


def _replicas_of(name: str, tensor: torch.Tensor, ranks: Sequence[int]) -> Iterator[Replica]:
    layout = layout_of(tensor)
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if layout is None:
        yield Replica(name, local, ("full",) * len(ranks))
        return
    table = layout.mesh.mesh
    places = [tuple((table == rank).nonzero()[0].tolist()) for rank in ranks if bool((table == rank).any())]
    axes = layout.sharded_axes()
    if len(places) <= 1 or not axes:  # ranks outside of the tensor's mesh hold the same as this rank
        yield Replica(name, local, ("full",) * len(ranks))
    elif len(places) == len(ranks) and layout.sections:
        (axis,) = axes
        for index, ((_, view), section) in enumerate(zip(layout.section_views(local), layout.sections, strict=True)):
            shards = tuple(place[axis] // section.copies for place in places)
            yield Replica(f"{name} section {index}", view, shards)
    else:
        shards = tuple(tuple(place[axis] for axis in axes) for place in places)
        # A mesh with only some ranks of the group: another rank would see other places.
        if len(places) == len(ranks) or len(set(shards)) == 1:
            yield Replica(name, local, shards if len(places) == len(ranks) else ("full",) * len(ranks))


def replica_problems(replicas: Sequence[Replica], group: dist.ProcessGroup | None) -> list[Problem]:
    """Compare names, shapes, dtypes, then values; a collective with equal results on all ranks."""
    lines = [
        # Different shards may be uneven.
        f"{each.name} {tuple(each.local.shape) if len(set(each.shard)) == 1 else each.shard} {each.local.dtype}"
        for each in replicas
    ]
    return _digest_problems(lines, group, "check_replicas") or _value_problems(replicas, group)


def all_replica_problems(
    tensors: Sequence[tuple[str, torch.Tensor]], groups: Iterable[dist.ProcessGroup]
) -> list[Problem]:
    """Compare what the ranks of each group hold in common, one group after another; a collective of each."""
    return [problem for group in groups for problem in replica_problems(replicas_in(tensors, ranks_of(group)), group)]


def structure_lines(module: nn.Module) -> list[str]:
    """Return one line for each parameter, equal on all ranks, data- and tensor-parallel ones."""
    lines = []
    for name, parameter in module.named_parameters():
        layout = layout_of(parameter)
        place = tuple(parameter.shape) if layout is None else f"{layout} of {tuple(layout.mesh.shape)}"
        lines.append(f"{name} {parameter.dtype} requires_grad={parameter.requires_grad} {place}")
    return lines


def shard_problems(module: nn.Module, group: dist.ProcessGroup) -> list[Problem]:
    """Compare names and shards, but not values, on the ranks of a data-parallel group.

    Returns:
        The same problems on all ranks of ``group``.
    """
    lines = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        layout = None if is_replicated_tag(tensor) else layout_of(tensor)
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        place = "" if layout is None else layout.mesh.get_coordinate()
        lines.append(f"{name} {tuple(local.shape)} {tensor.dtype} {place}")
    return _digest_problems(lines, group, "wrap_ddp")


def _digest_problems(lines: Iterable[str], group: dist.ProcessGroup | None, subject: str) -> list[Problem]:
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    digests = all_gather_header(group, digest, subject)
    if len(set(digests)) == 1:
        return []
    return [
        Problem(
            "ranks-disagree",
            "module",
            found=f"the ranks {_partition(digests, ranks_of(group))} hold different tensors, or different shards",
            hint="pass the group of the ranks with the same tensor-parallel coordinate, and the same module on all of"
            " them",
        )
    ]


def _value_problems(replicas: Sequence[Replica], group: dist.ProcessGroup | None) -> list[Problem]:
    """Compare values by their hashes."""
    ranks = ranks_of(group)
    if len(ranks) == 1 or not replicas:
        return []  # nothing to compare
    device = replicas[0].local.device
    own = torch.stack([tensor_hash(each.local).to(device) for each in replicas])  # tensors x 2
    gathered = [torch.empty_like(own) for _ in ranks]
    with named_collective("check_replicas: the comparison of hashes"):
        dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered).cpu()  # ranks x tensors x 2
    problems = []
    for index, each in enumerate(replicas):
        prints = [str(row) for row in table[:, index].tolist()]
        if len(set(zip(each.shard, prints, strict=True))) > len(set(each.shard)):
            problems.append(
                Problem(
                    "replicas-differ",
                    each.name,
                    found=f"different values on ranks {_partition(prints, ranks)}",
                    hint="initialise or load it alike on all ranks (same seed, or a broadcast); a gradient summed on"
                    " one rank alone "
                    "makes replicas drift apart",
                )
            )
    return problems


def _partition(values: Sequence[object], ranks: Sequence[int]) -> str:
    """Return ``{0, 1} and {2}``: the ranks, grouped by their values."""
    groups: dict[object, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        groups.setdefault(value, []).append(rank)
    return " and ".join("{" + ", ".join(map(str, members)) + "}" for members in groups.values())
