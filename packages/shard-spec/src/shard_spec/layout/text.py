"""Short text form of placements and layouts: ``"dp:S(0), tp:R"``.

==========================  ==========================================================
``R``                       replicate
``S(0)``                    shard dim 0
``P(sum)``, ``P``           partial, to be summed
``U(0, [3, 2, 3])``         uneven shard of dim 0
``B(0, 128)``               blocks of 128 of dim 0; ``B(0, 128, cyclic)`` distributes them in turn
``I(0, [4096, 1024])``      interleaved sections of these sizes; ``I(0, 2)`` two equal sections
``... @ pp:1``              along pp in full at coordinate 1 (the second stage), nothing at the others
``...; order=tp>dp``        if several axes shard one dim: tp first, then dp
==========================  ==========================================================

One placement for each axis is accepted without axis names: ``"S(0), R"``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.placements import (
    REDUCE_OPS,
    REPLICATE,
    BlockShard,
    InterleavedShard,
    PartialSpec,
    PlacementSpec,
    ShardSpec,
    StageShard,
    UnevenShard,
)

_MAX_TEXT = 1_000_000
_PLACEMENT = re.compile(r"([A-Z]|@\d{1,9})\s*(?:\((.*)\))?", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_.\-]*)\s*:\s*(.+)", re.DOTALL)
_STAGES = re.compile(r"(?:^|\s)@\s+")
_HINT = "write for example 'dp:S(0), tp:R'; placements are R, P(sum), S(0), U(0,[3,5]), B(0,128), I(0,[4,2,2])"


def parse_placement(text: str) -> PlacementSpec:
    """Parse one placement."""
    match = _PLACEMENT.fullmatch(text.strip()) if len(text) <= _MAX_TEXT else None
    kind = match[1] if match else ""
    arguments = split_items(match[2] or "") if match else []
    try:
        if kind == "R" and not arguments:
            return REPLICATE
        if kind.startswith("@") and not arguments:
            return StageShard(int(kind[1:]))
        if kind == "P" and len(arguments) <= 1:
            op = arguments[0] if arguments else "sum"
            if op in REDUCE_OPS:
                return PartialSpec(op)
        elif kind == "S" and len(arguments) == 1:
            return ShardSpec(_integer(arguments[0]))
        elif kind == "U" and len(arguments) == 2:
            return UnevenShard(_integer(arguments[0]), _integers(arguments[1]))
        elif kind == "B" and len(arguments) in (2, 3):
            if len(arguments) == 2 or arguments[2] == "cyclic":
                return BlockShard(_integer(arguments[0]), _integer(arguments[1]), len(arguments) == 3)
        elif kind == "I" and len(arguments) == 2:
            listed = arguments[1].startswith(("[", "("))  # sizes, or a number of sections
            return InterleavedShard(
                _integer(arguments[0]), _integers(arguments[1]) if listed else _integer(arguments[1])
            )
    except ValueError as error:  # not an integer
        if isinstance(error, PlanError):
            raise
    raise PlanError(Problem("invalid-layout", found=repr(text[:200]), hint=_HINT))


def parse_layout(text: str, axis_names: Sequence[str]) -> tuple[dict[str, PlacementSpec], tuple[str, ...]]:
    """Parse a layout: the spec of each named axis, and the order of axes."""
    if len(text) > _MAX_TEXT:
        raise PlanError(Problem("invalid-layout", found=f"a text of {len(text)} characters", hint=_HINT))
    tail = text.partition(";")[2].strip()
    problems: list[Problem] = []
    order: tuple[str, ...] = ()
    if tail:
        key, _, names = map(str.strip, tail.partition("="))
        if key != "order" or not names:
            problems.append(Problem("invalid-layout", found=repr(text), hint="after ';' write order=tp>dp"))
        else:
            order = tuple(name.strip() for name in names.split(">"))
    pairs = layout_items(text)
    nameless = [item for axis, item in pairs if not axis]
    named = [(axis, item) for axis, item in pairs if axis]
    if nameless and any(not item.startswith("@") for _, item in named):
        problems += [Problem("invalid-layout", found=f"{item!r} in {text!r}", hint=_HINT) for item in nameless]
    elif nameless:  # one placement for each other axis, in mesh order
        axis_names = [axis for axis in axis_names if axis not in dict(named)]
        if len(nameless) != len(axis_names):
            problems.append(
                Problem(
                    "argument-count",
                    found=f"{text!r}: {len(nameless)} placements for the axes {', '.join(axis_names)}",
                    hint="one for each axis, or name the axes",
                )
            )
        named = [*zip(axis_names, nameless, strict=False), *named]  # too few or many: already a problem
    specs: dict[str, PlacementSpec] = {}
    for axis, item in named:
        if axis in specs:
            problems.append(Problem("duplicate-name", axis=axis, found=repr(text), hint="name each axis once"))
            continue
        try:
            specs[axis] = parse_placement(item)
        except PlanError as error:
            problems.extend(error.problems)
    raise_problems(problems)
    return specs, order


def layout_items(text: str) -> list[tuple[str, str]]:
    """Split the text of a layout into axis names, ``""`` where there is none, and placements; without the order."""
    body, *stages = _STAGES.split(text.partition(";")[0])
    matches = [(_NAMED.fullmatch(item), item) for item in split_items(body.strip()) if item]
    pairs = [(match[1], match[2]) if match else ("", item) for match, item in matches]
    for item in (item for each in stages for item in split_items(each)):
        axis, _, stage = item.partition(":")
        pairs.append((axis.strip(), f"@{stage.strip()}"))
    return pairs


def split_items(text: str) -> list[str]:
    """Split at the commas outside of parentheses and brackets."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif letter == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    items.append(text[start:].strip())
    return items if any(items) else []


def _integer(text: str) -> int:
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", text):  # 18 digits fit in int64
        raise ValueError(text)
    return int(text)


def _integers(text: str) -> tuple[int, ...]:
    text = text.strip()
    if text[:1] not in ("[", "(") or text[-1:] not in ("]", ")"):
        raise ValueError(text)
    return tuple(_integer(item) for item in text[1:-1].split(",") if item.strip())
