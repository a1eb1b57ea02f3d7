"""Faults on ranks, sampled; `random_faults.py` runs as many as it is told."""

from __future__ import annotations

import pytest
from random_faults import check_faults, check_saves


@pytest.mark.filterwarnings("ignore:This process")  # fork, in a process with threads: these children do little
@pytest.mark.extra("safetensors")
def test_faults_on_ranks_are_refused_or_reported_and_a_new_group_goes_on() -> None:
    counts = check_faults(4, seed=3)
    assert counts["worlds"] == 4
    assert len(counts) >= 2  # worlds that went well and worlds that did not


@pytest.mark.filterwarnings("ignore:This process", "ignore:torch.distributed is disabled")
def test_a_save_that_is_killed_leaves_a_whole_checkpoint_or_none() -> None:
    counts = check_saves(3, seed=4)
    assert counts["saves"] == 3 == counts["none"] + counts["whole"]
