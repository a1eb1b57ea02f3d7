"""Python frames of this package that one call enters, the first and a steady one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_partition.plan.settings import Style
from ranktest import Ranks

OWN = str(Path(dp.__file__).parent)


def frames_of(call: Any) -> list[str]:
    frames: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OWN):
            frames.append(f"{code.co_filename.removeprefix(OWN)}:{code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_steady_call_enters_few_frames(ranks: Ranks, style: Style) -> None:
    """Four parameters under AdamW, whose group has ten entries: 178 frames before arguments were read once."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = dp.compile(models.mean_step, capture="always", mesh=ranks.mesh((2,), ("dp",)), style=style, check="first")
    x = torch.ones(4, 8, device=ranks.device)
    for _ in range(4):
        step(model, optim, x)
    frames = frames_of(lambda: step(model, optim, x))
    assert len(frames) <= 74 and len(set(frames)) <= 60, "\n".join(frames)


@pytest.mark.ranks(2)
def test_the_first_call_enters_a_bounded_number_of_functions(ranks: Ranks) -> None:
    """The first call plans, traces, partitions, places and checks: 450 functions in 35 files are the target."""
    model = models.seeded(models.mlp).to(ranks.device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dp.compile(models.mean_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    names = set(frames_of(lambda: step(model, optim, torch.ones(4, 8, device=ranks.device))))
    files = {name.split(":")[0] for name in names}
    assert len(names) <= 475 and len(files) <= 49, (len(names), len(files), *sorted(files))
