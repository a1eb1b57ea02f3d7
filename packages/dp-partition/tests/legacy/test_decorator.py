"""The decorator of torch 2.1 and the graph-level functions it stood on."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

STYLES = {"replicate": dp.DataParallelStyle.REPLICATE, "fully_shard": dp.DataParallelStyle.FULLY_SHARD,
          "default": dp.DataParallelStyle.DEFAULT}  # fmt: skip


@pytest.mark.ranks(2)
def test_decorated_steps_equal_one_device(ranks: Ranks) -> None:
    for style, optim in [("replicate", "adam-foreach"), ("fully_shard", "adamw-fused"), ("default", "momentum")]:
        with models.case((style, optim)):
            train_decorated(ranks, style, optim)


@pytest.mark.ranks(4)
def test_decorated_steps_on_four_ranks(ranks: Ranks) -> None:
    train_decorated(ranks, "fully_shard", "momentum")


def train_decorated(ranks: Ranks, style: Any, optim: str) -> None:
    make: Any = {
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam-foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
        "adamw-fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    }[optim]
    model = models.seeded(models.mlp, ranks.rank).double().to(ranks.device)
    reference = models.seeded(models.mlp).double()
    own, theirs = make(model.parameters()), make(reference.parameters())
    step = dp.legacy.compile(parallel_mode=dp.legacy.DataParallel(style))(models.mean_step)
    generator = torch.Generator().manual_seed(3)
    for i in range(6):
        (batch,) = models.vectors(generator)
        loss = step(model, own, models.rows_of(ranks, batch), last_train_step=i == 5)
        losses = torch.stack(ranks.gather(loss.detach().cpu()))  # each of its rank's rows
        torch.testing.assert_close(
            losses.mean(), models.mean_step(reference, theirs, batch).detach(), rtol=1e-11, atol=0
        )
    assert step.step.num_traces <= 2  # type: ignore[attr-defined]  # an optimizer may make its state in a first one
    full = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    assert sum(p.numel() for p in full) == sum(p.numel() for p in reference.parameters()) > 0
    for one, other in zip(full, reference.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-12)


def sum_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.ranks(2)
def test_gradients_of_a_sum_are_averaged_as_torch_2_1_did(ranks: Ranks) -> None:
    """Its own tests compare a summed loss with DistributedDataParallel, which averages."""
    for style in ("replicate", "fully_shard", "default"):
        model, reference = (models.seeded(models.mlp).double().to(ranks.device) for _ in range(2))
        ddp = DistributedDataParallel(reference)
        own, theirs = (torch.optim.SGD(each.parameters(), lr=0.001, momentum=0.9) for each in (model, reference))
        step = dp.legacy.compile(parallel_mode=dp.legacy.DataParallel(style))(sum_step)
        generator = torch.Generator().manual_seed(3)
        for _ in range(5):
            (batch,) = models.vectors(generator)
            rows = models.rows_of(ranks, batch)
            torch.testing.assert_close(step(model, own, rows), sum_step(ddp, theirs, rows), rtol=1e-11, atol=0)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other.detach(), rtol=1e-9, atol=1e-12)  # type: ignore[attr-defined]


def test_wrong_modes_are_refused() -> None:
    with pytest.raises(TypeError, match="DataParallel"):
        dp.legacy.compile(parallel_mode="replicate")  # type: ignore[arg-type]


def test_without_process_group_there_is_one_clear_error() -> None:
    model = models.mlp()
    step = dp.legacy.compile()(models.mean_step)
    with pytest.raises(dp.PlanError, match="no-process-group"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 8))


def traced(model: nn.Module, batch: torch.Tensor, lr: float) -> fx.GraphModule:
    """A hand-traced SGD step on the whole batch: parameters first, then momentum buffers, then the batch."""
    names = [name for name, _ in model.named_parameters()]

    def step(params: list[torch.Tensor], states: list[torch.Tensor], x: torch.Tensor) -> Any:
        leaves = [p.detach().requires_grad_() for p in params]
        with dp.gradients_tagging(dict(zip(names, leaves, strict=True))):
            loss: Any = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x,)).square().mean()
            loss.backward()
        with torch.no_grad():
            for param, state, leaf in zip(params, states, leaves, strict=True):
                assert leaf.grad is not None
                state.mul_(0.9).add_(leaf.grad)
                param.add_(state, alpha=-lr)
        return loss

    params = [p.detach().clone() for p in model.parameters()]
    module = make_fx(step, tracing_mode="fake")(params, [torch.zeros_like(p) for p in params], batch)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module


@pytest.mark.ranks(2)
def test_graph_level_functions(ranks: Ranks) -> None:
    for style in STYLES:
        with models.case(style):
            graph_level_functions(ranks, style)


def graph_level_functions(ranks: Ranks, style: str) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model, reference = models.seeded(models.mlp).double().to(ranks.device), models.seeded(models.mlp).double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optim.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    states: dict[str, Any] = {name: dict(optim.state[p]) for name, p in params.items()}
    graph = traced(model, torch.zeros(8, 8, dtype=torch.float64, device=ranks.device), lr=0.1)
    assert any("tag_grad" in str(node.target) for node in graph.graph.nodes)
    part = dp.partition_data_parallel(graph, model, optim, params, states, (), {}, mesh, STYLES[style], 0)
    assert part is graph
    assert not any("tag_grad" in str(node.target) for node in graph.graph.nodes)
    assert all("sharding" not in node.meta for node in graph.graph.nodes)
    kinds = {node.meta["node_type"] for node in graph.graph.nodes if "node_type" in node.meta}
    assert kinds >= {dp.NodeType.PARAM, dp.NodeType.STATE, dp.NodeType.ACT, dp.NodeType.GRAD}
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert {id(p) for p in optim.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert set(optim.state) == set(model.parameters())

    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        (batch,) = models.vectors(generator)
        inputs = [*params.values(), *(s["momentum_buffer"] for s in states.values())]
        (loss,) = part(*inputs, models.rows_of(ranks, batch))
        expected = models.mean_step(reference, theirs, batch).detach()
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-11, atol=0)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor().cpu(), other, rtol=1e-9, atol=1e-12)  # type: ignore[attr-defined]


@pytest.mark.ranks(2)
def test_strategies_and_markings(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("dp",))
    model = models.seeded(models.mlp).double()
    graph = traced(model, torch.zeros(8, 8, dtype=torch.float64), lr=0.1)
    strategies = dp.build_data_parallel_strategies(graph, 4, 4, mesh)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    first = strategies[placeholders[0]]
    assert isinstance(first, dp.DataParallelStrategy)
    assert first.node_type is dp.NodeType.PARAM
    placements = [s.output_spec.placements for s in first.strategies]  # type: ignore[union-attr]
    assert placements == [(Replicate(),), (Shard(0),)]
    assert strategies[placeholders[4]].node_type is dp.NodeType.STATE  # type: ignore[union-attr]
    assert strategies[placeholders[8]].node_type is dp.NodeType.ACT  # type: ignore[union-attr]
    losses = [s for s in strategies.values() if isinstance(s, dp.DataParallelStrategy) and s.reduction_over_batch]
    assert losses
    dp.mark_data_parallel_shardings(graph, 4, 4, strategies, dp.DataParallelStyle.DEFAULT)
    specs = [node.meta["sharding"].output_spec.placements[0] for node in placeholders[:4]]
    assert specs == [Shard(0), Shard(0), Replicate(), Replicate()]  # 16 rows, 3 rows
    with pytest.raises(dp.PlanError, match="conflicting-arguments"):
        dp.mark_data_parallel_shardings(graph, 4, 4, strategies, dp.DataParallelStyle.ZERO1)
    analyzer = dp.BatchDimAnalyzer(0)
    with pytest.raises(RuntimeError, match="init_batch_dim_size"):
        analyzer.compute_batch_dim(placeholders[8])
    analyzer.init_batch_dim_size(8)
    for node in placeholders[:8]:
        analyzer.set_batch_dim(node, -1)
    analyzer.set_batch_dim(placeholders[8], 0)
    first_product = next(node for node in graph.graph.nodes if "addmm" in str(node.target))
    assert analyzer.compute_batch_dim(first_product) == 0  # eight features as well: not told apart by size
    assert analyzer.compute_act_spec(first_product, mesh).placements == (Shard(0),)
    mean = next(node for node in graph.graph.nodes if str(node.target) == "aten.mean.default")
    assert analyzer.compute_batch_dim(mean) == -2
