"""The estimate of activations against what a real forward keeps: whole in one process, and cut on two ranks."""

import pytest
import torch
from ranktest import Ranks
from shard_spec import ShardingPlan
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """Attention by torch's kernel and a gated feed-forward, heads first where weights are cut."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(batch, length, -1, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        fed: torch.Tensor = self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x + fed


RULES = {"*.{wq,wk,wv,gate,up}.weight": "tp:S(0)", "*.{wo,down}.weight": "tp:S(1)"}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_bytes(module: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that autograd keeps after a real forward, each memory once, parameters left out."""
    owned = {local_of(p).untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = local_of(tensor)
        alive.append(local)
        memory = local.untyped_storage()
        if memory.data_ptr() not in owned:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    return sum(kept.values())


@pytest.mark.parametrize("batch", [1, 4])
def test_the_estimate_of_a_whole_model_is_close_to_a_real_forward(batch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    inputs = torch.randn(batch, 16, 32)
    found = ShardingPlan({}, mesh={"dp": 2}).activations(model, inputs)
    real = saved_bytes(model, inputs)
    assert found.local_bytes == found.whole_bytes
    assert found.num_tensors > 20
    # Measured 8 % too much: the CPU's attention kernel keeps less than the decomposed one on meta.
    assert abs(found.local_bytes - real) <= 0.1 * real, (found.local_bytes, real)


@pytest.mark.ranks(2)
def test_the_estimate_of_a_tensor_parallel_model_is_close_to_a_real_rank(ranks: Ranks) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    plan = ShardingPlan(RULES, mesh=ranks.mesh((2,), ("tp",)))
    inputs = torch.randn(4, 16, 32)
    found = plan.activations(model, inputs)
    parallelize_module(model, ranks.mesh((2,), ("tp",)), plan.to_parallelize_plan(model))
    owned_before = saved_bytes(model, inputs)
    assert found.local_bytes < 0.75 * found.whole_bytes
    # DTensor keeps gathered copies of its inputs beside what the model keeps: an estimate, within a quarter.
    assert abs(found.local_bytes - owned_before) <= 0.25 * owned_before, (found.local_bytes, owned_before)
    assert "estimate" in str(found)


def test_the_model_is_not_touched_and_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = Block(64)
    found = ShardingPlan({}, mesh={"dp": 1}).activations(model, torch.zeros(2, 8, 64))
    assert found.local_bytes > 0
    assert all(p.grad is None and p.device.type == "meta" for p in model.parameters())
