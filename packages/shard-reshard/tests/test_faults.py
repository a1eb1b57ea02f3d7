"""Faults on ranks, sampled; `random_faults.py` runs as many as it is told."""

from __future__ import annotations

import pytest
from random_faults import Fault, check_faults, check_saves


@pytest.mark.filterwarnings("ignore:This process")  # fork, in a process with threads: these children do little
@pytest.mark.extra("safetensors")
def test_faults_on_ranks_are_refused_or_reported_and_a_new_group_goes_on() -> None:
    counts = check_faults(4, seed=3)
    assert counts["worlds"] == 4
    assert len(counts) >= 2  # worlds that went well and worlds that did not


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.extra("safetensors")
@pytest.mark.parametrize(("seed", "when"), [(41, "at once"), (204, "at once"), (150, "later"), (173, "later")])
def test_ranks_of_a_load_raise_when_another_is_killed(seed: int, when: str) -> None:
    fault = Fault(seed)
    assert (fault.how, fault.what) == ("files", "dies at once" if when == "at once" else "dies")
    counts = check_faults(1, seed)  # none hangs, and those that are left load in a new group
    assert counts.pop("worlds") == 1
    assert set(counts) <= ({"failed"} if when == "at once" else {"failed", "right", "failed, right"})


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.extra("safetensors")
def test_ranks_of_a_save_raise_when_another_is_killed_and_files_are_all_there_or_refused() -> None:
    counts = check_saves(5, seed=4)
    assert counts["saves"] == 5 == counts["none"] + counts["whole"] == counts["raised"] + counts["saved"]
    assert counts["killed"] >= 2
