"""One norm for the whole model on every rank."""

from __future__ import annotations

import math
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tp_ddp_bridge import clip_grad_norm_, grad_norm, pre_dp_module_transform


def loss_of(model: Any) -> torch.Tensor:
    torch.manual_seed(5)
    out: torch.Tensor = model(torch.randn(4, 16)).pow(2).sum() * 10
    return out


def grads_of_one_process(max_norm: float, norm_type: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    reference = models.seeded(models.MLP)
    torch.autograd.backward(loss_of(reference))
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    return norm, {name: p.grad for name, p in reference.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bridged", [False, True], ids=["dtensor", "bridged"])
def test_clip_is_that_of_one_process(ranks: Ranks, bridged: bool) -> None:
    # The seed: 0.460 on one rank, 0.463 on the other, 0.554 in truth; replicated weights then drift apart.
    mesh = ranks.mesh((2,), ("tp",))
    compared = 0
    for norm_type in (2.0, 1.0, 3.5, math.inf):
        for foreach in (None, False):
            expected, grads = grads_of_one_process(0.25, norm_type)
            model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
            if bridged:
                pre_dp_module_transform(model)
            torch.autograd.backward(loss_of(model))
            with ranks.record() as log:
                norm = clip_grad_norm_(model.parameters(), 0.25, norm_type, foreach=foreach)
            assert log.count("all_reduce") == len(log.events) == 1  # one tensor-parallel group
            assert sum(log.events[0].bytes_sent) <= 8  # two float32
            assert not isinstance(norm, DTensor) and norm.dim() == 0
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            assert len(set(ranks.gather(float(norm)))) == 1  # to the bit
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                mine = models.whole(getattr(parameter.grad, "full_tensor", lambda g=parameter.grad: g)())
                if bridged:
                    info = parameter._sharding_info
                    mine = models.whole(
                        DTensor.from_local(parameter.grad, info[0], info[1], shape=info[2], stride=info[3])
                    )
                torch.testing.assert_close(mine, grads[name], rtol=1e-5, atol=1e-7)
                compared += 1
    assert compared == 4 * 2 * 6


@pytest.mark.ranks(2)
def test_replicated_tied_and_empty_shards_count_right(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.uneven = nn.Parameter(distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]))  # nothing on rank 1
            self.whole = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
            self.tied = self.uneven
            self.unused = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
            self.plain = nn.Parameter(torch.ones(1))

    model = pre_dp_module_transform(Odd())
    named = dict(model.named_parameters(remove_duplicate=False))
    assert len(named) == 5 and named["tied"] is named["uneven"]
    named["uneven"].grad = torch.full_like(named["uneven"], 2.0)  # 3 elements: 12
    named["whole"].grad = torch.full_like(named["whole"], 1.0)  # 2 elements, once: 2
    named["plain"].grad = torch.full_like(named["plain"], 1.0)  # 1
    assert float(grad_norm(named.values())) == pytest.approx(math.sqrt(15.0))
    assert float(grad_norm(named.values(), math.inf)) == 2.0
    assert float(grad_norm(named.values(), 1.0)) == pytest.approx(9.0)
    # replicas that differ in their last bits still get one norm on all ranks
    named["whole"].grad += 1e-3 * ranks.rank
    assert len(set(ranks.gather(float(grad_norm(named.values()))))) == 1


@pytest.mark.ranks(4)
def test_two_dimensional_tensor_parallelism(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("a", "b"))
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(8, 6, generator=generator) for name in ("ab", "a", "b", "none")}
    places: dict[str, Any] = {
        "ab": [Shard(0), Shard(1)],
        "a": [Shard(0), Replicate()],
        "b": [Replicate(), Shard(1)],
        "none": [Replicate(), Replicate()],
    }
    module = nn.ParameterDict({n: nn.Parameter(distribute_tensor(t, mesh, places[n])) for n, t in full.items()})
    pre_dp_module_transform(module)
    for name, parameter in module.named_parameters():
        info = parameter._sharding_info  # type: ignore[attr-defined]
        parameter.grad = distribute_tensor(full[name], mesh, info[1]).to_local()
    expected = nn.utils.get_total_norm(list(full.values()))
    with ranks.record() as log:
        norm = grad_norm(module.parameters())
    assert log.count("all_reduce") == len(log.events) == 2  # one per group, of the numbers that concern it
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    with ranks.record() as log:
        biggest = grad_norm(module.parameters(), math.inf)
    assert float(biggest) == max(float(t.abs().max()) for t in full.values())
    assert len(set(ranks.gather(float(norm)))) == 1


@pytest.mark.ranks(2)
def test_what_is_refused_and_what_needs_no_communication(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    pre_dp_module_transform(model)
    torch.autograd.backward(loss_of(model))
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    with ranks.record(allow_empty=True) as log:
        with pytest.raises(ValueError, match=r"invalid-layout.*parameter 6 of shape \(3,\)"):
            clip_grad_norm_([*model.parameters(), stranger], 1.0)
        with pytest.raises(ValueError, match="norm_type"):
            grad_norm(model.parameters(), 0.0)
        assert float(clip_grad_norm_([stranger], 1.0)) == pytest.approx(math.sqrt(3))
        assert float(clip_grad_norm_([], 1.0)) == 0.0
        assert float(grad_norm(stranger)) == pytest.approx(1.0)
    assert not log.events
    head = [p for name, p in model.named_parameters() if name.startswith("head")]
    head[0].grad[0, 0] += 1e-3 * ranks.rank  # replicas that differ get one norm
    with ranks.record() as log:
        norm = float(grad_norm(head))
    assert log.ops == ("all_reduce",)
    assert norm > 0 and len(set(ranks.gather(norm))) == 1
    next(model.parameters()).grad.fill_(math.nan)
    assert math.isnan(float(grad_norm(model.parameters())))
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
