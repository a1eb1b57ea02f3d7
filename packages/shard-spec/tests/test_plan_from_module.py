"""ShardingPlan.from_module: local shards that say of themselves what they are shards of.

The tuples are planted as other packages write them; none of these packages is imported.
"""

import random
from typing import Any

import pytest
import torch
from shard_spec import PlanError, Shard, ShardingPlan
from shard_spec.plan.from_module import layout_of_tensor
from torch import nn
from torch.distributed.tensor import Replicate


class Mesh:
    """What a DeviceMesh says of itself, without process groups."""

    def __init__(self, *shape: int, names: Any = None) -> None:
        self.mesh = torch.arange(torch.Size(shape).numel()).view(shape)
        self.ndim = len(shape)
        self.mesh_dim_names = names or ("dp", "tp")[-len(shape) :]


def shard_of(mesh: Any, placements: Any, shape: Any, *sections: Any) -> Any:
    shape = torch.Size(shape)
    parameter = nn.Parameter(torch.empty(0))
    info = (mesh, placements, shape, torch.empty(shape, device="meta").stride(), *sections)
    parameter._sharding_info = info  # type: ignore[attr-defined]  # the mark that is read
    return parameter


def rows_of(sections: Any, rank: int, world: int) -> list[int]:
    """The rows of one rank, one after another: units dealt out as torch.chunk deals, neighbours holding the same."""
    rows: list[int] = []
    start = 0
    for size, unit, copies in sections:
        units = [range(start + at, start + at + unit) for at in range(0, size, unit)]
        parts = world // copies
        step = -(-len(units) // parts)
        mine = units[rank // copies * step : (rank // copies + 1) * step]
        rows += [row for each in mine for row in each]
        start += size
    return rows


def uneven(sections: Any, parts: int) -> bool:
    """Whether some units do not divide: then units, not rows, are dealt out unevenly."""
    return any(unit > 1 and size // unit % parts for size, unit, _ in sections)


def test_sections_as_size_unit_and_copies_are_read_exactly_or_refused() -> None:
    """Numbers were expected where triples stand: a TypeError for every fused weight."""
    rng, exact, refused = random.Random(0), 0, 0
    for _ in range(600):
        world = rng.choice((1, 2, 4, 8))
        copies = rng.choice((1, 1, world, rng.choice((1, 2, 4))))
        many = rng.randint(1, 3)
        sections = []
        for _ in range(many):
            unit = rng.choice((1, 1, 2, 4))
            sections.append((unit * rng.randint(0, 9), unit, copies if rng.random() < 0.9 else 1))
        length = sum(size for size, _, _ in sections)
        parameter = shard_of(Mesh(world), (Shard(0),), (length, 2), tuple(sections))
        distinct = {each for _, _, each in sections}
        if len(distinct) > 1 or world % max(distinct) or (many > 1 and uneven(sections, world // max(distinct))):
            with pytest.raises(PlanError, match="not-expressible"):
                layout_of_tensor(parameter)
            refused += 1
            continue
        layout = layout_of_tensor(parameter)
        assert layout is not None
        for rank in range(world):
            rows = [r for box in layout.boxes(rank, (length, 2)) for r in range(box.offsets[0], box.ends[0])]
            assert rows == rows_of(sections, rank, world), (sections, world, rank, str(layout))
        exact += 1
    assert exact > 300
    assert 50 < refused < 300


def test_a_model_with_fused_weights_has_a_plan() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12), "kv": nn.Linear(4, 4), "out": nn.Linear(8, 4)})
    mesh = Mesh(4)
    model["qkv"].weight = shard_of(mesh, (Shard(0),), (12, 4), ((4, 1, 1), (4, 1, 1), (4, 1, 1)))
    model["qkv"].bias = shard_of(mesh, (Shard(0),), (12,), (4, 4, 4))  # sizes alone, as some write them
    model["kv"].weight = shard_of(mesh, (Shard(0),), (4, 4), ((4, 2, 2),))
    model["out"].weight = shard_of(mesh, (Shard(1),), (4, 8))
    plan = ShardingPlan.from_module(model)
    layouts = {name: str(layout) for name, layout in plan.resolve(model).items()}
    assert layouts == {
        "qkv.weight": "tp:I(0,[4,4,4])",
        "qkv.bias": "tp:I(0,[4,4,4])",
        "kv.weight": "tp.part:S(0), tp.copy:R",
        "kv.bias": str(plan.resolve(model)["out.bias"]),
        "out.weight": "tp:S(1)",
        "out.bias": str(plan.resolve(model)["kv.bias"]),
    }
    assert plan.resolve(model)["out.bias"].is_replicated
    two = shard_of(Mesh(2, 2), (Replicate(), Shard(0)), (12, 4), ((8, 2, 1), (4, 2, 1)))
    assert str(layout_of_tensor(two)) == "dp:R, tp:I(0,[8,4])"


@pytest.mark.parametrize(
    ("placements", "sections", "code"),
    [
        ((Shard(0),), ((8, 1, 1), (2, 1, 1)), "not-expressible"),  # 10 of 12 rows
        ((Shard(0),), ((8, 1, 1), (4, 1, 2)), "not-expressible"),  # k and v on more ranks than q
        ((Shard(0),), ((6, 3, 1), (6, 2, 1)), "not-expressible"),  # units that do not divide
        ((Shard(0),), ((12, 1, 3),), "not-expressible"),
        ((Replicate(),), ((12, 1, 1),), "not-expressible"),
        ((Shard(2),), ((12, 1, 1),), "not-expressible"),
        ((Shard(0),), ("q", "k"), "invalid-sections"),
        ((Shard(0),), ((12, 12, 1, 1),), "not-expressible"),  # an expert that is in full on the second rank
        ((Shard(0),), ((12, 1, 1, 0, 0),), "invalid-sections"),
        ((Shard(0),), ((12, 5, 1),), "invalid-sections"),
        (Shard(0), (), "invalid-sections"),
        ((Shard(0), Shard(0)), (), "argument-count"),
    ],
)
def test_what_no_layout_says_is_refused_by_name(placements: Any, sections: Any, code: str) -> None:
    model = nn.Module()
    model.fused = shard_of(Mesh(4), placements, (12, 4), sections)
    with pytest.raises(PlanError) as caught:
        ShardingPlan.from_module(model)
    assert [(problem.code, problem.name) for problem in caught.value.problems] == [(code, "fused")]
