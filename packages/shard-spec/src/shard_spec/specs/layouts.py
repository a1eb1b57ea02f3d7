"""From a spec to a layout: which mesh and which placements say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shard_spec.layout import Layout
from shard_spec.mesh import MeshSpec
from shard_spec.placements import PlacementLike, UnevenShard
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.specs.chunk import ChunkShardingSpec
from shard_spec.specs.geometry import Interval, grid_of
from shard_spec.terms import chunk

if TYPE_CHECKING:
    from shard_spec.specs.base import ShardingSpec


def spec_to_layout(spec: ShardingSpec, shape: Sequence[int]) -> Layout:
    """The layout of a tensor of ``shape`` under ``spec``: one mesh axis ``shard<dim>`` for each dim that is cut.

    Ranks lie on the mesh in the order of their shards, so a chunk spec with permuted devices gives a permuted mesh.
    Cuts as ``torch.chunk`` makes them become ``Shard``, others ``UnevenShard``.

    Raises:
        PlanError: ``several-shards-per-rank`` or ``not-a-grid`` when no mesh can say it.
    """
    shape = tuple(shape)
    held = spec.boxes(shape)
    crowded = [rank for rank, boxes in held.items() if len(boxes) > 1]
    if crowded:
        raise PlanError(_several_shards(crowded))
    ranks = tuple(held)
    if isinstance(spec, ChunkShardingSpec):
        dim = spec.normalized(len(shape)).dim
        return Layout(MeshSpec({f"shard{dim}": len(ranks)}, ranks), [f"S({dim})"])
    found = grid_of([box for (box,) in held.values()], shape)
    if found is None:
        raise PlanError(_not_a_grid(shape, len(ranks)))
    cuts, order = found
    cut_dims = [dim for dim, intervals in enumerate(cuts) if len(intervals) > 1]
    if not cut_dims:
        return Layout(MeshSpec({"shard0": 1}, ranks), ["S(0)" if shape else "R"])
    axes = {f"shard{dim}": len(cuts[dim]) for dim in cut_dims}
    placements = [_placement(dim, cuts[dim], shape[dim]) for dim in cut_dims]
    return Layout(MeshSpec(axes, [ranks[at] for at in order]), placements)


def _placement(dim: int, intervals: Sequence[Interval], length: int) -> PlacementLike:
    sizes = tuple(size for _, size in intervals)
    plain = tuple(chunk(length, len(sizes), at)[1] for at in range(len(sizes)))
    return f"S({dim})" if sizes == plain else UnevenShard(dim, sizes)


def _several_shards(ranks: Sequence[int]) -> Problem:
    return Problem(
        "several-shards-per-rank",
        "placements",
        found=f"ranks {', '.join(map(str, ranks))} hold more than one shard",
        hint="name each rank once",
    )


def _not_a_grid(shape: tuple[int, ...], count: int) -> Problem:
    return Problem(
        "not-a-grid",
        "shards",
        found=f"{count} shards of a tensor of shape {shape} are not the cells of one grid of rows and columns",
        hint="cut each dim at the same places everywhere; free boxes are moved by shard-reshard, not by a mesh",
    )
