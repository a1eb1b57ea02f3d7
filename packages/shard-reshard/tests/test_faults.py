"""Faults on ranks: right, refused on all, or an error in time; `random_faults.py` draws as many as it is told."""

from __future__ import annotations

import pytest
from random_faults import Fault, check_fault, check_saves

pytestmark = pytest.mark.filterwarnings("ignore:This process")  # fork, in a process with threads: these do little
IN_FLIGHT = {"async_op": True, "in_flight": 1}


@pytest.mark.parametrize(
    ("how", "what", "options", "wanted"),
    [
        ("kept", "turned", IN_FLIGHT, "right"),  # other strides are no fault
        ("one-shot", "sparse", IN_FLIGHT, "refused"),
        ("kept", "another dtype", {}, "refused"),
        ("changed", "dies at once", IN_FLIGHT, "failed"),
    ],
)
def test_all_ranks_have_one_outcome_and_a_new_group_goes_on(
    how: str, what: str, options: dict[str, object], wanted: str
) -> None:
    """No rank hangs, no value is wrong, and with ``atomic`` an error leaves ``out`` as it was (`check_fault`)."""
    fault = Fault(3, how=how, what=what, rank=1, call=2, call_options=options, bucket_bytes=4096, atomic=True)
    alive = [0, 2] if what == "dies at once" else [0, 1, 2]
    assert check_fault(fault) == dict.fromkeys(alive, wanted)


@pytest.mark.extra("safetensors")
@pytest.mark.parametrize(("seed", "when"), [(41, "at once"), (204, "at once"), (150, "later"), (173, "later")])
def test_ranks_of_a_load_raise_when_another_is_killed(seed: int, when: str) -> None:
    fault = Fault(seed)
    assert (fault.how, fault.what) == ("files", "dies at once" if when == "at once" else "dies")
    outcomes = set(check_fault(fault).values())  # none hangs, and those that are left load in a new group
    assert outcomes <= ({"failed"} if when == "at once" else {"failed", "right"})


@pytest.mark.extra("safetensors")
def test_ranks_of_a_save_raise_when_another_is_killed_and_files_are_all_there_or_refused() -> None:
    counts = check_saves(5, seed=4)
    assert counts["saves"] == 5 == counts["none"] + counts["whole"] == counts["raised"] + counts["saved"]
    assert counts["killed"] >= 2
