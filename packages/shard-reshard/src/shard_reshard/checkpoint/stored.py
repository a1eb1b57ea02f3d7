"""Checkpoint files as layouts: each file holds a shard, on the rank that reads the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.checkpoint.plan import Stored
from shard_reshard.checkpoint.safetensors import DTYPES, Entry, FileTable
from shard_reshard.layout.boxes import BoxShardMap
from shard_reshard.layout.parse import LayoutLike, ToGroup, resolve_layout
from shard_reshard.layout.shard_map import ShardMap


class ReadableFile(NamedTuple):
    """A file and its possible readers."""

    table: FileTable
    number: int  # rank of its shards in the written layout
    readers: tuple[int, ...]  # none: every rank


def stored_tensors(
    files: Sequence[ReadableFile],
    stored_as: Mapping[str, LayoutLike],
    shapes: Mapping[str, Sequence[int]],
    to_group: ToGroup | None = None,
) -> dict[str, tuple[tuple[int, ...], str, tuple[Stored, ...]]]:
    """Return name -> global shape, dtype, and shards in files, in the order of their writers.

    Raises:
        PlanError: With the problems of all tensors.
    """
    held: dict[str, list[tuple[ReadableFile, Entry]]] = {}
    for file in files:
        for name, entry in file.table.entries.items():
            held.setdefault(name, []).append((file, entry))
    problems = [
        Problem("unknown-name", "stored_as", found=repr(name), hint="stored_as names tensors of the files")
        for name in stored_as
        if name not in held
    ]
    tensors: dict[str, tuple[tuple[int, ...], str, tuple[Stored, ...]]] = {}
    for name, entries in sorted(held.items()):
        try:
            dtype = _dtype(name, entries)
            if name in stored_as:
                layout = resolve_layout(stored_as[name], shapes.get(name), to_group)
            else:
                layout = _full(name, entries)
            shape, parts = _cut(name, entries, layout)
            tensors[name] = shape, dtype, parts
        except PlanError as error:
            problems += [p.named(name) for p in error.problems]
    if problems:
        raise PlanError(problems)
    return tensors


def _dtype(name: str, entries: Sequence[tuple[ReadableFile, Entry]]) -> str:
    words = sorted({entry.dtype for _, entry in entries})
    if len(words) > 1:
        hint = "write all parts of a tensor in one dtype"
        raise PlanError(Problem("ranks-disagree", name, found=", ".join(words), hint=hint))
    if words[0] not in DTYPES:
        raise PlanError(Problem("unsupported-dtype", name, found=words[0], hint=f"one of {', '.join(DTYPES)}"))
    return DTYPES[words[0]]


def _full(name: str, entries: Sequence[tuple[ReadableFile, Entry]]) -> ShardMap:
    if len(entries) > 1:
        listed = ", ".join(file.table.path for file, _ in entries)
        hint = "declare in stored_as (and shapes) how files split the tensor, or leave out all files but one"
        raise PlanError(Problem("duplicate-name", name, found=f"in {len(entries)} files: {listed}", hint=hint))
    ((file, entry),) = entries
    return BoxShardMap.whole(entry.shape, file.number)


def _cut(
    name: str, entries: Sequence[tuple[ReadableFile, Entry]], layout: ShardMap
) -> tuple[tuple[int, ...], tuple[Stored, ...]]:
    if layout.num_partials > 1:
        hint = "reduce before writing: files hold values, not addends"
        raise PlanError(Problem("partial-value", name, found=layout.describe(), hint=hint))
    parts: list[Stored] = []
    problems: list[Problem] = []
    numbers = [file.number for file, _ in entries]
    for file, entry in entries:
        shapes = layout.local_shapes(file.number)
        if numbers.count(file.number) > 1 or shapes != (entry.shape,):
            wanted = "none" if not shapes else " and ".join(map(str, shapes))
            reason = f"{entry.shape} in {file.table.path}, the layout gives rank {file.number} {wanted}"
            hint = "list the files in the order of the ranks that wrote them, and give the layout they wrote"
            problems.append(Problem("shape-mismatch", name, found=reason, hint=hint))
            continue
        pieces = layout.local_pieces(file.number)
        table = file.table
        parts.append(Stored(table.path, table.state.num_bytes, entry.begin, entry.shape, pieces, file.readers))
    for number in sorted(set(layout.ranks) - set(numbers)):
        if layout.pieces(number):
            hint = "pass all files, or the layout that these were written in"
            problems.append(Problem("missing-tensor", name, found=f"no file with the part of rank {number}", hint=hint))
    if problems:
        raise PlanError(problems)
    return layout.shape, tuple(parts)
