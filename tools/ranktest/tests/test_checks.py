"""Calls that gloo carries out wrongly without an error, disagreeing splits for example, are errors in ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks, intercept


@pytest.mark.ranks(2)
def test_gloo_takes_disagreeing_splits_without_an_error(ranks: Ranks) -> None:
    """The trap itself, with the checks off: rank 1 gets one row of two and no error."""
    if ranks.device.type != "cpu":
        return
    out, give = torch.full((4,), -1.0), [2, 1] if ranks.rank == 0 else [2, 2]
    with intercept.unobserved():
        dist.all_to_all_single(out, torch.ones(sum(give)), [2, 2], give)
    assert out.tolist() == [1.0, -1.0, 1.0, 1.0] if ranks.rank == 1 else [1.0] * 4  # one row came, two were expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_disagreeing_splits_raise_on_every_rank(ranks: Ranks, async_op: bool) -> None:
    out = torch.empty(4, device=ranks.device)
    splits = [3, 1] if ranks.rank == 0 else [2, 2]

    def program() -> None:
        work = dist.all_to_all_single(out, torch.ones(4, device=ranks.device), [2, 2], splits, async_op=async_op)
        if async_op:
            work.wait()

    with pytest.raises(ValueError, match="rank 0 sends 4 bytes to rank 1, which expects 8"):
        program()


@pytest.mark.ranks(2)
def test_row_size_is_part_of_the_agreement(ranks: Ranks) -> None:
    columns = 1 if ranks.rank == 0 else 2
    x = torch.ones(2, columns, device=ranks.device)
    with pytest.raises(ValueError, match="disagree"):
        dist.all_to_all_single(torch.empty_like(x), x)


@pytest.mark.ranks(2)
def test_dim_0_that_does_not_divide(ranks: Ranks) -> None:
    x = torch.ones(3, device=ranks.device)
    with pytest.raises(ValueError, match="does not divide by 2 ranks"):
        dist.all_to_all_single(torch.empty_like(x), x)


@pytest.mark.ranks(2)
def test_local_problem_of_one_rank_raises_on_all(ranks: Ranks) -> None:
    x = torch.ones(4, device=ranks.device)
    message = "do not fit dim 0 and 2 ranks" if ranks.rank == 0 else r"refused on ranks \[0\]"
    with pytest.raises(ValueError, match=message):
        dist.all_to_all_single(torch.empty_like(x), x, [3, 3] if ranks.rank == 0 else [2, 2], [2, 2])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("side", ["input", "output"])
def test_non_contiguous(ranks: Ranks, side: str) -> None:
    dense = torch.ones(4, 2, device=ranks.device)
    strided = torch.ones(2, 4, device=ranks.device).t()
    out, inp = (dense, strided) if side == "input" else (strided, dense)
    with pytest.raises(ValueError, match=f"{side}.*is not contiguous"):
        dist.all_to_all_single(out, inp)


@pytest.mark.ranks(4)
def test_good_calls_pass(ranks: Ranks) -> None:
    """Uneven, empty, scalar-row and repeated calls."""
    r = ranks.rank
    give = [p % 3 for p in range(4)]  # rows to p, same on every rank
    x = torch.arange(sum(give) * 2, dtype=torch.int64, device=ranks.device).view(-1, 2) + 100 * r
    out = torch.empty(4 * give[r], 2, dtype=torch.int64, device=ranks.device)
    for async_op in (False, True):
        work = dist.all_to_all_single(out, x, [give[r]] * 4, give, async_op=async_op)
        if async_op:
            work.wait()
            assert work.is_completed()
        first = sum(give[:r])
        want = [[100 * p + 2 * (first + i) + c for c in (0, 1)] for p in range(4) for i in range(give[r])]
        assert out.tolist() == want
