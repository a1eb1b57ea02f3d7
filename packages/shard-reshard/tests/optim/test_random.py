"""Drawn models, sampled; `random_whole.py` runs as many as it is told."""

from __future__ import annotations

import pytest
from random_whole import attack
from ranktest import Ranks


@pytest.mark.ranks(2, 3, 4)
def test_drawn_models_are_those_of_one_process(ranks: Ranks) -> None:
    counts = attack(ranks, 8, first=100 * ranks.world_size)
    assert counts["cases"] == 8
    assert counts["restarts"] > 0 and counts["elements"] > 1000
