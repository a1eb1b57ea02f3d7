"""Plans from strangers: read and equal to what they say, or refused with one error."""

from __future__ import annotations

import os
import random

import pytest
from broken_plans import broken, check_one, plans
from shard_reshard import PlanError, ReshardPlan
from shard_reshard.plan.plan import MAX_CHARS

COUNT = 10_000 if os.environ.get("SHARD_RESHARD_ALL") else 400


def test_any_text_is_a_plan_or_one_error() -> None:
    draw, good = random.Random(0), plans()
    assert [ReshardPlan.from_json(text).to_json() for text in good] == good
    read = sum(check_one(broken(draw.choice(good), draw)) for _ in range(COUNT))
    assert 0 < read < COUNT / 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid-plan"),
        ("[1]", "invalid-plan"),
        ('{"format": 99}', "invalid-file"),
        ('{"format": 1}', "invalid-plan"),
        ("[" * 100_000, "invalid-plan"),
        ("1" * 10_000, "invalid-plan"),
        (" " * (MAX_CHARS + 1), "invalid-plan"),
    ],
    ids=["empty", "a list", "another format", "nothing in it", "deep", "a huge integer", "too long"],
)
def test_what_is_wrong_is_said(text: str, code: str) -> None:
    with pytest.raises(PlanError, match=code):
        ReshardPlan.from_json(text)
