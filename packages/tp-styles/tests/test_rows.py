"""Law of joined rows: what any rank lists is listed by all, once, by its worst verdict."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Literal

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate
from tp_styles.check.rows import Row, joined

KINDS = ("output", "gradient", "buffer")
VERDICTS: tuple[Literal["equal", "differs", "unchecked"], ...] = ("equal", "differs", "unchecked")


def drawn_rows(rng: random.Random) -> list[Row]:
    """Return rows of one rank: any values, in any order, some of them twice."""
    rows = []
    for _ in range(rng.randrange(9)):
        verdict = rng.choice(VERDICTS)
        error = rng.choice((math.inf, rng.random())) if verdict == "differs" else math.inf
        rows.append(Row(rng.choice(KINDS), rng.choice("abcd"), verdict, error, reason=f"{rng.random()}"))
    return rows


def test_no_row_of_any_rank_is_lost() -> None:
    rng, listed = random.Random(7), 0
    for _ in range(2000):
        everyone = [drawn_rows(rng) for _ in range(rng.randint(1, 5))]
        of_all = joined(everyone)
        apart = [(rank, row) for rank, rows in enumerate(everyone) for row in rows if row.verdict != "equal"]
        assert {(row.kind, row.name) for row in of_all} == {(row.kind, row.name) for _, row in apart}
        assert len({(row.kind, row.name) for row in of_all}) == len(of_all)
        for row in of_all:
            same = [(rank, own) for rank, own in apart if (own.kind, own.name) == (row.kind, row.name)]
            differing = [(rank, own) for rank, own in same if own.verdict == "differs"]
            assert row.verdict == ("differs" if differing else "unchecked")
            assert row.error == max(own.error for _, own in differing or same)
            assert row.reason in {own.reason for _, own in differing or same}
            assert set(row.ranks) == {rank for rank, _ in differing or same}
            assert len(set(row.ranks)) == len(row.ranks)
        assert joined([of_all]) == [replace(row, ranks=(0,)) for row in of_all]
        listed += len(of_all)
    assert listed > 8000


class Idle(nn.Module):
    """A pair of layers, and two sections of one feature without a gradient: the second rank has no row of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.idle = models.MLP(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.pair(x) + self.idle(x).detach().sum(-1, keepdim=True)
        return result


@pytest.mark.ranks(2)
def test_zeros_of_one_rank_are_listed_by_all(ranks: Ranks) -> None:
    """A gradient of zeros is unchecked where a rank has rows of it, and equal where a rank has none."""
    model = models.seeded(Idle)
    columns = tp.FusedColwiseParallel(2, output_layouts=Replicate())
    plan = {"pair.up": tp.ColwiseParallel(), "pair.down": tp.RowwiseParallel(), "idle": columns}
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), plan)
    model(torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))
    lines = [line for line in handle.report().splitlines() if line.startswith("check of Idle")]
    assert "idle.weight, idle.bias" in lines[0], lines
    # One output of 3 rows, and the full gradients of the pair: 12 rows of 8, 8 rows of 12, and their biases.
    assert "equal to the original (1 tensors and 4 gradients, 236 elements)" in lines[0], lines
