"""Data axes of a mesh: no process group."""

from __future__ import annotations

import torch
from tp_ddp_bridge.consistency.replicas import data_axes, mixing_problems


def mesh_axes(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> dict[str, frozenset[int]]:
    """The axes of a mesh over consecutive ranks, as ``rank`` sees them."""
    table = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    place = (table == rank).nonzero()[0].tolist()
    axes = {}
    for index, name in enumerate(names):
        line = table[tuple(slice(None) if axis == index else at for axis, at in enumerate(place))]
        axes[name] = frozenset(line.tolist())
    return axes


def test_data_axes_of_every_rank_of_every_mesh() -> None:
    num_ranks = 0
    for shape, names, tensor, expected in (
        ((2, 2), ("dp", "tp"), {"tp"}, ("dp",)),
        ((4, 1), ("dp", "tp"), {"tp"}, ("dp",)),
        ((1, 4), ("dp", "tp"), {"tp"}, ("dp",)),
        ((1, 1), ("dp", "tp"), {"tp"}, ("dp",)),
        ((2, 2, 2), ("dp", "cp", "tp"), {"tp"}, ("dp", "cp")),
        ((2, 2, 2), ("dp", "a", "b"), {"a", "b"}, ("dp",)),
        ((8, 125), ("dp", "tp"), {"tp"}, ("dp",)),
        ((4,), ("dp",), set(), ("dp",)),
    ):
        for rank in range(int(torch.tensor(shape).prod())):
            axes = mesh_axes(shape, names, rank)
            tensor_ranks = {f"w_{name}": ranks for name, ranks in axes.items() if name in tensor}
            if len(tensor) == 2:
                tensor_ranks = {"w": frozenset(r for r in range(8) if r // 4 == rank // 4)}
            data, problems = data_axes(rank, axes, tensor_ranks)
            assert data == expected and problems == (), (shape, rank, data)
            num_ranks += 1
    assert num_ranks == 4 + 4 + 4 + 1 + 8 + 8 + 1000 + 4


def test_axes_that_mix() -> None:
    axes = mesh_axes((2, 2), ("dp", "tp"), 1)
    everything = frozenset(range(4))
    data, problems = data_axes(1, axes, {"w": everything})
    assert data == () and problems[0].code == "missing-mesh"
    only = mixing_problems(1, frozenset({1, 3}), {"w": frozenset({0, 1}), "v": frozenset({1, 2, 3})})
    assert [problem.name for problem in only] == ["v"] and only[0].code == "mesh-mismatch" and "[1, 3]" in only[0].found
    wide = {"odd": frozenset({0, 1, 2})}
    data, problems = data_axes(1, wide, {"w": frozenset({0, 1})})
    assert data == () and problems[0].code == "mesh-mismatch" and problems[0].axis == "odd"
