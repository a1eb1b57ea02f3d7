"""`verify`: one device and all ranks side by side in one process, for any world."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import rule_mutations as rules
import torch
from dp_partition import pipeline
from dp_partition.passes.insert_collectives import Mover
from dp_partition.plan.placements import fake_mesh
from dp_partition.sharding import propagate
from dp_verification import verify
from torch import fx, nn
from torch.distributed.tensor import Partial

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
SGD = partial(torch.optim.SGD, lr=0.1)


def made(function: Callable[..., Any], **settings: Any) -> dp.CompiledStep:
    return dp.compile(function, mesh=fake_mesh(1, 0, "cpu"), **settings)


def rows(width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("semantics", "style"), [("local", "zero2"), ("global", "fully_shard")])
def test_every_node_is_compared_for_every_world(semantics: str, style: str) -> None:
    model = models.seeded(models.GPT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optim = ADAMW(model.parameters())
    step = made(models.token_step, style=style, semantics=semantics)
    (batch,) = models.tokens(torch.Generator().manual_seed(0), rows=2)
    report = verify(step, model, optim, batch, world=(2, 3))
    assert report.worlds == (2, 3)
    assert report.in_double, "a float32 model is verified in double precision"
    assert report.num_nodes > 150
    assert report.num_elements > 200_000
    assert step.num_traces == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optim.state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.unsqueeze(1))[0]
        return out


# In float32 oneDNN's LSTM keeps a workspace that no graph can hold.
@pytest.mark.parametrize("semantics", ["local", "global"])
def test_recurrent_layers(semantics: str) -> None:
    model = Recurrent()
    step = made(models.mean_step, style="fully_shard", semantics=semantics)
    assert verify(step, model, SGD(model.parameters()), rows().float()).num_nodes > 20


def noisy_step(draw: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, optim: Any, x: torch.Tensor) -> Any:
    optim.zero_grad()
    loss: Any = (model(x) * draw(x)).square().mean()
    loss.backward()
    optim.step()
    return loss


NOISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of every element": lambda x: torch.nn.functional.dropout(x, 0.5),
    "of every row": lambda x: (torch.rand(x.shape[0], 1, dtype=x.dtype) > 0.5).to(x.dtype),
    "of every feature": lambda x: torch.randn(8, dtype=x.dtype),
    "in place": lambda x: torch.empty(8, dtype=x.dtype).normal_(),
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_under_global_semantics(noise: str) -> None:
    """Numbers that all ranks use are rank 0's: each rank's own would make the replicas differ."""
    model = nn.Linear(8, 8).double()
    step = made(partial(noisy_step, NOISE[noise]), style="replicate", semantics="global")
    assert verify(step, model, SGD(model.parameters()), rows()).num_nodes > 20


def langevin_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss = models.mean_step(model, optim, x)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.empty_like(param).normal_(), alpha=0.01)
    return loss


def test_noise_in_an_update() -> None:
    """Under local semantics every rank would draw its own; under global semantics all take the same."""
    model = nn.Linear(8, 8).double()
    with pytest.raises(dp.PlanError, match="ranks-diverge"):
        verify(made(langevin_step), model, SGD(model.parameters()), rows())
    for style in ("replicate", "fully_shard"):
        verify(made(langevin_step, semantics="global", style=style), model, SGD(model.parameters()), rows())


# Wrong rules. The whole table: tools/mutate_rules.py, its result: docs/benchmarks/dp-partition-rules.md.

SAMPLE = [("mm", "reduction forgotten", "mm"), ("addmm", "output taken for whole", "linear"),
          ("mean", "another reduction", "mean"), ("view", "output on another dim", "views"),
          ("cumsum", rules.CARELESS, "cumulative rows"), ("_softmax", rules.CARELESS, "softmax over rows"),
          ("slice_backward", "output on another dim", "slice"), ("mm", "another reduction", "linear"),
          ("linalg_vector_norm", "reduction forgotten", "norm"), ("mul", "first input whole", "linear")]  # fmt: skip


@pytest.mark.parametrize(("row", "change", "probe"), SAMPLE)
def test_a_wrong_rule_is_found_and_the_node_named(row: str, change: str, probe: str) -> None:
    outcome = rules.try_mutation(row, change, [probe])
    assert outcome.result == "killed", outcome
    assert "node " in outcome.how, outcome


def test_a_shape_argument_left_global_is_found() -> None:
    probes = ["slice"]
    assert rules.try_shape_argument(torch.ops.aten.slice_backward.default, probes).result == "killed"


def test_a_gradient_reduced_with_the_wrong_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original averages what is a sum already: gradients 1/world too small."""
    monkeypatch.setattr(propagate, "AVG", Partial("sum"))
    model = models.seeded(models.mlp).double()
    with pytest.raises(dp.PlanError, match=r"\[verify-mismatch\] node .*\[P\(sum\)\]"):
        verify(made(models.mean_step, style="fully_shard"), model, SGD(model.parameters()), rows())


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "wait", lambda self, node: node)
    model = models.seeded(models.mlp).double()
    with pytest.raises(dp.PlanError, match="verify-mismatch"):
        verify(made(models.mean_step, style="replicate"), model, SGD(model.parameters()), rows())


def test_ranks_that_communicate_differently_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dp_partition.passes.bucketing import bucket_and_schedule as original

    def changed(graph: fx.Graph, moves: list[Any], mover: Mover, comm: Any) -> None:
        original(graph, moves, mover, comm)
        if mover.rank == 1:
            node = next(n for n in graph.nodes if "all_reduce" in str(n.target))
            node.update_arg(1, "max")

    monkeypatch.setattr(pipeline, "bucket_and_schedule", changed)
    model = models.seeded(models.mlp).double()
    step = made(models.mean_step, style="replicate", bucket_mb=0)
    with pytest.raises(dp.PlanError, match=r"ranks-disagree.*rank 1"):
        verify(step, model, SGD(model.parameters()), rows())


def test_a_collective_whose_input_is_written_in_flight_is_found() -> None:
    from dp_simulate import Issued, deliver

    graph = fx.Graph()
    node = graph.placeholder("x")
    calls = [Issued(node, "all_reduce", torch.ones(2), ("sum", "g"), torch.empty(2)) for _ in range(2)]
    assert all(call.result.isnan().all() for call in calls)
    calls[1].source.mul_(2)
    with pytest.raises(dp.PlanError, match="invalid-program"):
        deliver(calls)
