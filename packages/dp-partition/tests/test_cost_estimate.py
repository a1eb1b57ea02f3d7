"""`estimate`: bytes are exact, live memory is within 5 % of what a profiler measures, nothing of the caller changes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import dp_models as models
import dp_partition as dp
import pytest
import torch
import torch.distributed as dist
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.analysis import KINDS, live_memory
from ranktest import Ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
STYLES = ["replicate", "zero1", "zero2", "fully_shard", "default"]


def on_meta(make: Callable[[], nn.Module], *batch: torch.Tensor) -> tuple[Any, ...]:
    with torch.device("meta"):
        model = make()
    return model, ADAMW(model.parameters()), *(one.to("meta") for one in batch)


def closed_form(plan: dp.PartitionPlan) -> dict[str, int]:
    """Bytes that a rank sends, by kind, from shapes and placements alone; shards travel padded to equal chunks."""
    world, sent = plan.world, {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
    for param in plan.params:
        size = param.info.num_bytes
        rows = param.info.shape[0]
        others = -(-rows // world) * (size // rows) * (world - 1)
        replicated = param.grad.is_replicate()
        sent["all_reduce" if replicated else "reduce_scatter"] += size if replicated else others
        sent["all_gather"] += 0 if param.param.is_replicate() and param.state.is_replicate() else others
    return {kind: size for kind, size in sent.items() if size}


@pytest.mark.parametrize("style", STYLES)
def test_bytes_equal_the_closed_form(style: Any) -> None:
    assert not dist.is_initialized()
    compared = 0
    for world, bucket_mb in [(1024, 2 / 1024), (3, 0)]:
        estimate = dp.estimate(
            models.mean_step,
            *on_meta(models.mlp, torch.ones(4, 8)),
            world=world,
            style=style,
            bucket_mb=bucket_mb,
            reshard_after_forward=False,
        )
        expected = closed_form(estimate.plan)
        assert {kind: estimate.sent_bytes(kind) for kind in expected} == expected
        assert estimate.sent_bytes() == sum(expected.values())
        assert estimate.count() == sum(map(estimate.count, expected))
        carried = [name for message in estimate.messages for name in message.carries]
        names = [param.info.name for param in estimate.plan.params]
        assert set(carried) == set(names)
        sizes = [
            sum(p.local_numel(getattr(p, kind), world, 0) * 4 for p in estimate.plan.params)
            for kind in ("param", "grad", "state")
        ]
        counters = 4 * len(names)  # one step counter for each parameter
        assert [estimate.held.param_bytes, estimate.held.grad_bytes] == sizes[:2]
        assert estimate.held.state_bytes == 2 * sizes[2] + counters
        compared += len(expected)
    assert compared >= 2


class Drawn(nn.Module):
    """A model with some of everything whose memory could be misjudged, in sizes drawn by the test."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.width = dice.choice([16, 24, 40])
        self.tokens = nn.Embedding(dice.randrange(50, 400), self.width)
        parts: list[nn.Module] = [models.Block(self.width, 2) for _ in range(dice.randrange(0, 2))]
        parts += [
            nn.Sequential(nn.Linear(self.width, self.width), nn.Dropout(0.1)) for _ in range(dice.randrange(1, 3))
        ]
        dice.shuffle(parts)
        self.parts = nn.ModuleList(parts)
        self.norm = nn.BatchNorm1d(self.width)
        self.head = nn.Linear(self.width, dice.randrange(5, 300))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for part in self.parts:
            x = part(x)
        out: torch.Tensor = self.head(self.norm(x.flatten(0, 1)).view_as(x))
        return out


OPTIMIZERS: list[Any] = [
    partial(torch.optim.AdamW, lr=1e-2),
    partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    partial(torch.optim.Adam, lr=0.01, fused=True),
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    partial(torch.optim.Adagrad, lr=0.01),
]


def measured_peak(run: Callable[[], object], repeat: int = 4) -> int:
    """Most bytes that are allocated at one time on top of what is there, as torch's profiler sees the CPU allocator.

    The least of several runs: gloo's threads give back memory of the call before at times of their own, and a rank that
    is behind keeps what is sent alive longer.
    """
    peaks = []
    for _ in range(repeat):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
            run()
        events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        assert events
        peaks.append(most)
    return min(peaks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", [None, 3961494716, 1005, 1016])
def test_messages_and_peak_are_those_of_a_run(ranks: Ranks, case: int | None) -> None:
    """Shapes, optimizer and style are drawn when the test runs; the seed is in the message of a failure.

    In case 3961494716 the gradient of one large embedding is all that is reduced, and all that is updated. In 1005 and
    1016 a reduce-scatter is on its way while that gradient is packed: its result is not there before its wait.
    """
    seed = ranks.gather(secrets.randbits(32))[0] if case is None else case
    dice = random.Random(seed)
    make = partial(Drawn, random.Random(dice.random()))
    optim, style, semantics = dice.choice(OPTIMIZERS), dice.choice(STYLES), dice.choice(["local", "local", "global"])
    settings: dict[str, Any] = {"style": style, "semantics": semantics, "bucket_mb": dice.choice([0, 0.02, 25])}
    settings["reshard_after_forward"] = dice.choice([True, False])
    model = models.seeded(make).to(ranks.device)
    ids = torch.randint(0, 50, (2, dice.randrange(1, 5), dice.randrange(3, 20)), device=ranks.device)
    batch = (ids[0], ids[1] % 5)
    message = (seed, optim, settings, tuple(ids.shape), model)
    own = optim(model.parameters())
    estimate = dp.estimate(models.token_step, model, own, batch, world=ranks.world_size, rank=ranks.rank, **settings)
    step = dp.compile(models.token_step, mesh=ranks.mesh((ranks.world_size,), ("dp",)), check="never", **settings)
    step(model, own, batch)
    with ranks.record() as log:
        step(model, own, batch)
    assert tuple(m.kind for m in estimate.messages) == models.kinds_of(log), message
    assert [m.sent_bytes for m in estimate.messages] == [sum(event.bytes_sent) for event in log.events], message
    if ranks.device.type == "cpu":
        peak = sys.maxsize
        for _ in range(6):  # on a busy machine ranks may be out of step in all of the first runs
            more = measured_peak(lambda: step(model, own, batch)) + estimate.memory.resident_bytes
            peak = min(peak, more)
            close = abs(estimate.peak_bytes - peak) <= 0.05 * peak
            if all(ranks.gather(close)):
                break
        assert close, (estimate.peak_bytes, peak, estimate.memory.peak_kinds, message)
        late = live_memory(step.graph.graph, late=True).peak_bytes  # at most so much where the other rank is behind
        assert estimate.peak_bytes <= late <= 1.5 * estimate.peak_bytes, (estimate.peak_bytes, late, message)


def test_nothing_of_the_caller_changes() -> None:
    model = models.seeded(partial(models.GPT, tied=True))
    model.positions.weight.requires_grad_(False)  # type: ignore[union-attr]
    optim = ADAMW([p for p in model.parameters() if p.requires_grad])
    batch = models.tokens(torch.Generator())
    models.token_step(model, optim, *batch)  # there is state
    params, states = list(model.parameters()), dict(optim.state)
    values = [p.detach().clone() for p in params]
    estimate = dp.estimate(models.token_step, model, optim, *batch, world=64, style="zero1")
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(params[:1], optim.param_groups[0]["params"], strict=False))
    assert list(states) == list(optim.state)
    assert [torch.equal(a, b) for a, b in zip(values, params, strict=True)] == [True] * 16
    assert "also registered as head.weight" in estimate.explain("head.weight")
    assert "all_reduce" in estimate.explain("tokens.weight")
    assert "no collective" in estimate.explain("positions.weight")


def test_an_estimate_is_a_value() -> None:
    arguments = on_meta(models.mlp, torch.ones(4, 8))
    estimate = dp.estimate(models.mean_step, *arguments, world=8, style="zero2", accumulate=2)
    assert estimate.count("reduce_scatter") == 1, "micro-batches are reduced once"
    restored = pickle.loads(pickle.dumps(estimate))
    assert (restored, hash(restored), restored.to_json()) == (estimate, hash(estimate), estimate.to_json())
    data = json.loads(estimate.to_json())
    assert data["peak"]["bytes"] == estimate.peak_bytes == max(estimate.memory.totals)
    assert data["num_messages"] == {"reduce_scatter": 1, "all_gather": 1}
    # Parameters with two moments, four counters and the batch; twice, and what a rank holds.
    full = 4 * (3 * (8 * 16 + 16 + 16 * 3 + 3) + 4 + 4 * 8)
    assert data["check"]["bytes"] == estimate.check_bytes == 2 * full + estimate.memory.resident_bytes
    text = estimate.explain()
    assert "zero2 over 8 ranks" in text and f"{estimate.check_bytes:,}" in text
    assert f"{estimate.sent_bytes('all_gather'):,}" in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.rank = 1  # type: ignore[misc]


def test_what_makes_no_sense_is_refused() -> None:
    arguments = on_meta(models.mlp, torch.ones(4, 8))
    with pytest.raises(dp.PlanError) as caught:
        dp.estimate(models.mean_step, *arguments, world=4, rank=4, mesh=None, device="no device")
    codes = sorted(p.code for p in caught.value.problems)
    assert codes == ["conflicting-arguments", "invalid-argument", "invalid-argument"]
    with pytest.raises(dp.PlanError, match="unmatched-pattern"):
        dp.estimate(models.mean_step, *arguments, world=4, placements={"nothing": torch.distributed.tensor.Replicate()})


def test_a_gpu_is_estimated_where_there_is_none() -> None:
    """The graph is the CPU's; what gloo and packing on the CPU copy is not counted."""
    arguments = on_meta(models.mlp, torch.ones(4, 8))
    on_cpu = dp.estimate(models.mean_step, *arguments, world=8, style="fully_shard")
    on_gpu = dp.estimate(models.mean_step, *arguments, world=8, style="fully_shard", device="cuda")
    assert [m.sent_bytes for m in on_gpu.messages] == [m.sent_bytes for m in on_cpu.messages]
    assert on_gpu.held == on_cpu.held
    assert on_gpu.held.param_bytes < on_gpu.peak_bytes < on_cpu.peak_bytes


def test_the_picture_has_a_band_for_each_kind_of_memory(tmp_path: Path) -> None:
    cost = dp.estimate(models.mean_step, *on_meta(models.mlp, torch.ones(4, 8)), world=8, style="fully_shard")
    cost.picture(tmp_path / "memory.svg")
    root = ElementTree.parse(tmp_path / "memory.svg").getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [kind for number, kind in enumerate(KINDS) if any(at[number] for at in cost.memory.live)]
    assert len(titles) >= 5
