"""Whole experts on each rank: under DDP by the bridge, and moved to another number of ranks by shard-reshard."""

from __future__ import annotations

from typing import Any

import pytest
import shard_reshard
import torch
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor


class Experts(nn.Module):
    """Experts with a bias, each weight in one tensor."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, width, width) * 0.4)
        self.bias = nn.Parameter(torch.randn(count, width) * 0.4)

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for index in range(self.num_experts):
            token, place = torch.where(experts == index)
            y = torch.tanh(tokens[token] @ self.up[index].T + self.bias[index])
            output = output.index_add(0, token, y * weights[token, place, None])
        return output


class Mixture(nn.Module):
    """A router, experts, and a layer with sharded columns and rows."""

    def __init__(self, count: int = 5, width: int = 8) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), Experts(count, width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(x).softmax(-1).topk(2, dim=-1)
        result: torch.Tensor = self.experts(x, experts, weights) + self.down(torch.tanh(self.up(x)))
        return result


PLAN: dict[str, Any] = {
    "experts": tp_styles.ExpertParallel(),
    "up": tp_styles.ColwiseParallel(),
    "down": tp_styles.RowwiseParallel(),
}


def new_mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture().double()


def batches(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(6, 8, dtype=torch.float64, generator=random) for _ in range(count)]


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


@pytest.mark.ranks(4)
def test_experts_inside_of_ddp_train_as_one_process(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "ep"))
    model, alone = new_mixture(), new_mixture()
    tp_styles.apply_plan(model, mesh["ep"], PLAN)
    wrapped = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (wrapped, alone)]
    for x in batches(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
        alone(x).square().mean().backward()
        norms = (
            tp_ddp_bridge.clip_grad_norm_(wrapped.parameters(), 0.1),
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1),
        )
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    state, expected = full_state(wrapped), alone.state_dict()
    assert state.keys() == expected.keys()
    compared = 0
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
        compared += value.numel()
    assert compared > 600


@pytest.mark.ranks(4)
def test_experts_move_to_another_number_of_ranks(ranks: Ranks) -> None:
    """Five experts from all four ranks to two, in shard-reshard's one exchange; DTensors on both sides."""
    model, alone = new_mixture(), new_mixture()
    tp_styles.apply_plan(model, ranks.mesh((4,), ("ep",)), {"experts": tp_styles.ExpertParallel()})
    other = new_mixture()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    mesh = ranks.mesh((2, 2), ("dp", "ep"))
    tp_styles.apply_plan(other, mesh["ep"], {"experts": tp_styles.ExpertParallel()})
    with ranks.record() as log:
        shard_reshard.reshard_state_dict(model, out=other)
    assert log.count("all_to_all") >= 1
    state, held = full_state(other), other.state_dict()["experts.up"]
    assert held.to_local().shape[0] == (3, 2)[mesh["ep"].get_local_rank()]
    for name, value in alone.state_dict().items():
        assert torch.equal(state[name], value), name


class Stacks(nn.Module):
    """Experts as transformers holds them: gate and up of all experts in one tensor."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, width) * 0.4)
        self.down_proj = nn.Parameter(torch.randn(count, width, inner) * 0.4)

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for index in range(self.num_experts):
            token, place = torch.where(experts == index)
            gate, up = (tokens[token] @ self.gate_up_proj[index].T).chunk(2, -1)
            y = (torch.relu(gate) * up) @ self.down_proj[index].T
            output = output.index_add(0, token, y * weights[token, place, None])
        return output


class EngineExperts(nn.Module):
    """Experts as vLLM holds them: `w13` with gate and up beneath each other, and `w2`.

    A rank has some rows of every expert (its tensor parallelism), or whole experts (its expert parallelism). The loader
    takes a checkpoint's tensors, of one expert each.
    """

    def __init__(self, rank: int, size: int, shape: tuple[int, int, int], *, whole: bool) -> None:
        super().__init__()
        count, width, inner = shape
        step = -(-count // size) if whole else count
        self.first, self.start = (rank * step, 0) if whole else (0, rank * (inner // size))
        self.count, self.inner = max(0, min(count - self.first, step)), inner if whole else inner // size
        self.w13 = nn.Parameter(torch.zeros(self.count, 2 * self.inner, width), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(self.count, width, self.inner), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            _, expert, kind, _ = name.split(".")
            local = int(expert) - self.first
            if not 0 <= local < self.count:
                continue
            if kind == "down_proj":
                self.w2.data[local].copy_(loaded.narrow(1, self.start, self.inner))
            else:
                into = self.w13.data[local].narrow(0, self.inner * (kind == "up_proj"), self.inner)
                into.copy_(loaded.narrow(0, self.start, self.inner))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("whole", [False, True])
def test_experts_move_into_an_engines_stacks(ranks: Ranks, whole: bool) -> None:
    """Five experts go to `w13` and `w2` in one exchange, by the engine's own loader, at the lower bound of bytes."""
    count, width, inner = shape = 5, 8, 12
    torch.manual_seed(0)
    model = Stacks(count, width, inner)
    full = {name: value.detach().clone() for name, value in model.named_parameters()}
    tp_styles.apply_plan(model, ranks.mesh((ranks.world_size,), ("ep",)), tp_styles.ExpertParallel())
    engine, reference = (EngineExperts(ranks.rank, ranks.world_size, shape, whole=whole) for _ in range(2))
    part = shard_reshard.Part
    key_map = {
        "gate_up_proj": [
            part(f"experts.{n}.{kind}.weight", unstack=n, dim=1, source_start=start, size=inner)
            for n in range(count)
            for kind, start in (("gate_proj", 0), ("up_proj", inner))
        ],
        "down_proj": [part(f"experts.{n}.down_proj.weight", unstack=n) for n in range(count)],
    }
    checkpoint = {
        f"experts.{n}.{kind}.weight": value
        for n in range(count)
        for kind, value in zip(
            ("gate_proj", "up_proj", "down_proj"),
            (*full["gate_up_proj"][n].chunk(2), full["down_proj"][n]),
            strict=True,
        )
    }
    recorded = shard_reshard.record_layouts(engine, checkpoint)
    assert recorded.key_map == {}
    sync = shard_reshard.StateDictResharder(model, recorded.layouts, out=recorded.out, key_map=key_map)
    sync(model, out=recorded.out)
    reference.load_weights(checkpoint.items())
    assert sync.plan.wire_bytes == sync.plan.lower_bound
    assert (sync.plan.wire_bytes == 0) == whole  # whole experts lie where they are wanted
    for name, value in reference.named_parameters():
        assert torch.equal(engine.get_parameter(name), value), name
    assert sum(ranks.gather(engine.w13.numel() + engine.w2.numel())) == sum(value.numel() for value in full.values())
