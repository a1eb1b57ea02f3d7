"""A test module's `before_ranks()` runs once, where its ranks are forked from."""

from __future__ import annotations

import os

import pytest
import torch
from ranktest import Ranks, warm_up_compiler

prepared: list[int] = []


def before_ranks() -> None:
    warm_up_compiler()
    prepared.append(os.getpid())


@pytest.mark.ranks(2)
def test_ranks_find_what_was_done_before_they_were_forked(ranks: Ranks) -> None:
    assert prepared == [os.getppid()]
    x = torch.full((3,), float(ranks.rank), requires_grad=True)
    torch.compile(lambda x: (x * x).sum(), backend="aot_eager")(x).backward()
    assert x.grad is not None and x.grad.tolist() == [2.0 * ranks.rank] * 3
