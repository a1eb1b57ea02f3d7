"""Write safetensors files from sharded tensors: ranks write their own rows, peers send the rest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from shard_spec import Box

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.dtypes import SAFETENSORS
from shard_reshard._shared.problems import Problem, raise_problems, refusal
from shard_reshard.checkpoint.plan import Stored, rows_of_ranks, shared_out
from shard_reshard.checkpoint.safetensors import memory_bytes
from shard_reshard.group import BEFORE_MOVING, GroupInfo, assert_consistent, group_info, raise_on_all_ranks
from shard_reshard.layout.boxes import BoxShardMap
from shard_reshard.layout.parse import LayoutLike, ToGroup
from shard_reshard.layout.shard_map import ITEMSIZES, Piece, ShardMap, by_key, human
from shard_reshard.state_dict.agreement import (
    PLAIN,
    collect_metadata,
    device_of,
    differing,
    local_tensors,
    plain_checksums,
    plan_of_all,
    tensors_of,
)
from shard_reshard.state_dict.outputs import LocalTargets, move_buckets, staged
from shard_reshard.state_dict.pairs import Pair, as_pairs
from shard_reshard.state_dict.plan import KeyRule, RankMeta, StateDictPlan, in_layouts, plan_state_dict

_WORDS = {name: word for word, name in SAFETENSORS.items()}
_UNPUBLISHED = "no file of the save has its name yet"


class File(NamedTuple):
    """Header and byte offsets of a file to write."""

    head: bytes  # length of the header, and the header
    num_bytes: int
    begins: dict[str, int]  # destination of the plan's moves -> its first byte
    names: list[str]  # of the tensors in the file


@dataclass(frozen=True)
class SavePlan:
    """Files of a save by name, and the exchanges before. Each rank's destinations are its rows to write."""

    moves: StateDictPlan
    files: Mapping[str, File]

    def written_bytes(self, rank: int) -> int:
        """Return the bytes of tensors written by ``rank``."""
        targets = [self.moves.targets[name] for file in self.files.values() for name in file.begins]
        return sum(prod(s) * ITEMSIZES[dtype] for layout, dtype in targets for s in layout.local_shapes(rank))

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        files = [(name, file.head.hex(), file.begins) for name, file in self.files.items()]
        return hashlib.sha256(json.dumps([files, self.moves.digest]).encode()).hexdigest()

    def explain(self, name: str | None = None) -> str:
        """Return files and exchanges as text; ``name`` picks one tensor."""
        lines = [f"{path}: {len(file.names)} tensors, {human(file.num_bytes)}" for path, file in self.files.items()]
        return "\n".join([*lines, self.moves.explain(name)])


def save_safetensors(
    state_dict: Mapping[str, Any] | torch.nn.Module,
    folder: str | Path,
    *,
    src_layouts: Mapping[str, LayoutLike] | None = None,
    shapes: Mapping[str, Any] | None = None,
    key_map: KeyRule | None = None,
    max_file_bytes: int = 5 * 10**9,
    bucket_bytes: int = 64 * 2**20,
    group: dist.ProcessGroup | None = None,
    pairs: Pair | Sequence[Pair] = (),
) -> SavePlan:
    """Write sharded tensors in full into safetensors files, for `load_safetensors` and Hugging Face.

    Every byte is written once, by one rank: rows of one rank by that rank, others shared among their owners. Tied
    tensors are written once, under their first name in the state dict; metadata of the file lists the others. Every
    rank of ``group`` calls it.

    Files get their names after all are complete, and after their index: a killed save leaves a full checkpoint, or a
    folder that is refused or has no such files.

    Args:
        state_dict: As in `reshard_state_dict`.
        folder: Where to write, on a file system that all ranks share; made if need be. It holds no safetensors files.
        src_layouts: As in `reshard_state_dict`, and so are ``shapes`` and ``key_map``.
        max_file_bytes: A file ends before the tensor that would make it larger; several files have an index.
        bucket_bytes: About how many bytes a rank exchanges and writes at a time.
        group: The ranks that save; None is the default group.
        pairs: Quantised weights and their scales, written as they are: a local scale without a layout has the one that
            goes with its weight's, and parts of a weight take their scales along.

    Returns:
        The plan: ``.files``, ``.written_bytes(rank)``, ``.explain()``.

    Raises:
        PlanError: On every rank alike: ``partial-value``, ``unsupported-dtype``, ``invalid-argument`` for a folder with
            such files, ``rank-failed`` if a rank cannot write, and the problems of `reshard_state_dict`.
        RuntimeError: If an exchange fails because a rank died.
    """
    members, problems = group_info(group), list[Problem]()
    try:
        tensors, path = tensors_of(state_dict), Path(folder)
        pairs = _unchanging(pairs)
        facts = collect_metadata(tensors, {}, src_layouts or {}, shapes or {}, members, pairs)
        sources, sums = local_tensors(tensors), plain_checksums(facts, tensors)
        keys = "a function" if callable(key_map) else sorted((key_map or {}).items())
        asked = [f"folder {path}", f"{keys} {max_file_bytes} {bucket_bytes} {pairs}"]
        if members.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            present = sorted([*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")])
            hint = "pass a folder without such files: a reader would take them for part of what is written"
            problems += [Problem("invalid-argument", "folder", found=f"{p} exists", hint=hint) for p in present[:1]]
    except Exception as error:
        raise_on_all_ranks(members, error)
    assert_consistent(members, "a save", asked, [*problems, *facts.problems])

    def make(everyone: list[Any], problems: list[Problem]) -> tuple[SavePlan, list[str]]:
        problems += differing([sums for _, sums in everyone], *PLAIN)
        facts, limits = [held for held, _ in everyone], (max_file_bytes, bucket_bytes)
        plan = plan_save(facts, key_map, *limits, members.to_group, pairs)
        problems += LocalTargets(members, plan.moves).source_problems(sources)
        return plan, [*plan.moves.lines, plan.digest]

    plan = plan_of_all(members, "a save", (facts, sums), make)
    here, rank, device = LocalTargets(members, plan.moves), members.rank, device_of(tensors, {}, members)

    def rows(name: str) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=here.dtypes[name], device=device) for shape in here.shapes[name]]

    write = partial(_write_rows, plan, path, rank)
    states = (_UNPUBLISHED, _UNPUBLISHED)
    try:
        _on_first_rank(members, plan, lambda: _create(plan, path), BEFORE_MOVING)
        buckets = (  # arrivals of one are written before the next
            (
                [move.view(sources[move.source]) for move in moves if move.plan.src.local_shapes(rank)],
                [tensor.unsqueeze(0) if move.unstacked else tensor for move in moves for tensor in held[move.target]],
            )
            for moves, held in staged(here, "a save", plan.digest, attrgetter("target"), rows, states, write)
        )
        with torch.no_grad():
            move_buckets(here, buckets, True)
        _on_first_rank(members, plan, lambda: _publish(plan, path), "the files are complete, some have no name yet")
    finally:
        if members.rank == 0:
            for name in plan.files:  # of a save that failed
                _unfinished(path / name).unlink(missing_ok=True)
    return plan


def _unchanging(pairs: Pair | Sequence[Pair]) -> tuple[Pair, ...]:
    """Return pairs that move as they are, or refuse: a writer has rows, not blocks."""
    listed = as_pairs(pairs)
    if any(pair.dequantize or pair.quantize for pair in listed):
        raise refusal(
            "conflicting-arguments",
            "pairs",
            found="a Pair that changes values",
            hint="reshard_state_dict with it first, then save the result",
        )
    return listed


# ---- layout of files ------------------------------------------------------------------------------------------


def plan_save(
    everyone: Sequence[RankMeta],
    key_map: KeyRule | None = None,
    max_file_bytes: int = 5 * 10**9,
    bucket_bytes: int = 64 * 2**20,
    to_group: ToGroup | None = None,
    pairs: Sequence[Pair] = (),
) -> SavePlan:
    """Plan a save from the metadata of all ranks. Pure and equal on every rank."""
    # Ownership does not depend on writers: a first plan, with one rank as writer of everything, gives it.
    held = plan_state_dict(everyone, "rank 0", key_map, bucket_bytes, to_group, pairs=pairs)
    written = {name: target for name, target in held.targets.items() if name not in held.aliases}
    problems = [
        Problem("partial-value", move.source, found=move.plan.src.describe(), hint="reduce it before writing")
        for move in held.moves
        if move.plan.src.num_partials > 1
    ]
    problems += [
        Problem("unsupported-dtype", name, found=f"a tensor of {dtype}", hint=f"one of {', '.join(_WORDS)}")
        for name, (_, dtype) in written.items()
        if dtype not in _WORDS
    ]
    if not written or "__metadata__" in held.targets:
        problems.append(
            Problem(
                "invalid-argument",
                "state_dict",
                found=f"tensors called {list(held.targets)}",
                hint="pass tensors; '__metadata__' is a word of the format",
            )
        )
    raise_problems(problems)
    demand, load = rows_of_ranks(held, by_source=False), [0] * len(everyone)
    layouts: dict[str, ShardMap] = {}
    for name, (layout, dtype) in written.items():
        shape, zero = layout.shape, (0,) * len(layout.shape)
        full = Stored("", 0, 0, shape, (Piece(zero, shape, 0, zero),))
        shares = shared_out(full, dtype, demand[name], load) if 0 not in shape else []
        boxes = by_key(
            (rank, Box((low, *zero[1:]), (high - low, *shape[1:])) if shape else Box((), ()))
            for rank, low, high in shares
        )
        layouts[name] = BoxShardMap(shape, {0: [], **boxes})  # empty tensors need a rank too
    tied = {name: [name] for name in written}
    for alias, name in held.aliases.items():
        layouts[alias] = layouts[name]
        tied[name].append(alias)
    moves = in_layouts(held, bucket_bytes, targets=layouts)
    order = {name: at for at, name in enumerate(dict.fromkeys(n for facts in everyone for n in facts.sources))}
    names = [sorted(group, key=lambda name: (order.get(name, len(order)), name)) for group in tied.values()]
    names.sort(key=lambda group: (order.get(group[0], len(order)), group[0]))
    groups, room = list[list[list[str]]](), -1
    for group in names:
        size = _num_bytes(moves, group[0])
        if size > room:  # a tensor is never split over files
            groups.append([])
            room = max_file_bytes
        groups[-1].append(group)
        room -= size
    number = len(groups)
    titles = [f"model-{at:05}-of-{number:05}" if number > 1 else "model" for at in range(1, number + 1)]
    return SavePlan(moves, {f"{t}.safetensors": _file(moves, g) for t, g in zip(titles, groups, strict=True)})


def _num_bytes(moves: StateDictPlan, name: str) -> int:
    layout, dtype = moves.targets[name]
    return prod(layout.shape) * ITEMSIZES[dtype]


def _file(moves: StateDictPlan, names: list[list[str]]) -> File:
    """Build the file of tensors, each with all its names. The first is its name in the file."""
    names = sorted(names, key=lambda group: -ITEMSIZES[moves.targets[group[0]][1]])  # every tensor is aligned
    ties = {other: first for first, *others in names for other in others}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
    end = 0
    for name, *_ in names:
        layout, dtype = moves.targets[name]
        begin, end = end, end + _num_bytes(moves, name)
        header[name] = {"dtype": _WORDS[dtype], "shape": layout.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    head = len(text).to_bytes(8, "little") + text
    begins = {moves.aliases.get(n, n): len(head) + header[n]["data_offsets"][0] for n, *_ in names}
    return File(head, len(head) + end, begins, [name for name, *_ in names])


# ---- writing --------------------------------------------------------------------------------------------------


def _on_first_rank(members: GroupInfo, plan: SavePlan, act: Callable[[], None], state: str) -> None:
    """Run ``act`` on rank 0; its error is raised on all ranks."""
    problems: Sequence[Problem] = ()
    try:
        if members.rank == 0:
            act()
    except Exception as error:
        problems = problems_of(error)
    assert_consistent(members, "a save", [plan.digest], problems, state)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def _create(plan: SavePlan, folder: Path) -> None:
    """Write the headers of files at their full lengths, under names that no reader takes."""
    for name, file in plan.files.items():
        with _unfinished(folder / name).open("wb") as target:
            target.write(file.head)
            target.truncate(file.num_bytes)


def _publish(plan: SavePlan, folder: Path) -> None:
    """Rename files to their final names, after the index. Without it some of several would pass for all."""
    if len(plan.files) > 1:
        total = sum(file.num_bytes - len(file.head) for file in plan.files.values())
        weights = {name: path for path, file in plan.files.items() for name in file.names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name in plan.files:
        with _unfinished(folder / name).open("r+b") as target:
            os.fsync(target.fileno())  # the data before the name
        _unfinished(folder / name).replace(folder / name)


def _write_rows(plan: SavePlan, folder: Path, rank: int, name: str, held: Sequence[torch.Tensor]) -> None:
    layout, dtype = plan.moves.targets[name]
    assert isinstance(layout, BoxShardMap)
    row_bytes = prod(layout.shape[1:]) * ITEMSIZES[dtype]
    path, begin = next((path, file.begins[name]) for path, file in plan.files.items() if name in file.begins)
    with _unfinished(folder / path).open("r+b") as target:
        for box, tensor in zip(layout.boxes.get(rank, ()), held, strict=True):
            rows = tensor.cpu()
            target.seek(begin + (box.offsets[0] if box.offsets else 0) * row_bytes)
            target.write(memory_bytes(rows))
