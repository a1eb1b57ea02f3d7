"""Modules and layouts under `shard_module` and `plan.apply`: right, or refused. `SUPPORT.md` shows the outcome.

`shard_module` is right where five training steps of 2 ranks with batches of their own, uneven chunks of one batch, give
the outputs and the parameters of the unsharded module on the concatenated batch. `apply` is right where every rank
holds what `Layout` says of every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_spec import BlockShard, InterleavedShard, PlanError, ShardingPlan, UnevenShard, shard_module
from torch import nn
from torch.distributed.tensor import DTensor

PAGE = Path(__file__).parent.parent / "SUPPORT.md"
MARKS = "<!-- support table: begin -->\n", "<!-- support table: end -->"
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}  # other order of summation


def numbers(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=generator)


def ids(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 7, (rows, 3), generator=generator)


@dataclass(frozen=True)
class Row:
    """A module, and rules for it; it is called ``0`` in a Sequential with a linear layer behind it."""

    name: str
    make: Callable[[], nn.Module]
    rules: dict[str, Any]
    inputs: Callable[[int, torch.Generator], torch.Tensor] = numbers
    options: dict[str, Any] = field(default_factory=dict)


class Tied(nn.Module):
    """A table that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids))
        return out


class Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one argument is enough here
        out: torch.Tensor = super().forward(x, x, x)[0]
        return out


class Scaled(nn.Linear):
    """Reads its weight itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)


class Counting(nn.Linear):
    """With an int8 buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.weight.requires_grad_(False)
        self.register_buffer("codes", torch.arange(5, dtype=torch.int8))


def weight_normed() -> nn.Module:
    normed: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
    return normed


LOCAL = {"local": ["0"]}
ROWS = (
    Row("`nn.Linear` by output rows", lambda: nn.Linear(8, 6), {"0.weight": "tp:S(0)"}, options=LOCAL),
    Row("the same, 5 of them", lambda: nn.Linear(8, 5), {"0.weight": "tp:S(0)"}, options=LOCAL),
    Row("the same, 1: a rank holds none", lambda: nn.Linear(8, 1), {"0.weight": "tp:S(0)"}, options=LOCAL),
    Row("`nn.Linear` by input columns", lambda: nn.Linear(8, 6), {"0.weight": "tp:S(1)"}, options=LOCAL),
    Row("frozen weight, int8 buffer", Counting, {"0.weight": "tp:S(0)", "0.codes": "tp:S(0)"}, options=LOCAL),
    Row("`nn.Embedding` by rows, 7 of them", lambda: nn.Embedding(7, 6), {"0.weight": "tp:S(0)"}, ids, LOCAL),
    Row("`nn.Embedding` by columns", lambda: nn.Embedding(7, 6), {"0.weight": "tp:S(1)"}, ids, LOCAL),
    Row("`nn.EmbeddingBag` by rows", lambda: nn.EmbeddingBag(7, 6), {"0.weight": "tp:S(0)"}, ids, LOCAL),
    Row("`nn.Embedding(sparse=True)`", lambda: nn.Embedding(7, 6, sparse=True), {"0.weight": "tp:S(0)"}, ids),
    Row("a table tied to the head", Tied, {"0.table.weight": "tp:S(0)"}, ids, {"local": ["0.table", "0.head"]}),
    Row("`nn.LayerNorm`", lambda: nn.LayerNorm(8), {"0.weight": "tp:S(0)"}),
    Row("`nn.MultiheadAttention`", lambda: Attention(8, 2), {"0.out_proj.weight": "tp:S(1)"}),
    Row("a forward that reads its weight itself", lambda: Scaled(8, 6), {"0.weight": "tp:S(0)"}),
    Row("`nn.Linear` with weight norm", weight_normed, {"0.parametrizations.weight.original1": "tp:S(0)"}),
    Row("interleaved sections (fused weights)", lambda: nn.Linear(8, 6), {"0.weight": [InterleavedShard(0, (4, 2))]}),
    Row("uneven sizes of one's own", lambda: nn.Linear(8, 6), {"0.weight": [UnevenShard(0, (4, 2))]}),
    Row("full blocks", lambda: nn.Linear(8, 6), {"0.weight": [BlockShard(0, 2)]}),
    Row(
        "`output_plan`",
        lambda: nn.Linear(8, 6),
        {"0.weight": "tp:S(0)"},
        options={"output": {"0": "tp:S(0)"}, "local": ["0"]},
    ),
)


def made(row: Row) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(row.make()).double()


def plan_of(row: Row) -> ShardingPlan:
    return ShardingPlan(row.rules, row.options.get("output"), row.options.get("local"), mesh={"tp": 2})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(row: Row, ranks: Ranks) -> str:
    """Five steps with momentum, 3 and 2 rows on the ranks."""
    full, sharded = made(row), made(row)
    try:
        shard_module(sharded, plan_of(row))
    except PlanError as error:
        return f"refused: `{error.problems[0].code}`"
    steppers = [
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9, foreach=False)
        for module in (full, sharded)
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        batches = [row.inputs(3 - rank, generator) for rank in range(2)]
        expected = full(torch.cat(batches))
        try:
            actual = sharded(batches[ranks.rank])
        except PlanError as error:
            return f"forward refused: `{error.problems[0].code}`"
        if not torch.allclose(actual, expected.split([3, 2])[ranks.rank], **CLOSE):
            return "WRONG output"
        for stepper, out in zip(steppers, (expected, actual), strict=True):
            stepper.zero_grad()
            out.square().sum().backward()
            stepper.step()
    values = dict(sharded.named_parameters())
    same = all(torch.allclose(whole(values[name]), value, **CLOSE) for name, value in full.named_parameters())
    return "right" if same else "WRONG parameters"


def laid_out(row: Row, ranks: Ranks, mesh: Any) -> str:
    full, module = made(row), made(row)
    plan = ShardingPlan(row.rules, row.options.get("output"), mesh={"tp": 2})
    try:
        plan.apply(module, mesh)
    except PlanError as error:
        return f"refused: `{error.problems[0].code}`"
    full_tensors = {**dict(full.named_parameters()), **dict(full.named_buffers())}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    resolved, num_sharded = plan.resolve(full), 0
    for name, layout in resolved.items():
        value = tensors[name]
        local = value.to_local() if isinstance(value, DTensor) else value
        boxes = layout.boxes(ranks.rank, tuple(full_tensors[name].shape))
        pieces = [full_tensors[name][box.slices()].flatten() for box in boxes]  # cut in dim 0, or one box
        if not torch.equal(local.flatten(), torch.cat([local.flatten()[:0], *pieces])):
            return "WRONG pieces"
        num_sharded += not layout.is_replicated
    assert num_sharded
    kind = "local, with `_sharding_info`" if any(hasattr(p, "_sharding_info") for p in tensors.values()) else "DTensor"
    return f"right: {kind}"


@pytest.mark.ranks(2)
def test_the_readme_shows_what_is_right_and_what_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    lines = ["| | `shard_module` | `plan.apply` |", "|---|---|---|"]
    lines += [f"| {row.name} | {trained(row, ranks)} | {laid_out(row, ranks, mesh)} |" for row in ROWS]
    assert not any("WRONG" in line for line in lines), lines
    if ranks.rank:
        return
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    page = before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + after
    if os.environ.get("UPDATE_SUPPORT"):
        PAGE.write_text(page, encoding="utf-8")
    assert text == page or os.environ.get("UPDATE_SUPPORT"), "run this test with UPDATE_SUPPORT=1"
