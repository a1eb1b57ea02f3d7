"""Layouts of meshes, bound to a shape: answered from one sorted table for each dim, no list of all ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from operator import ge
from typing import Any

from shard_spec import Layout

from shard_reshard._shared.problems import PlanError
from shard_reshard.layout.base import Cell, Index, Piece, ShardMap, new_tuple, shortened


class MeshShardMap(ShardMap):
    """A shard-spec `Layout` for one shape: every rank of the mesh has one local tensor."""

    def __init__(self, layout: Layout, shape: Sequence[int]) -> None:
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        self._arguments = layout, self.shape
        problems = layout.problems(self.shape)
        if problems:
            raise PlanError(problems)
        self._axes = tuple(zip(layout.mesh.axis_names, layout.mesh.shape, layout.specs, strict=True))

    @property
    def ranks(self) -> Sequence[int]:
        return self.layout.mesh.ranks

    @cached_property
    def num_partials(self) -> int:
        return len(self._offsets["P"])

    @cached_property
    def max_replicas(self) -> int:
        return len(self._offsets["R"])

    @cached_property
    def largest(self) -> int:
        size = 1
        for table in self._tables:
            lengths: dict[int, int] = {}
            for start, stop, _, flat in table.segments:
                lengths[flat] = lengths.get(flat, 0) + stop - start
            size *= max(lengths.values(), default=0)
        return size

    @cached_property
    def reduce_ops(self) -> tuple[str, ...]:
        return tuple(str(term.arg) for _, size, term in self._axes if term.kind == "P" and size > 1)

    def local_shapes(self, rank: int) -> tuple[Index, ...]:
        found = self._local_shapes.get(rank)
        if found is None:
            found = ()
            if rank in self.rank_set:
                found = (tuple(sum(size for _, size in dim) for dim in self.layout.intervals(rank, self.shape)),)
            if len(self._local_shapes) < 8:  # a process asks for its own rank, again and again
                self._local_shapes[rank] = found
        return found

    @cached_property
    def _local_shapes(self) -> dict[int, tuple[Index, ...]]:
        return {}

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self.rank_set:
            return ()
        dims: list[list[tuple[int, int, int]]] = []
        for intervals in self.layout.intervals(rank, self.shape):
            local = 0
            dims.append([])
            for start, size in intervals:
                if size:
                    dims[-1].append((start, start + size, local))
                local += size
        return tuple(
            Piece(tuple(i[0] for i in combo), tuple(i[1] for i in combo), 0, tuple(i[2] for i in combo))
            for combo in product(*dims)
        )

    def cross(self, start: Index, stop: Index) -> Iterator[Cell]:
        if any(map(ge, start, stop)):
            return
        choices = [table.cross(low, high) for table, low, high in zip(self._tables, start, stop, strict=True)]
        owners = self._holders
        cut = [dim for dim, segments in enumerate(choices) if len(segments) != 1]
        if len(cut) > 1 or not choices:
            for combo in product(*choices):
                starts, stops, local_starts, flats = zip(*combo, strict=True) if combo else ((), (), (), ())
                yield Cell(starts, stops, local_starts, owners[sum(flats)], None)
            return
        # One dim is cut, all others are the same in every cell: most layouts of large worlds.
        dim = cut[0] if cut else 0
        alike = [segments[0] for at, segments in enumerate(choices) if at != dim]
        starts, stops, local_starts, flats = zip(*alike, strict=True) if alike else ((), (), (), ())
        base = sum(flats)
        starts_end, stops_end, locals_end = starts[dim:], stops[dim:], local_starts[dim:]
        starts, stops, local_starts = starts[:dim], stops[:dim], local_starts[:dim]
        for low, high, local, flat in choices[dim]:
            yield new_tuple(
                Cell,
                (
                    (*starts, low, *starts_end),
                    (*stops, high, *stops_end),
                    (*local_starts, local, *locals_end),
                    owners[base + flat],
                    None,
                ),
            )

    @cached_property
    def _holders(self) -> _Holders:
        """For a position in the list of ranks: the ranks that hold the same, for each partial_index."""
        return _Holders(self.layout.mesh.ranks, self._offsets["P"], self._offsets["R"])

    def to_json(self) -> dict[str, Any]:
        mesh = self.layout.mesh
        ranks = None if mesh.rank_list is None else list(mesh.rank_list)
        return {"mesh": [list(axis) for axis in mesh.axes.items()], "ranks": ranks, "layout": str(self.layout)}

    def describe(self) -> str:
        mesh = self.layout.mesh
        where = "" if mesh.rank_list is None else f" on ranks {shortened(mesh.rank_list)}"
        return f"{'x'.join(map(str, mesh.shape))}: {self.layout}{where}"

    @cached_property
    def _strides(self) -> dict[str, int]:
        shape = self.layout.mesh.shape
        return {name: prod(shape[at + 1 :]) for at, name in enumerate(self.layout.mesh.axis_names)}

    @cached_property
    def _offsets(self) -> dict[str, tuple[int, ...]]:
        """For the partial and the replicated axes: by how much they shift a position in the list of ranks."""
        offsets = {"P": [0], "R": [0]}
        for name, size, term in self._axes:
            if term.kind in offsets:
                stride = self._strides[name]
                offsets[term.kind] = [base + stride * at for base in offsets[term.kind] for at in range(size)]
        return {kind: tuple(found) for kind, found in offsets.items()}

    @cached_property
    def _tables(self) -> tuple[_DimTable, ...]:
        return tuple(_DimTable(self._segments(dim)) for dim in range(len(self.shape)))

    def _segments(self, dim: int) -> list[tuple[int, int, int, int]]:
        """Every interval of ``dim``: (start, stop, local start, shift in the list of ranks)."""
        ndim, length = len(self.shape), self.shape[dim]
        cutting = [
            (name, size, term) for name, size, term in self._axes if term.dim is not None and term.dim % ndim == dim
        ]
        if not cutting:
            return [(0, length, 0, 0)] if length else []
        if len(cutting) == 1 and cutting[0][2].kind == "S":
            name, size, _ = cutting[0]
            stride, step = self._strides[name], -(-length // size)
            return [
                (at * step, min(at * step + step, length), 0, at * stride) for at in range(size) if at * step < length
            ]
        ranks, segments = self.layout.mesh.ranks, []
        for place in product(*(range(size) for _, size, _ in cutting)):
            flat = sum(at * self._strides[name] for at, (name, _, _) in zip(place, cutting, strict=True))
            local = 0
            for start, size in self.layout.intervals(ranks[flat], self.shape)[dim]:
                if size:
                    segments.append((start, start + size, local, flat))
                local += size
        return sorted(segments)


class _Holders(dict[int, tuple[tuple[int, ...], ...]]):
    """Position in the list of ranks -> the ranks that hold the same, for each addend; worked out when asked for."""

    def __init__(self, ranks: Sequence[int], addends: Sequence[int], replicas: Sequence[int]) -> None:
        super().__init__()
        self.ranks, self.addends, self.replicas = tuple(ranks), addends, replicas
        self.alone = len(addends) == len(replicas) == 1
        step = replicas[1] if len(replicas) > 1 else 1
        even = tuple(replicas) == tuple(range(0, step * len(replicas), step))
        self.step = step if even else 0  # replicas that are equally far apart are a slice

    def __missing__(self, flat: int) -> tuple[tuple[int, ...], ...]:
        found: tuple[tuple[int, ...], ...]
        if self.alone:
            found = ((self.ranks[flat],),)
        elif self.step:
            length, step = self.step * len(self.replicas), self.step
            found = tuple([self.ranks[flat + at : flat + at + length : step] for at in self.addends])
        else:
            found = tuple([tuple([self.ranks[flat + at + other] for other in self.replicas]) for at in self.addends])
        self[flat] = found
        return found


class _DimTable:
    """The intervals of one dim, sorted, so that those that meet a range are found by bisection."""

    def __init__(self, segments: list[tuple[int, int, int, int]]) -> None:
        self.segments = segments
        self.starts = [segment[0] for segment in segments]
        self.stops = [segment[1] for segment in segments]

    def cross(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        first, last = bisect_right(self.stops, low), bisect_left(self.starts, high)
        found = self.segments[first:last]
        if not found:
            return found
        if found[0][0] < low:
            start, stop, local, flat = found[0]
            found[0] = (low, stop, local + low - start, flat)
        if found[-1][1] > high:
            start, _, local, flat = found[-1]
            found[-1] = (start, high, local, flat)
        return found
