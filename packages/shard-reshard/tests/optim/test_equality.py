"""Optimizers on owners are bit for bit those of one process, and the bytes sent are the plan's bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import WholeMatrices
from whole_models import SIZES, mesh_of, meshed, of_mesh

TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Muon": lambda params: torch.optim.Muon(params, lr=0.02),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
}
STEPS = 6


@pytest.mark.ranks(2, 3, 4)
def test_torch_optimizers_on_meshes(ranks: Ranks) -> None:
    for layout, (shape, placements) in meshed(ranks.world_size).items():
        mesh = mesh_of(shape)
        for name, make in TORCH.items():
            twin = of_mesh(mesh, placements, SIZES)
            optimizer = WholeMatrices(twin.named.items(), make, bucket_bytes=100)
            one = make(list(twin.reference.values()))
            for step in range(STEPS):
                twin.backward(step)
                with ranks.record(allow_empty=True) as log:
                    optimizer.step()
                one.step()
                assert twin.compared() > 0, (layout, name)
                sent = sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")
                # The first step brings the values to the owners too: as many bytes as the gradients.
                extra = sum(there for there, _ in optimizer.plan.sent or ()) if step == 0 else 0
                assert sum(ranks.gather(sent)) == optimizer.plan.lower_bound + extra, (layout, name)
                assert log.count("all_to_all") <= (3 if step == 0 else 2) * len(optimizer.plan.chunks)
            assert len(optimizer.plan.chunks) > 1
