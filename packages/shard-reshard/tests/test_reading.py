"""Plans from strangers: read and equal to what they say, or refused with one error."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from typing import Any

import pytest
import torch
from shard_reshard import PlanError, ReshardPlan, plan_reshard
from shard_reshard.reading import MAX_CHARS
from shard_spec import Box, Layout, MeshSpec, Replicate, Shard

ODD: list[Any] = [
    None, True, -1, 0, 3, 2**70, 1.5, "", "S(0)", "float32", "x" * 300, [], [[]], [3, 3], {}, {"window": [0]},
]  # fmt: skip
COUNT = 10_000 if os.environ.get("SHARD_RESHARD_ALL") else 400


def plans() -> list[str]:
    mesh = MeshSpec({"a": 2, "b": 2})
    rows, columns = Layout(mesh, [Shard(0), Replicate()]), Layout(mesh, [Shard(1), Shard(0)])
    boxes = {0: [Box((0, 0), (3, 5))], 1: [Box((3, 0), (4, 5))]}
    made = [
        plan_reshard((7, 5), torch.float32, rows, columns),
        plan_reshard((7, 5), torch.bfloat16, boxes, rows, max_workspace_bytes=4096),
    ]
    return [plan.to_json() for plan in made]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in inside for place in ((value, key), *places(child))]


def broken(text: str, draw: random.Random) -> str:
    """The text with one or more things wrong, most of the time."""
    if draw.random() < 0.15:
        at = draw.randrange(len(text))
        return text[:at] if draw.random() < 0.5 else text[:at] + draw.choice('[{"\\,0\x00e') + text[at + 1 :]
    data = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        found = places(data)
        if not found:
            break
        container, key = draw.choice(found)
        if draw.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(draw.choice([*ODD, container]))  # or itself, once more inside
    return json.dumps(data)


def test_any_text_is_a_plan_or_one_error() -> None:
    draw, good, read = random.Random(0), plans(), 0
    assert [ReshardPlan.from_json(text).to_json() for text in good] == good
    for _ in range(COUNT):
        text = broken(draw.choice(good), draw)
        plan = None
        with contextlib.suppress(PlanError):
            plan = ReshardPlan.from_json(text)
        if plan is not None:
            assert ReshardPlan.from_json(plan.to_json()) == plan
            read += 1
    assert 0 < read < COUNT / 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "malformed-plan"),
        ("[1]", "malformed-plan"),
        ('{"format": 99}', "unknown-format"),
        ('{"format": 1}', "malformed-plan"),
        ("[" * 100_000, "malformed-plan"),
        ("1" * 10_000, "malformed-plan"),
        (" " * (MAX_CHARS + 1), "malformed-plan"),
    ],
    ids=["empty", "a list", "another format", "nothing in it", "deep", "a huge integer", "too long"],
)
def test_what_is_wrong_is_said(text: str, code: str) -> None:
    with pytest.raises(PlanError, match=code):
        ReshardPlan.from_json(text)
