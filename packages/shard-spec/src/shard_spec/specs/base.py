"""ShardingSpec: base class of descriptions of one tensor's shards and their devices."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.intervals import Box, chunk
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import PlacementLike, UnevenShard
from shard_spec.specs.shards import Interval, ShardMetadata, TensorShards, cover_problems, grid_of, overlap_problems

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


class ShardingSpec(abc.ABC):
    """Sharding of one tensor into shards, and the device of each.

    Subclass it for a scheme of your own: ``build_metadata`` is the only method to write. Make the subclass picklable
    and free of state that differs between ranks; every rank calls it alike and has to get the same result.
    """

    @abc.abstractmethod
    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: object = None) -> TensorShards:
        """Return the shards of a tensor of global shape ``tensor_sizes``.

        Args:
            tensor_sizes: Global shape.
            tensor_properties: Passed through to the result.

        Returns:
            The shards; together they hold every element once.
        """

    def shards_for(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """Return the validated shards of a tensor of global ``shape``.

        Raises:
            PlanError: If shards overlap, leave holes, lie outside the tensor or name no rank.
        """
        shards = tuple(self.build_metadata(tuple(shape)).shards_metadata)
        boxes = [shard.box for shard in shards]
        problems = cover_problems(boxes, shape)
        if not any(problem.code == "shape-mismatch" for problem in problems):
            problems += overlap_problems(boxes)  # needs boxes of one number of dims
        for shard in shards:
            if shard.rank is None:
                hint = "name the rank that holds the shard, as in 'rank:0/cuda:0'"
                problems.append(Problem("invalid-layout", "placements", found=f"{shard.placement}", hint=hint))
        raise_problems(problems, f"{type(self).__name__} does not fit a tensor of shape {tuple(shape)}")
        return shards

    def boxes(self, shape: Sequence[int]) -> dict[int, tuple[Box, ...]]:
        """Return the boxes of every global rank of the spec, in its order."""
        held: dict[int, tuple[Box, ...]] = {}
        for shard in self.shards_for(shape):
            assert shard.rank is not None
            held[shard.rank] = (*held.get(shard.rank, ()), shard.box)
        return held

    def equivalent_to(self, other: ShardingSpec, shape: Sequence[int]) -> bool:
        """Return True if both put the same elements on the same ranks; -1 is 1 of two dims.

        Torch compares dims as written, and takes -1 -> 1 for a change of layout.
        """
        return _nonempty(self.boxes(shape)) == _nonempty(other.boxes(shape))

    def to_layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of ``shape``: ranks on a mesh, and placements.

        Raises:
            PlanError: ``not-a-grid`` or ``invalid-layout`` if no mesh can express it.
        """
        shape = tuple(shape)
        held = box_of_each_rank(self, shape)
        grid = grid_of(list(held.values()), shape)  # a mesh is a grid
        if grid is None:
            text = f"{len(held)} shards of a tensor of shape {shape} are not the cells of one grid of rows and columns"
            hint = "split each dim at the same places everywhere; shard-reshard moves free boxes, a mesh does not"
            raise PlanError(Problem("not-a-grid", "shards", found=text, hint=hint))
        ranks, (cuts, order) = tuple(held), grid  # order: row-major cells
        cut_dims = [dim for dim, intervals in enumerate(cuts) if len(intervals) > 1]
        if not cut_dims:  # one shard
            return Layout(MeshSpec({"shard0": 1}, ranks), ["S(0)" if shape else "R"])  # one rank holds all
        # One mesh axis for each sharded dim, ranks in the order of their shards.
        axes = {f"shard{dim}": len(cuts[dim]) for dim in cut_dims}
        placements = [_placement(dim, cuts[dim], shape[dim]) for dim in cut_dims]
        return Layout(MeshSpec(axes, [ranks[at] for at in order]), placements)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None) -> DTensor:
        """Scatter ``tensor`` from ``src_rank`` of the group; a collective. See ``shard_parameter``."""
        # Deferred: it imports torch.distributed.tensor, a second or more, not needed for planning.
        from shard_spec.distributed.parameter_format import shard_tensor

        def place(shape: tuple[int, ...]) -> tuple[Layout, torch.device | None]:
            own = [each.placement for each in self.shards_for(shape) if each.rank == dist.get_rank()]
            return self.to_layout(shape), own[0].device() if own and own[0] is not None else None

        return shard_tensor(tensor, place, src_rank, process_group)


def _nonempty(boxes: dict[int, tuple[Box, ...]]) -> dict[int, tuple[Box, ...]]:
    nonempty = {rank: tuple(sorted((box for box in held if box.numel), key=str)) for rank, held in boxes.items()}
    return {rank: held for rank, held in nonempty.items() if held}


def box_of_each_rank(spec: ShardingSpec, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the one box of each rank of the spec, in its order.

    Raises:
        PlanError: ``invalid-layout``.
    """
    held = spec.boxes(shape)
    crowded = [rank for rank, boxes in held.items() if len(boxes) > 1]
    if crowded:
        reason = f"ranks {', '.join(map(str, crowded))} hold more than one shard"
        raise PlanError(Problem("invalid-layout", "placements", found=reason, hint="name each rank once"))
    return {rank: box for rank, (box,) in held.items()}


def _placement(dim: int, intervals: Sequence[Interval], length: int) -> PlacementLike:
    sizes = tuple(size for _, size in intervals)
    plain = tuple(chunk(length, len(sizes), at)[1] for at in range(len(sizes)))  # sizes of torch.chunk
    return f"S({dim})" if sizes == plain else UnevenShard(dim, sizes)
