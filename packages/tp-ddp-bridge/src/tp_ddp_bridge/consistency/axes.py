"""Data axes of a mesh, with the same shards along them. Pure: global ranks alone."""

from __future__ import annotations

from collections.abc import Mapping

from tp_ddp_bridge._shared.problems import Problem


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
