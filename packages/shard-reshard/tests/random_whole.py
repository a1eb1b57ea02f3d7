"""Drawn models, layouts, groups and owners for `WholeMatrices`, against one process; an attack by numbers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from ranktest import Ranks
from shard_reshard import WholeMatrices
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from whole_models import Twin, add_experts, mesh_of, of_sections

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=0.02),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.02, eps=(1e-7, 1e-3)),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
}


def drawn(number: int, world: int) -> tuple[Twin, random.Random, str]:
    """Return parameters of one drawn case, the same on every rank, and the name of its optimizer."""
    draw = random.Random(number)
    name = draw.choice(list(OPTIMIZERS))
    twin = Twin()
    shapes = [(world,)] + ([(2, 2), (1, 4)] if world == 4 else [(1, world)])
    meshes = [mesh_of(shape) for shape in shapes]
    for count in range(draw.randint(1, 7)):
        at, kind = f"p{count}", draw.choice(["mesh", "mesh", "mesh", "sections", "experts", "plain"])
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
        rank = 2 if name == "Muon" else draw.choice([1, 2, 2, 4])
        size = tuple(draw.randint(1, 11) for _ in range(rank))
        if kind == "mesh":
            mesh = draw.choice(meshes)
            placements = [draw.choice([Replicate(), *map(Shard, range(rank))]) for _ in range(mesh.ndim)]
            full = torch.randn(size, generator=torch.Generator().manual_seed(count)).to(dtype)

            def shard(value: torch.Tensor, mesh: Any = mesh, placements: Any = placements) -> torch.Tensor:
                return distribute_tensor(value, mesh, placements)

            twin.add(at, full, shard)
        elif kind == "sections":
            unit = draw.choice([1, 2])
            sections = [(unit * draw.randint(1, 9), unit, 1) for _ in range(draw.randint(2, 3))]
            experts = draw.choice([0, 0, 2]) if name != "Muon" else draw.choice([0, 2])
            of_sections(meshes[0], sections, draw.randint(1, 8), experts)(twin, at)
        elif kind == "experts":
            add_experts(twin, at, meshes[0], Shard(draw.randint(0, 2)), draw.randint(1, 5))
        else:
            twin.add(at, torch.randn(size, generator=torch.Generator().manual_seed(count)), lambda value: value)
    return twin, draw, name


def attack(ranks: Ranks, cases: int, first: int = 0) -> Counter[str]:
    """Train ``cases`` drawn models for some steps; count what was compared."""
    counts: Counter[str] = Counter()
    for number in range(first, first + cases):
        twin, draw, name = drawn(number, ranks.world_size)
        make = OPTIMIZERS[name]
        owners = draw.choice([None, None, 1, [ranks.world_size - 1]])
        optimizer = WholeMatrices(twin.named, make, bucket_bytes=draw.choice([1, 300, 10**7]), owners=owners)
        one = make(list(twin.reference.values()))
        counts["cases"] += 1
        counts[name] += 1
        for step in range(6):
            without = [key for key in twin.named if draw.random() < 0.15]
            twin.backward(step, without)
            if draw.random() < 0.2:
                for each in (optimizer, one):
                    each.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            one.step()
            try:
                counts["elements"] += twin.compared()
            except AssertionError as error:
                raise AssertionError(f"case {number} ({name}), step {step}: {error}") from error
            if step == 3 and draw.random() < 0.5:  # a restart
                state = optimizer.state_dict()
                optimizer = WholeMatrices(twin.named, make, bucket_bytes=draw.choice([1, 300]))
                optimizer.load_state_dict(state)
                one_state, one = one.state_dict(), make(list(twin.reference.values()))
                one.load_state_dict(one_state)  # torch rounds some state to the parameter's dtype when it loads
                counts["restarts"] += 1
    return counts
