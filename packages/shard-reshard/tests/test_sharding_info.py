"""Local parameters that carry ``_sharding_info``: fused weights and key-value heads with copies, both ways."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, StateDictResharder, load_safetensors, reshard_state_dict
from stored_files import write
from torch import nn
from torch.distributed.tensor import Replicate, Shard

SECTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "kv copies": ((16, 8, 2),),
    "fused with kv copies": ((32, 8, 1), (16, 8, 2), (16, 8, 2)),
    "one head for all": ((32, 4, 1), (8, 8, 4), (8, 8, 4)),
    "uneven units": ((24, 8, 1), (10, 2, 1)),
    "fewer units than ranks": ((16, 8, 1),),
}


def taken(
    full: torch.Tensor, dim: int, sections: tuple[tuple[int, int, int], ...], rank: int, size: int
) -> torch.Tensor:
    """The local shard of a rank, by plain chunks of units."""
    parts = []
    for section, (_, unit, copies) in zip(full.split([s for s, _, _ in sections], dim), sections, strict=True):
        units = section.unflatten(dim, (-1, unit)).chunk(size // copies, dim)
        place = rank // copies
        own = units[place] if place < len(units) else units[0].narrow(dim, 0, 0)
        parts.append(own.flatten(dim, dim + 1))
    return torch.cat(parts, dim)


class Model(nn.Module):
    """Parameters in the layouts of `SECTIONS`, as a tensor-parallel module has them."""

    def __init__(self, mesh: Any, rank: int, size: int, dim: int, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in full.items():
            sections = SECTIONS[name]
            local = nn.Parameter(taken(value, dim, sections, rank, size))
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
            local._sharding_info = (mesh, placements, value.shape, value.stride(), sections)  # type: ignore[attr-defined]
            self.register_parameter(name, local)


def full_values(dim: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, sections in SECTIONS.items():
        shape = [6, 6]
        shape[dim] = sum(size for size, _, _ in sections)
        values[name] = torch.randn(shape, generator=generator)
    return values


@pytest.mark.extra("safetensors")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_sections_with_copies_as_source_and_destination(ranks: Ranks, dim: int, tmp_path: Any) -> None:
    mesh, compared = ranks.mesh((4,), ("tp",)), 0
    first, second = full_values(dim, 1), full_values(dim, 2)
    model = Model(mesh, ranks.rank, 4, dim, {name: torch.zeros_like(value) for name, value in first.items()})
    into = StateDictResharder(first, out=model)
    away = StateDictResharder(model, "rank 0")
    for full in (first, second, first, second, first):
        into(full, out=model)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), taken(full[name], dim, SECTIONS[name], ranks.rank, 4)), name
            compared += parameter.numel()
        gathered = away(model)
        rows = reshard_state_dict(model, "4: S(0)")
        for name, value in full.items():
            assert ranks.rank or torch.equal(gathered[name], value), name
            start = ranks.rank * -(-value.shape[0] // 4)
            assert torch.equal(rows[name], value[start : start + -(-value.shape[0] // 4)]), name
    assert compared > 1_000
    assert into.plan.wire_bytes == into.plan.lower_bound == 0  # every rank has the full value
    assert away.plan.wire_bytes == away.plan.lower_bound > 0
    folder = ranks.gather(str(tmp_path))[0]
    if ranks.rank == 0:
        write(tmp_path / "weights.safetensors", second)
    ranks.gather(None)
    load_safetensors(folder, out=model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), taken(second[name], dim, SECTIONS[name], ranks.rank, 4)), name


@pytest.mark.ranks(4)
def test_sections_on_one_axis_of_two(ranks: Ranks) -> None:
    mesh, full = ranks.mesh((2, 2), ("dp", "tp")), full_values(0, 3)
    names = [name for name in full if all(copies < 4 for _, _, copies in SECTIONS[name])]
    full = {name: full[name] for name in names}
    model = Model(mesh, ranks.rank % 2, 2, 0, full)
    moved = reshard_state_dict(model, "4: S(1)")
    assert len(moved) == len(names) > 2
    for name, value in full.items():
        assert torch.equal(moved[name], value[:, ranks.rank * 2 : ranks.rank * 2 + 2])


@pytest.mark.ranks(2)
def test_sections_that_do_not_add_up_are_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    for sections in (((8, 3, 1),), ((4, 1, 1),), ((8, 1, 3),), ((8, 0, 1),)):
        local = torch.zeros(4, 2)
        local._sharding_info = (mesh, (Shard(0),), (8, 2), (2, 1), sections)  # type: ignore[attr-defined]
        with pytest.raises(PlanError, match=r"\[invalid-sections\] w"):
            reshard_state_dict({"w": local}, "2: R")


def test_random_layouts_include_sections() -> None:
    from layout_pairs import random_layout, random_shape

    rng = random.Random(1)
    kinds = {type(random_layout(rng, random_shape(rng), 4)).__name__ for _ in range(200)}
    assert "FusedShardMap" in kinds
