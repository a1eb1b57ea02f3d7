"""Plans for loading safetensors files: shards, byte ranges of each rank, and moves to destinations.

Each needed byte is read once, by one rank, in ranges of full rows. The reader is one of the ranks that need the
rows: rows for one rank are read by that rank without transfers; rows for several ranks (replicas, or a sharding along
another dim) are shared among them, and the exchange does the rest.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from shard_spec import Box

from shard_reshard._shared.dtypes import SAFETENSORS
from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard.checkpoint.safetensors import Entry, FileTable
from shard_reshard.layout.boxes import BoxShardMap, ShardMapView
from shard_reshard.layout.parse import LayoutLike, ToGroup, resolve_layout
from shard_reshard.layout.shard_map import ITEMSIZES, Piece, ShardMap, human
from shard_reshard.plan import group_problems
from shard_reshard.state_dict.pairs import Pair
from shard_reshard.state_dict.plan import (
    DstLayouts,
    KeyRule,
    RankMeta,
    StateDictPlan,
    TensorMeta,
    in_layouts,
    plan_state_dict,
)

SMALLEST_READ_BYTES = 64 * 1024  # smallest share of one rank


class Stored(NamedTuple):
    """A tensor, or a rank's shard of one, in a file."""

    path: str
    file_bytes: int
    begin: int  # first byte in the file
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # its boxes of the global tensor, with their positions in it


class Read(NamedTuple):
    """One contiguous range of a file, read by one rank.

    Attributes:
        name: The stored tensor.
        path: The file.
        file_bytes: Length of the file.
        offset: First byte.
        shape: Shape of the rows.
        dtype: Name of the elements' dtype.
        boxes: For each box of the global tensor in the rows, its start in them, and its sizes.
    """

    name: str
    path: str
    file_bytes: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class LoadPlan:
    """Reads of every rank, and the exchanges that follow.

    Attributes:
        moves: The exchanges after the reads.
        reads: For each rank of the group, its reads by tensor.
    """

    moves: StateDictPlan
    reads: tuple[Mapping[str, tuple[Read, ...]], ...]

    def read_bytes(self, rank: int) -> int:
        """Return the bytes read by ``rank``."""
        return sum(read.num_bytes for rows in self.reads[rank].values() for read in rows)

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        reads = [[read for rows in table.values() for read in rows] for table in self.reads]
        return hashlib.sha256(json.dumps([reads, self.moves.digest]).encode()).hexdigest()

    def explain(self, name: str | None = None) -> str:
        """Return reads and exchanges as text; ``name`` picks one tensor."""
        lines = []
        for rank, table in enumerate(self.reads):
            chosen = [read for rows in table.values() for read in rows if name in (None, read.name)]
            size = human(sum(read.num_bytes for read in chosen))
            files = len({read.path for read in chosen})
            lines.append(f"rank {rank} reads {size} in {len(chosen)} ranges of {files} files")
        return "\n".join([*lines, self.moves.explain(name)])


StoredTensor = tuple[tuple[int, ...], str, tuple[Stored, ...]]  # global shape, dtype, shards in files


def stored_tensors(
    files: Sequence[FileTable], stored_as: Mapping[str, LayoutLike], shapes: Mapping[str, Sequence[int]]
) -> dict[str, StoredTensor]:
    """Return the tensors of files by name, or raise the problems of all. Files are in the order of their writers."""
    held: dict[str, dict[int, tuple[FileTable, Entry]]] = {}
    for number, table in enumerate(files):
        for name, entry in table.entries.items():
            held.setdefault(name, {})[number] = table, entry
    problems = [
        Problem("unknown-name", "stored_as", found=repr(n), hint="stored_as names tensors of the files")
        for n in stored_as
        if n not in held
    ]
    tensors: dict[str, StoredTensor] = {}
    for name, entries in sorted(held.items()):
        try:
            tensors[name] = _stored(name, entries, stored_as.get(name), shapes.get(name))
        except PlanError as error:
            problems += [p.named(name) for p in error.problems]
    if problems:
        raise PlanError(problems)
    return tensors


def _stored(
    name: str, by_rank: Mapping[int, tuple[FileTable, Entry]], wanted: LayoutLike | None, size: Sequence[int] | None
) -> StoredTensor:
    words = sorted({entry.dtype for _, entry in by_rank.values()})
    if len(words) > 1:
        raise refusal("ranks-disagree", name, found=", ".join(words), hint="write all shards of a tensor in one dtype")
    if words[0] not in SAFETENSORS:
        raise refusal("unsupported-dtype", name, found=words[0], hint=f"one of {', '.join(SAFETENSORS)}")
    if wanted is None and len(by_rank) > 1:
        listed = ", ".join(table.path for table, _ in by_rank.values())
        raise refusal(
            "duplicate-name",
            name,
            found=f"in {len(by_rank)} files: {listed}",
            hint="declare in stored_as (and shapes) how files split the tensor, or leave out all files but one",
        )
    number, (_, entry) = next(iter(by_rank.items()))
    layout = BoxShardMap.whole(entry.shape, number) if wanted is None else resolve_layout(wanted, size)
    if layout.num_partials > 1:
        raise refusal(
            "partial-value",
            name,
            found=layout.describe(),
            hint="reduce before writing: files hold values, not addends",
        )
    parts: list[Stored] = []
    problems: list[Problem] = []
    for number, (table, entry) in by_rank.items():
        shapes = layout.local_shapes(number)
        if shapes != (entry.shape,):
            listed = "none" if not shapes else " and ".join(map(str, shapes))
            problems.append(
                Problem(
                    "shape-mismatch",
                    name,
                    found=f"{entry.shape} in {table.path}, the layout gives rank {number} {listed}",
                    hint="list the files in the order of the ranks that wrote them, and give the layout they wrote",
                )
            )
            continue
        pieces = layout.local_pieces(number)
        parts.append(Stored(table.path, table.state.num_bytes, entry.begin, entry.shape, pieces))
    problems += [
        Problem(
            "missing-tensor",
            name,
            found=f"no file with rank {number}'s shard",
            hint="pass all files, or the layout that these were written in",
        )
        for number in sorted(set(layout.ranks) - by_rank.keys())
        if layout.pieces(number)
    ]
    if problems:
        raise PlanError(problems)
    return layout.shape, SAFETENSORS[words[0]], tuple(parts)


def plan_load(
    stored: Mapping[str, StoredTensor],
    dst_layouts: DstLayouts,
    world_size: int,
    *,
    outs: Sequence[RankMeta] = (),
    key_map: KeyRule | None = None,
    bucket_bytes: int = 64 * 2**20,
    to_group: ToGroup | None = None,
    strict: bool = True,
    casts: str = "exact",
    pairs: Sequence[Pair] = (),
    unexpected: Sequence[str] = (),
    smallest_read_bytes: int = SMALLEST_READ_BYTES,
) -> LoadPlan:
    """Plan the move of ``stored`` tensors, from `stored_tensors`, to their layouts. Pure, equal on every rank.

    ``outs`` is each rank's metadata of its destination tensors; all else as in `load_safetensors`.
    """
    # Demand does not depend on readers: a first plan, with one rank as reader of everything, gives it.
    on_first: dict[tuple[int, ...], ShardMap] = {}  # equal layouts are one object, and their moves one plan
    sources: dict[str, TensorMeta] = {}
    for name, (shape, dtype, _) in stored.items():
        if shape not in on_first:
            on_first[shape] = BoxShardMap.whole(shape, 0)
        sources[name] = TensorMeta(shape, dtype, on_first[shape], name)
    facts = [replace(held, sources={} if rank else sources) for rank, held in enumerate(outs or [RankMeta({}, {})])]
    rules: Any = {"strict": strict, "casts": casts, "pairs": pairs, "unexpected": unexpected}
    wanted = plan_state_dict(facts, dst_layouts, key_map, bucket_bytes, to_group, **rules)
    if outside := group_problems((move.plan for move in wanted.moves), world_size):
        raise PlanError(outside)
    demand = rows_of_ranks(wanted)
    load = [0] * world_size
    reads: list[dict[str, tuple[Read, ...]]] = [{} for _ in range(world_size)]
    readers: dict[str, ShardMap] = {}
    for name, (shape, dtype, parts) in stored.items():
        if name not in demand or 0 in shape:  # nothing to read
            readers[name] = BoxShardMap(shape, {0: ()}) if 0 in shape else on_first[shape]
            continue
        boxes: dict[int, list[Box]] = {}
        # Of equal shards in several files the first one is read.
        for part in {tuple((p.start, p.stop) for p in part.pieces): part for part in reversed(parts)}.values():
            for rank, low, high in shared_out(part, dtype, demand[name], load, smallest_read_bytes):
                read, held = _read(name, dtype, part, low, high)
                reads[rank][name] = (*reads[rank].get(name, ()), read)
                boxes.setdefault(rank, []).extend(held)
        readers[name] = BoxShardMap(shape, boxes, holes=True)  # unneeded rows are not read
    return LoadPlan(in_layouts(wanted, bucket_bytes, sources=readers), tuple(reads))


class Wanted(NamedTuple):
    """Rows of a source tensor, and the ranks that need any of them."""

    start: int
    stop: int
    ranks: tuple[int, ...]


def rows_of_ranks(plan: StateDictPlan, by_source: bool = True) -> dict[str, list[Wanted]]:
    """Return each source's rows, split at changes of their ranks. Or each destination's, with their owners."""
    rows: dict[str, dict[tuple[int, int], set[int]]] = {}
    for move in plan.moves:
        here, there = (move.plan.src, move.plan.dst) if by_source else (move.plan.dst, move.plan.src)
        view = here if isinstance(here, ShardMapView) else None
        table = rows.setdefault(move.source if by_source else move.target, {})
        for cell in there.cells():
            # Rows of this side, for any dim of the other side.
            start, stop = cell[:2] if view is None else (view.outside(cell.start), view.outside(cell.stop))
            low, high = (start[0], stop[0]) if start else (0, 1)
            table.setdefault((low, high), set()).update(rank for ranks in cell.owners for rank in ranks)
    return {name: list(_cut_rows(table)) for name, table in rows.items()}


def _cut_rows(table: Mapping[tuple[int, int], set[int]]) -> Iterator[Wanted]:
    marks = sorted({mark for rows in table for mark in rows})
    ranks: list[set[int]] = [set() for _ in marks]
    for (low, high), owners in table.items():
        for at in range(bisect_left(marks, low), bisect_left(marks, high)):
            ranks[at] |= owners
    for at, (low, high) in enumerate(pairwise(marks)):
        yield Wanted(low, high, tuple(sorted(ranks[at])))


def shared_out(
    part: Stored, dtype: str, demand: Iterable[Wanted], load: list[int], smallest: int = SMALLEST_READ_BYTES
) -> list[tuple[int, int, int]]:
    """Return (rank, first row, last row) of every read of a shard. Adjacent rows of one rank are joined."""
    rows: dict[tuple[int, int], set[int]] = {}  # of the stored shard, and the ranks that need them
    for wanted in demand:
        if not part.shape:
            rows.setdefault((0, 1), set()).update(wanted.ranks)
        for box in part.pieces if part.shape else ():
            shift = box.local_start[0] - box.start[0]
            low, high = max(box.start[0], wanted.start), min(box.stop[0], wanted.stop)
            if low < high:
                rows.setdefault((low + shift, high + shift), set()).update(wanted.ranks)
    row_bytes, shares = prod(part.shape[1:]) * ITEMSIZES[dtype], list[tuple[int, int, int]]()
    for low, high, ranks in _cut_rows(rows):
        count = max(1, min(len(ranks), high - low, (high - low) * row_bytes // smallest))
        chosen = ranks if count == len(ranks) else sorted(sorted(ranks, key=lambda rank: (load[rank], rank))[:count])
        for number, rank in enumerate(chosen):
            begin, end = (low + at * (high - low) // count for at in (number, number + 1))
            load[rank] += (end - begin) * row_bytes
            if shares and (shares[-1][0], shares[-1][2]) == (rank, begin):
                shares[-1] = rank, shares[-1][1], end
            else:
                shares.append((rank, begin, end))
    return shares


def _read(name: str, dtype: str, part: Stored, low: int, high: int) -> tuple[Read, list[Box]]:
    """Return rows ``low`` to ``high`` of a stored shard, with their global boxes."""
    if not part.shape:
        return Read(name, part.path, part.file_bytes, part.begin, (), dtype, (((), ()),)), [Box((), ())]
    row_bytes = prod(part.shape[1:]) * ITEMSIZES[dtype]
    places, boxes = [], []
    for box in part.pieces:
        first = max(low, box.local_start[0])
        last = min(high, box.local_start[0] + box.stop[0] - box.start[0])
        if first < last:
            start = (box.start[0] + first - box.local_start[0], *box.start[1:])
            sizes = (last - first, *(b - a for a, b in zip(box.start[1:], box.stop[1:], strict=True)))
            places.append(((first - low, *box.local_start[1:]), sizes))
            boxes.append(Box(start, sizes))
    shape = (high - low, *part.shape[1:])
    return Read(name, part.path, part.file_bytes, part.begin + low * row_bytes, shape, dtype, tuple(places)), boxes
