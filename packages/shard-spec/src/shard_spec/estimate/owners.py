"""Optimizers on full matrices: the rank that owns each matrix, its bytes, and what the ranks exchange.

`shard_reshard.WholeMatrices` gives each matrix one owner, which holds a master copy and the optimizer's state in full.
The rule is that of its plan of owners, `_shared/owners`. Which matrices there are follows here from a plan's layouts,
there from parameters; an integration test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shard_spec._shared.dtypes import ITEM_BYTES
from shard_spec._shared.owners import owners_of, update_work
from shard_spec.estimate.optimizers import OptimizerState
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import InterleavedShard
from shard_spec.plan.metadata import TensorMetadata

BUCKET_BYTES = 64 * 2**20  # of an owner's matrices in one exchange, by default
Window = tuple[tuple[int, int, int], ...]  # dims of a parameter with the first and the end index of a matrix


class Matrix(NamedTuple):
    """A tensor that one rank updates in full: a parameter, a section of it, or one index of its first dim.

    Attributes:
        parameter: Position of its parameter.
        shape: Its shape.
        window: Its part of the parameter.
        num_bytes: Its bytes.
    """

    parameter: int
    shape: tuple[int, ...]
    window: Window
    num_bytes: int


class OwnedTensor(NamedTuple):
    """A parameter with the optimizer of its matrices, and its dtype in training."""

    metadata: TensorMetadata
    layout: Layout
    state: OptimizerState
    dtype: str


@dataclass(frozen=True)
class Owned:
    """Bytes of matrices on their owners; tuples are by rank.

    Attributes:
        masters: Master copies.
        state: Optimizer state, and the sums by which a rank sees writes to its parameters.
        step: New values until all ranks have theirs, the matrices of two exchanges, and temporaries of an update.
        sent: Bytes that gradients and new values put on the wire in a step, of all ranks.
        count: Number of matrices.
        load: The largest load of a rank over the mean: of updates, and of memory.
    """

    masters: tuple[int, ...]
    state: tuple[int, ...]
    step: tuple[int, ...]
    sent: tuple[int, int]
    count: int
    load: tuple[float, float]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the plan of owners, and about what it assumes."""
        work, memory = self.load
        text = f"{self.count} matrices on owner ranks, as shard_reshard.WholeMatrices plans them: master copies and "
        text += f"state in full; load max/mean {work:.2f} of updates, {memory:.2f} of memory"
        return (
            text,
            "assumed: all ranks are owners, exchanges of 64 MiB, parameters of three dims are stacks of matrices",
        )


def matrices_of(position: int, tensor: OwnedTensor) -> list[Matrix]:
    """Return the matrices of a parameter: experts of a stack are apart, and so are sections of a fused weight."""
    shape, item = tensor.metadata.shape, ITEM_BYTES[tensor.dtype]
    fused = [spec for spec in tensor.layout.specs if isinstance(spec, InterleavedShard)]
    dim = fused[0].dim % len(shape) if fused else 0
    sections = fused[0].section_intervals(shape[dim]) if fused else [(0, shape[dim])] if shape else []
    stacked = len(shape) == 3 and shape[0] > 0 and not (len(sections) > 1 and dim == 0)
    matrices = []
    for index in range(shape[0]) if stacked else (None,):
        expert: Window = () if index is None else ((0, index, index + 1),)
        for start, size in sections if len(sections) > 1 else [(0, -1)]:
            if size:
                own = (*shape[:dim], size, *shape[dim + 1 :]) if size > 0 else shape
                own = own[1:] if stacked else own
                window = (*expert, (dim, start, start + size)) if size > 0 else expert
                matrices.append(Matrix(position, own, window, prod(own) * item))
    return matrices


@lru_cache(maxsize=4096)
def held_by(layout: Layout, shape: tuple[int, ...], window: Window) -> dict[int, int]:
    """Return the number of elements of a matrix on each rank that has some."""
    counts = {}
    for rank in layout.mesh.ranks:
        intervals = dict(enumerate(layout.intervals(rank, shape)))
        for dim, low, high in window:
            cut = ((max(at, low), min(at + size, high)) for at, size in intervals[dim])
            intervals[dim] = tuple((start, max(0, end - start)) for start, end in cut)
        counts[rank] = prod(sum(size for _, size in along) for along in intervals.values())
    return {rank: count for rank, count in counts.items() if count}


def owned_by_ranks(tensors: Sequence[OwnedTensor], ranks: Sequence[int]) -> Owned:
    """Plan the owners of all matrices of ``tensors`` among ``ranks``, and count their bytes."""
    matrices = [matrix for at, tensor in enumerate(tensors) for matrix in matrices_of(at, tensor)]
    position = {rank: at for at, rank in enumerate(ranks)}
    on = []
    for matrix in matrices:
        layout, shape = tensors[matrix.parameter].layout, tensors[matrix.parameter].metadata.shape
        on.append({position[rank]: count for rank, count in held_by(layout, shape, matrix.window).items()})
    costs = [(update_work(matrix.shape), matrix.num_bytes) for matrix in matrices]
    full_on = [
        [at for at, count in has.items() if count == prod(matrix.shape)]
        for matrix, has in zip(matrices, on, strict=True)
    ]
    owners = owners_of(costs, full_on, len(ranks), range(len(ranks)), [None] * len(matrices))
    size, work = len(ranks), [0] * len(ranks)
    masters, state, largest, update = [0] * size, [0] * size, [0] * size, [0] * size
    there = back = 0
    for matrix, (updates, _), has, rank in zip(matrices, costs, on, owners, strict=True):
        tensor = tensors[matrix.parameter]
        cost, item = tensor.state.cost(matrix.shape, matrix.shape, tensor.dtype), ITEM_BYTES[tensor.dtype]
        work[rank] += updates
        masters[rank] += matrix.num_bytes
        state[rank] += cost.state
        largest[rank], update[rank] = max(largest[rank], matrix.num_bytes), max(update[rank], cost.loop)
        there += (prod(matrix.shape) - has.get(rank, 0)) * item
        back += (sum(has.values()) - has.get(rank, 0)) * item
    staged = [0] * size
    for tensor in tensors:
        for rank, count in held_by(tensor.layout, tensor.metadata.shape, ()).items():
            rows, item = tensor.layout.local_shape(rank, tensor.metadata.shape), ITEM_BYTES[tensor.dtype]
            staged[position[rank]] += count * item
            state[position[rank]] += 8 * rows[0] + count // rows[0] * item if len(rows) > 1 else 8
    step = [staged[at] + 2 * min(masters[at], max(BUCKET_BYTES, largest[at])) + update[at] for at in range(size)]
    load = tuple(max(each) * size / (sum(each) or 1) for each in (work, masters))
    return Owned(tuple(masters), tuple(state), tuple(step), (there, back), len(matrices), (load[0], load[1]))


def redundancy_free(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the owner of each parameter among ``count`` ranks, as torch's ZeroRedundancyOptimizer chooses it.

    The largest goes first, to the rank with the fewest elements so far.
    """
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda each: -sizes[each]):  # stable: parameters of one size keep their order
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners
