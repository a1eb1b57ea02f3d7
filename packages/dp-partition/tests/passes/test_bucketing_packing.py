"""A rank's graph leaves out packing, with the same results."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.capture.inputs import read_arguments
from dp_partition.capture.state import find_step_state
from dp_partition.nodes import aten
from dp_partition.pipeline import build_program
from dp_partition.plan.placements import fake_mesh
from dp_partition.plan.plan import CommConfig, Settings, TensorInfo, plan_placements
from ranktest import Ranks
from torch import fx, nn

SGD = partial(torch.optim.SGD, lr=0.5)


class Tied(nn.Module):
    """A product of which nothing else is made, one of which the update is, a weight used twice, rows out of line."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.twice, self.odd, self.down = (
            nn.Linear(16, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 5, bias=False),
            nn.Linear(5, 16, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.twice(self.twice(self.up(x)).tanh())
        return self.down(self.odd(y))  # type: ignore[no-any-return]


def graph_of(style: str, model: nn.Module, step: Any = models.mean_step, rows: int = 4, **comm: Any) -> fx.Graph:
    """A step's graph for rank 1 of 2, with local values."""
    args = (model, SGD(model.parameters()), torch.ones(rows, 16))
    step_state = find_step_state(step, args, {})
    infos = [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in step_state.params.items()]
    plan = plan_placements(infos, dp.DataParallelStyle[style.upper()], 2)
    settings = Settings(plan.style, comm=CommConfig(**comm), reshard=False)
    program = build_program(step, read_arguments("step", args, {}), step_state, plan, fake_mesh(2, 1, "cpu"), settings)
    return program.with_local_values().graph


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


@pytest.mark.parametrize("style", ["zero2", "fully_shard"])
def test_what_is_scattered_alone_is_not_packed(style: str) -> None:
    graph = graph_of(style, nn.Linear(16, 8, bias=False), bucket_bytes=1)
    assert not calls(graph, aten.cat.default) + calls(graph, aten._chunk_cat.default)
    assert not calls(graph, aten.new_empty.default)


def looked_at_step(model: Any, optim: Any, x: Any) -> Any:
    """Another tensor lies in the memory of a gradient."""
    loss = model(x).square().mean()
    loss.backward()
    raw = model.weight.grad
    part = raw.view(-1)[3:7]
    optim.step()
    optim.zero_grad()
    return loss.detach(), part.clone()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_a_gradient_that_something_else_looks_at(ranks: Ranks, bucket_mb: float) -> None:
    model = models.seeded(lambda: nn.Linear(16, 8)).double().to(ranks.device)
    alone = models.seeded(lambda: nn.Linear(16, 8)).double().to(ranks.device)
    step = dp.compile(looked_at_step, mesh=ranks.mesh((2,), ("dp",)), style="replicate", bucket_mb=bucket_mb)
    optim, other = SGD(model.parameters()), SGD(alone.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        batch = torch.randn(8, 16, generator=generator, dtype=torch.float64).to(ranks.device)
        _, part = step(model, optim, models.rows_of(ranks, batch))
        _, expected = looked_at_step(alone, other, batch)
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-14)
    with step.unsharded():
        torch.testing.assert_close(model.weight, alone.weight, rtol=1e-12, atol=1e-14)
