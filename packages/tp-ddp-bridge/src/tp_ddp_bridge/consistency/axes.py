"""Data axes of a mesh: along which axes ranks hold the same shards. Pure: sets of global ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tp_ddp_bridge._shared.problems import Problem


@dataclass(frozen=True)
class AxisRanks:
    """One axis of the user's mesh, as this rank sees it.

    Attributes:
        name: Name of the axis, or ``axisN``.
        ranks: Global ranks along it, this rank among them.
    """

    name: str
    ranks: frozenset[int]


def data_axes(
    rank: int, axes: Iterable[AxisRanks], tensor_ranks: Mapping[str, frozenset[int]]
) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """Find the axes along which ranks hold copies of the same shards.

    Args:
        rank: This global rank.
        axes: The axes of the user's mesh.
        tensor_ranks: For every distributed tensor, the global ranks of its mesh.

    Returns:
        Names of the data axes, and problems: an axis that is neither data nor tensor parallel, or no data axis at all.
    """
    axes = tuple(axes)
    connected = frozenset(rank for ranks in tensor_ranks.values() for rank in ranks) | {rank}
    problems: list[Problem] = []
    names: list[str] = []
    for axis in axes:
        if axis.ranks & connected == {rank}:
            names.append(axis.name)
        elif not axis.ranks <= connected:
            problems += mixing_problems(rank, axis.ranks, tensor_ranks, axis.name)
    if len(names) > 1:  # an axis of one rank is no data axis beside a real one
        names = [axis.name for axis in axes if axis.name in names and len(axis.ranks) > 1] or names[:1]
    if not names and not problems:
        problems.append(
            Problem(
                "missing-mesh",
                "mesh",
                found=f"every axis of the mesh ({', '.join(axis.name for axis in axes)}) is tensor parallel",
                hint="pass the mesh that has the data axis, for example the 2-D mesh that the tensor-parallel one "
                "was sliced from",
            )
        )
    return tuple(names), tuple(problems)


def mixing_problems(
    rank: int, data_ranks: frozenset[int], tensor_ranks: Mapping[str, frozenset[int]], axis: str | None = None
) -> list[Problem]:
    """Return a problem for every tensor whose mesh shares more than this rank with the data-parallel group."""
    return [
        Problem(
            "mesh-mismatch",
            name,
            axis=axis,
            found=f"its mesh runs over ranks {sorted(ranks)}, the data-parallel group over {sorted(data_ranks)}: "
            f"DDP would average different shards",
            hint="put the parameter on the tensor-parallel slice (mesh['tp']), or pass the group of ranks that hold "
            "the same shards",
        )
        for name, ranks in tensor_ranks.items()
        if ranks & data_ranks != {rank}
    ]
