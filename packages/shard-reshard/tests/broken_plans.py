"""Plans as JSON with something wrong, and what reading one may do."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import torch
from shard_reshard import PlanError, ReshardPlan, plan_reshard
from shard_spec import Box, Layout, MeshSpec, Partial, Replicate, Shard

ODD: list[Any] = [
    None, True, -1, 0, 3, 2**70, 1.5, "", "S(0)", "float32", "x" * 300, [], [[]], [3, 3], {}, {"window": [0]},
]  # fmt: skip


def plans() -> list[str]:
    mesh = MeshSpec({"a": 2, "b": 2})
    rows, columns = Layout(mesh, [Shard(0), Replicate()]), Layout(mesh, [Shard(1), Shard(0)])
    boxes = {0: [Box((0, 0), (3, 5))], 1: [Box((3, 0), (4, 5))]}
    made = [
        plan_reshard((7, 5), torch.float32, rows, columns),
        plan_reshard((7, 5), torch.bfloat16, boxes, rows, max_workspace_bytes=4096),
        plan_reshard((7, 5), torch.float32, Layout(mesh, [Partial(), Shard(0)]), columns).transpose(),
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


def check_one(text: str) -> bool:
    """Whether a text is read as a plan, which then says the same again and can be planned; else one short error."""
    refusal: PlanError | None = None
    try:
        plan = ReshardPlan.from_json(text)
    except PlanError as error:
        refusal = error
    if refusal is not None:
        assert refusal.problems
        assert len(str(refusal)) < 20_000
        return False
    again = ReshardPlan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    if plan.world_size <= 64:
        for rank in {0, plan.world_size - 1}:
            plan.rank_schedule(rank)
        assert plan.explain()
        assert plan.wire_bytes >= 0
    return True
