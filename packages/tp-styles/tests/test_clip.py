"""`clip_grad_norm_` on meshes of one to three dims: equal to one process, and bit-equal on all ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# float64: sums in another order than one process has them.
RTOL = 1e-12


def reference(model: nn.Module, batch: torch.Tensor, order: float, max_norm: float) -> tuple[torch.Tensor, nn.Module]:
    """Norm and clipped gradients of the model alone."""
    models.next_token_loss(model(batch), batch).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, order), model


def full(parameter: torch.Tensor, mesh: Any) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    holder = nn.Module()
    holder.register_parameter("only", parameter)  # type: ignore[arg-type]  # a parameter
    return models.full_gradients(holder, mesh)["only"]


def check(ranks: Ranks, model: nn.Module, alone: nn.Module, batch: torch.Tensor, mesh: Any, order: float) -> int:
    """Clip both; compare norm and every gradient. The model has its gradients already."""
    expected, alone = reference(alone, batch, order, 0.05)
    norm = tp.clip_grad_norm_(model.parameters(), 0.05, order)
    torch.testing.assert_close(norm, expected, atol=0, rtol=RTOL)
    assert len(set(ranks.gather(norm.item()))) == 1  # bits, not digits
    state = {name.removeprefix("module."): full(p, mesh) for name, p in model.named_parameters()}
    return models.assert_close(
        state, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}, atol=1e-12
    )


ORDERS = (2.0, 1.0, math.inf)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("beside", ["fsdp", "fsdp-uneven", "ddp", "nothing"])
def test_two_dims(ranks: Ranks, beside: str) -> None:
    """FSDP2's `_StridedShard` is no `Shard`: taken for a replica, the norm was too small and differed by rank."""
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    width = 12 if beside == "fsdp-uneven" else 16
    for order in ORDERS:
        model: Any = models.seeded(lambda: models.GPT(width=width)).double()
        alone = copy.deepcopy(model)
        tp.apply_plan(model, mesh["tp"], models.gpt_plan())
        if beside.startswith("fsdp"):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        batch = torch.randint(0, 17, (4, 6), generator=torch.Generator().manual_seed(3))
        own = batch.chunk(2)[mesh["dp"].get_local_rank()]
        models.next_token_loss(model(own), own).backward()
        if beside in ("ddp", "nothing"):  # DTensors, averaged by hand; beside "nothing" some lie on the whole mesh
            for parameter in model.parameters():
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                torch.distributed.all_reduce(local, group=mesh.get_group("dp"))
                local /= 2
        if beside == "nothing":
            scatter = model.norm.weight
            lone = nn.Parameter(distribute_tensor(scatter.detach(), mesh, [Shard(0), Replicate()]))
            lone.grad = distribute_tensor(scatter.grad, mesh, [Shard(0), Replicate()])
            model.norm.weight = lone
        assert check(ranks, model, alone, batch, mesh["tp"], order) > 4000


@pytest.mark.ranks(8)
def test_three_dims(ranks: Ranks) -> None:
    """Hybrid sharding beside tensor parallelism; then one parameter on each sub-mesh."""
    mesh = ranks.mesh((2, 2, 2), ("rep", "shard", "tp"))
    model: Any = models.seeded(models.GPT).double()
    alone = copy.deepcopy(model)
    tp.apply_plan(model, mesh["tp"], models.gpt_plan())
    fully_shard(model, mesh=mesh["rep", "shard"])
    batch = torch.randint(0, 17, (4, 6), generator=torch.Generator().manual_seed(3))
    own = batch.chunk(4)[mesh.get_local_rank("rep") * 2 + mesh.get_local_rank("shard")]
    models.next_token_loss(model(own), own).backward()
    assert {len(p.placements) for p in model.parameters()} <= {2, 3}
    assert check(ranks, model, alone, batch, mesh["tp"], 2.0) > 6000
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(7)]
    placed: list[tuple[Any, list[Any]]] = [
        (mesh["tp"], [Shard(1)]),
        (mesh["rep", "shard"], [Shard(0), Replicate()]),
        (mesh, [Replicate(), Shard(0), Shard(1)]),
        (mesh["shard"], [Replicate()]),
        (mesh["rep", "tp"], [Shard(1), Shard(1)]),
        (mesh, [Shard(0), Shard(0), Shard(0)]),
    ]
    parameters = [nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))]
    parameters[0].grad = values[0].clone()
    for value, (where, placements) in zip(values[1:], placed, strict=True):
        parameters.append(nn.Parameter(distribute_tensor(torch.zeros_like(value), where, placements)))
        parameters[-1].grad = distribute_tensor(value, where, placements)
    for order in ORDERS:
        norm = tp.clip_grad_norm_([*parameters, parameters[1]], 1e9, order)
        expected = torch.cat([value.flatten() for value in values]).norm(order)
        torch.testing.assert_close(norm, expected, atol=0, rtol=RTOL)
        assert len(set(ranks.gather(norm.item()))) == 1


@pytest.mark.ranks(2)
def test_replicas_that_differ_by_rounding(ranks: Ranks) -> None:
    """The norm is that of the first rank's replica everywhere; a rank without gradients takes part."""
    mesh = ranks.mesh((2,), ("tp",))
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3) + ranks.rank * 1e-6
    sharded = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if ranks.rank == 0:
        sharded.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    low = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    low.grad = torch.ones(1000, dtype=torch.bfloat16)
    wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    wave.grad = torch.tensor([3 + 4j, 0])
    norm = tp.clip_grad_norm_([plain, sharded, low, wave], 1.0)
    torch.testing.assert_close(norm, torch.tensor(3.0 + 2.0 + 1000.0 + 25.0).sqrt())
    assert len(set(ranks.gather(norm.item()))) == 1
