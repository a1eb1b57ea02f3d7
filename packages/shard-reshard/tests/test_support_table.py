"""Every kind of source to every kind of destination: right, or refused by an error. `SUPPORT.md` shows the outcome."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_pairs import as_listed, local_tensors
from shard_reshard import PlanError, plan_reshard, simulate
from shard_reshard.layout.parse import resolve_layout
from shard_reshard.layout.shard_map import ShardMap
from shard_spec import Box

SHAPE = (7, 10)
KINDS: dict[str, object] = {
    "sharded": "4: S(0)",
    "n-D mesh": "2x2: S(-1), S(0)",
    "two axes, one dim": "2x2: S(0), S(0); order=axis1>axis0",
    "replicated": "2x2: R, S(1)",
    "uneven": "3: U(0,[4,0,3])",
    "block-cyclic": "4: B(1,2,cyclic)",
    "interleaved": "2: I(1,[6,4])",
    "other ranks": "2: S(0) on ranks 3,1",
    "boxes": {0: [Box((0, 0), (7, 4)), Box((0, 9), (7, 1))], 2: [Box((0, 4), (7, 5))]},
    "one rank": "rank 2",
    "partial sum": "4: P",
    "partial avg": "2x2: P(avg), S(0)",
    "partial max": "4: P(max)",
}
PAGE = Path(__file__).parent.parent / "SUPPORT.md"
MARKS = "<!-- support table: begin -->\n", "<!-- support table: end -->"


def _shards(layout: ShardMap, full: torch.Tensor, parts: dict[int, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Local tensors; of a partial layout, whose value is `full`, parts that reduce to it."""
    return [local_tensors(layout, rank, parts.get(rank, full)) for rank in range(4)]


def _parts(name: str, full: torch.Tensor) -> dict[int, torch.Tensor]:
    if name == "partial sum":
        return {0: full - 6, 1: full * 0 + 1, 2: full * 0 + 2, 3: full * 0 + 3}
    if name == "partial avg":
        return {0: full - 2, 1: full - 2, 2: full + 2, 3: full + 2}
    return {0: full, 1: full - 1, 2: full - 5, 3: full - 2} if name == "partial max" else {}


def _outcome(src_name: str, dst_name: str) -> str:
    full = torch.arange(70.0).view(SHAPE)
    try:
        plan = plan_reshard(SHAPE, torch.float32, KINDS[src_name], KINDS[dst_name])
    except PlanError as error:
        return error.problems[0].code
    moved = simulate(plan, _shards(plan.src, full, _parts(src_name, full)))
    if dst_name.startswith("partial"):  # its value is what a reduction to one rank gives
        op = {"sum": "sum", "avg": "avg", "max": "max"}[dst_name.split()[1]]
        assert op in str(KINDS[dst_name]) or op == "sum"
        reduction = plan_reshard(SHAPE, torch.float32, plan.dst, "rank 0")
        (value,) = as_listed(simulate(reduction, moved)[0])
        return "right" if torch.equal(value, full) else "WRONG"
    good = all(
        torch.equal(actual, expected)
        for rank in range(4)
        for actual, expected in zip(as_listed(moved[rank]), local_tensors(plan.dst, rank, full), strict=True)
    )
    return "right" if good else "WRONG"


def _table() -> tuple[str, list[str]]:
    names = list(KINDS)
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    outcomes = []
    for src in names:
        row = [_outcome(src, dst) for dst in names]
        outcomes += row
        lines.append(f"| {src} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n", outcomes


def test_the_readme_shows_what_is_right_and_what_is_refused() -> None:
    table, outcomes = _table()
    assert "WRONG" not in outcomes
    refused = sum(outcome != "right" for outcome in outcomes)
    assert refused <= 0.05 * len(outcomes)
    text = PAGE.read_text()
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    page = before + MARKS[0] + table + MARKS[1] + after
    if os.environ.get("UPDATE_SUPPORT"):
        PAGE.write_text(page)
    assert text == page or os.environ.get("UPDATE_SUPPORT"), "run this test with UPDATE_SUPPORT=1"


_BOX = Box((0, 0), SHAPE)
_NO_LAYOUTS = [3, object(), ("a", "b", "c"), "4 S(0)", "4: S(0) on ranks a..b", "4: S(0) on ranks 0..99999999999"]
_NO_BOXES: list[object] = [{0: 5}, {0: None}, {"a": _BOX}, {0.5: _BOX}, {0: [_BOX, 3]}]


@pytest.mark.parametrize("layout", [*_NO_LAYOUTS, *_NO_BOXES])
def test_what_is_no_layout(layout: object) -> None:
    with pytest.raises(PlanError):
        resolve_layout(layout, SHAPE)


class Number:
    """A whole number as other libraries have them: equal to Python's, and no JSON."""

    def __index__(self) -> int:
        return 96

    def __eq__(self, other: object) -> bool:
        return other == 96

    def __hash__(self) -> int:
        return hash(96)


def test_numbers_of_other_kinds() -> None:
    """One was kept in the plan that later calls got, and could not be written as JSON."""
    bound: Any = Number()
    first = plan_reshard((8, 12), "float32", "4: S(0)", "4: S(1)", max_workspace_bytes=bound)
    second = plan_reshard((8, 12), "float32", "4: S(0)", "4: S(1)", max_workspace_bytes=96)
    assert first.to_json() == second.to_json()
    assert type(first.max_workspace_bytes) is int


@pytest.mark.parametrize("shape", [(-8, 12), "88", (8.5, 12), (8, None), (float("nan"), 1)])
def test_what_is_no_shape(shape: Any) -> None:
    for layout in ("4: S(0)", "rank 0"):
        with pytest.raises(PlanError, match="invalid-argument"):
            plan_reshard(shape, "float32", layout, "4: R")
    with pytest.raises(PlanError, match="max_workspace_bytes"):
        plan_reshard((8, 12), "float32", "4: S(0)", "4: R", max_workspace_bytes=shape)
