"""A sample of the coverage matrix; all of it: `python packages/dp-partition/benchmarks/coverage.py`."""

from __future__ import annotations

import dp_cells
import pytest
from dp_cells import Cell
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks


@pytest.mark.ranks(2)
def test_bitwise_equal_to_ddp(ranks: Ranks) -> None:
    assert dp_cells.run_cell(ranks, Cell("Conv, BatchNorm, GroupNorm", "zero2", "RMSprop", 2)) == "bitwise"
    assert dp_cells.run_cell(ranks, Cell("MLP, LayerNorm, dropout", "default", "Adadelta", 2)) == "bitwise"
    # Its multi-tensor update multiplies in another order than its loop, which DDP runs on CPU.
    nadam = dp_cells.run_cell(ranks, Cell("MLP, LayerNorm, dropout", "default", "NAdam", 2))
    assert float(nadam.removeprefix("close: ")) < 1e-6, nadam


@pytest.mark.ranks(3)
def test_close_at_three_ranks(ranks: Ranks) -> None:
    result = dp_cells.run_cell(ranks, Cell("MoE, top 2", "fully_shard", "SGD Nesterov", 3))
    assert result.startswith(("bitwise", "close")), result


@pytest.mark.extra("transformers")
@pytest.mark.ranks(2)
def test_a_model_of_transformers(ranks: Ranks) -> None:
    assert dp_cells.run_cell(ranks, Cell("transformers Llama", "zero1", "AdamW fused", 2)) == "bitwise"


def test_the_matrix_has_every_pair() -> None:
    cells = dp_cells.cells()
    assert len(set(cells)) == len(cells) == 300
    pairs = list(dp_cells.pairs())
    for one, other, count in [("model", "style", 100), ("model", "world", 40), ("style", "world", 10),
                              ("optimizer", "style", 50), ("optimizer", "world", 20)]:  # fmt: skip
        assert len({(getattr(c, one), getattr(c, other)) for c in pairs}) == count, (one, other)
