"""Planted mistakes behind values that are zero, absent, frozen or constant at the first call: all are found there.

The mistakes show in no output and in no gradient of the first call. Each has a right twin, which trains as one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from tp_styles.check import checker
from tp_styles.runtime.forwards import Forward, Output, only
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.values import ModuleInfo, ParameterSpec, Redistribution, Split, StyleSpec

WIDTH = 16


class Attention(nn.Module):
    """Attention of 4 heads with a norm of its queries; `close` makes everything behind the norm zero."""

    def __init__(self, close: Callable[[Attention], object] = lambda module: None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm = nn.RMSNorm(4)
        self.gate = nn.Parameter(torch.ones(()))
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.modulation = nn.Linear(WIDTH, WIDTH)
        close(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.o(F.scaled_dot_product_attention(self.q_norm(q), k, v).transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + torch.tanh(self.gate) * self.gamma * self.modulation(x) * y
        return result


def zero(name: str) -> Callable[[Attention], object]:
    """Start a parameter, or all of a module, at zero."""

    def close(module: Attention) -> None:
        for path, parameter in module.named_parameters():
            if path == name or path.startswith(f"{name}."):
                nn.init.zeros_(parameter)

    return close


def freeze(*names: str) -> Callable[[Attention], object]:
    """Freeze parameters by the start of their names; all for an empty one."""

    def close(module: Attention) -> None:
        for path, parameter in module.named_parameters():
            parameter.requires_grad_(not path.startswith(names))

    return close


def tiny(module: Attention) -> None:
    nn.init.normal_(module.o.weight, std=1e-16)


def zero_values(module: Attention) -> None:
    nn.init.zeros_(module.v.weight)
    nn.init.zeros_(module.o.weight[:8].data)


CLOSED: dict[str, Callable[[Attention], object]] = {
    "a zero projection (Fixup, muP)": zero("o"),
    "zero modulation (adaLN-Zero)": zero("modulation"),
    "a gate of zero (ReZero, mllama)": zero("gate"),
    "zero layer scales": zero("gamma"),
    "zero values": zero_values,
    "a projection far below the rounding of other gradients": tiny,
    "a frozen norm": freeze("q_norm"),
    "everything frozen but the projection": freeze("q", "k", "v", "gate", "gamma", "modulation"),
    "everything frozen": freeze(""),
}
PLAN = {"[qkv]": tp.ColwiseParallel(), "o": tp.RowwiseParallel()}


class Adapter(nn.Module):
    """LoRA by hand: B starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 4, bias=False)
        self.b, self.down = nn.Linear(4, 32, bias=False), nn.Linear(32, WIDTH)
        nn.init.zeros_(self.b.weight)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.base(x) + self.b(self.a(x))))
        return result


class Biased(nn.Module):
    """A bias of zeros, added to a partial sum by each rank; outside of a layer it is right."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(x))) + self.bias
        return result


class Scaled(nn.Module):
    """A scale of ones for each channel between the layers, of which every rank takes the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        result: torch.Tensor = self.down(y * self.scale[: y.shape[-1]])
        return result


class Placed(nn.Module):
    """Learned places that start at zero, added to this rank's channels: its own ones, or the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.place = nn.Parameter(torch.zeros(6, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        result: torch.Tensor = self.down(torch.tanh(y + self.place[: y.shape[1], : y.shape[-1]]))
        return result


UP_DOWN = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
LORA = {"base": tp.ColwiseParallel(), "b": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
    "A of LoRA summed once too often": (Adapter, LORA | {"a": tp.NoParallel(sum_gradient=True)}, True),
    "a zero bias in a partial sum": (
        Biased,
        {
            "up": tp.ColwiseParallel(),
            "down": tp.RowwiseParallel(output_layouts=Partial()),
            "": tp.PrepareModuleOutput(output_layouts=(Partial(),), desired_output_layouts=(Replicate(),)),
        },
        True,
    ),
    "the first scales of ones, without gradients": (Scaled, UP_DOWN, False),
    "the first places of zeros, without gradients": (Placed, UP_DOWN, False),
}
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    **{
        name: (partial(Attention, close), PLAN | {"q_norm": tp.NoParallel(sum_gradient=True)})
        for name, close in CLOSED.items()
    },
    "LoRA": (Adapter, LORA | {"a": tp.NoParallel()}),
    "a bias outside": (Biased, UP_DOWN),
}


def batch() -> torch.Tensor:
    return torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.ranks(2)
def test_mistakes_behind_zeros_are_found_at_the_first_call(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    mistakes: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
        f"{name}; the norm's gradient is not summed": (partial(Attention, close), PLAN, True)
        for name, close in CLOSED.items()
    }
    raised = 0
    for name, (make, plan, with_gradients) in {**mistakes, **OTHERS}.items():
        model: Any = models.seeded(make).double()
        tp.apply_plan(model, mesh, plan)
        before = {key: value.clone() for key, value in tp.full_state_dict(model).items()}
        with torch.set_grad_enabled(with_gradients), pytest.raises(tp.PlanError, match=r"check-"):
            model(batch())
        after = tp.full_state_dict(model)
        assert all(torch.equal(after[key], value) for key, value in before.items()), name
        raised += 1
    assert raised == 13


@pytest.mark.ranks(2)
def test_right_twins_pass_and_train_as_one_process(ranks: Ranks) -> None:
    """Frozen weights stay frozen; of thawed ones nothing changes until their own first step."""
    mesh = ranks.mesh((2,), ("tp",))
    compared = 0
    for name, (make, plan) in RIGHT.items():
        alone, model = (models.seeded(make).double() for _ in range(2))
        frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
        handle = tp.apply_plan(model, mesh, plan)
        if len(frozen) == len(dict(model.named_parameters())):
            model(batch())
            for each in (alone, model):
                each.requires_grad_(True)
            frozen = set()
        optimizers = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (alone, model)]
        for _ in range(3):
            for each, optimizer in zip((alone, model), optimizers, strict=True):
                optimizer.zero_grad()
                models.square_loss(each(batch()), batch()).backward()
                optimizer.step()
        assert {key for key, p in model.named_parameters() if not p.requires_grad} == frozen, name
        assert "equal to the original" in handle.report(), name
        assert "unchecked" not in handle.report(), handle.report()
        compared += models.assert_close(tp.full_state_dict(model), dict(alone.state_dict()), atol=1e-9)
    assert compared > 9 * 1000


class Dead(nn.Module):
    """A layer behind an activation that is zero for this input, another that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dead, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(x))) + F.relu(self.dead(x) - 1e3)
        return result


@pytest.mark.ranks(2)
def test_zero_against_zero_is_listed_as_unchecked(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(Dead).double()
    handle = tp.apply_plan(model, mesh, UP_DOWN)
    model(batch())
    line = handle.report().splitlines()[-1]
    names = "dead.weight, dead.bias, unused.weight, unused.bias"
    assert line.endswith(f"; unchecked, zero or without a gradient in both runs: {names}"), line
    assert "1 tensors and 4 gradients" in line


class Writing(nn.Module):
    """Writes to a frozen parameter outside of no_grad, which a parameter with a gradient refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.teacher = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.teacher.mul_(0.5)
        result: torch.Tensor = self.down(torch.tanh(self.up(x))) * self.teacher
        return result


@pytest.mark.ranks(2)
def test_a_frozen_parameter_that_the_forward_writes_to_stays_frozen_and_is_listed(ranks: Ranks) -> None:
    model: Any = models.seeded(Writing).double()
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), UP_DOWN)
    model(batch())
    assert torch.equal(model.teacher, torch.full((WIDTH,), 0.5, dtype=torch.float64))
    line = handle.report().splitlines()[-1]
    assert "equal to the original (1 tensors and 4 gradients" in line and line.endswith("both runs: teacher"), line


@pytest.mark.ranks(2)
def test_an_input_that_takes_a_gradient_later_is_checked_then(ranks: Ranks) -> None:
    """Its gradient is one rank's part: the layer between takes a shard of it, and no style says so."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(torch.tanh(self.up(x)) * gate.mean(-1, keepdim=True))
            return result

    model: Any = models.seeded(Gated).double()
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), UP_DOWN)
    model(batch(), batch())
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*input-gradient"):
        model(batch(), batch().requires_grad_())


@pytest.mark.ranks(2)
def test_gradients_of_replicas_are_compared_before_the_first_optimizer_step(ranks: Ranks) -> None:
    """Also of parameters that thaw later, behind a check that was switched to another mode, and of new groups."""
    mesh = ranks.mesh((2,), ("tp",))
    for thawed in (False, True):
        model: Any = models.seeded(Attention).double()
        tp.apply_plan(model, mesh, PLAN | {"q_norm": tp.NoParallel(sum_gradient=True)})
        model.q_norm.requires_grad_(not thawed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            models.square_loss(model(batch()), batch()).backward()
            if step == (3 if thawed else 0):
                model.q_norm.requires_grad_(True)
                model.q_norm.weight.grad = torch.full((4,), 1.0 + ranks.rank, dtype=torch.float64)
                before = model.q_norm.weight.clone()
                for _ in range(2):
                    with pytest.raises(tp.PlanError, match=r"gradients-differ.*q_norm.weight"):
                        optimizer.step()
                assert torch.equal(model.q_norm.weight, before)
                break
            optimizer.step()
    grouped: Any = models.seeded(lambda: models.GroupedAttention(WIDTH, 4, 1)).double()
    plan = {"": tp.GQAParallel(q="q", k="k", v="v", o="o", norms=("q_norm", "k_norm"), kv_replicate=True)}
    handle = tp.apply_plan(grouped, mesh, plan)  # one key-value head on two ranks: each holds a copy
    optimizer = torch.optim.SGD([grouped.q.weight], 0.1)
    models.square_loss(grouped(batch()), batch()).backward()
    optimizer.step()
    optimizer.add_param_group({"params": [grouped.k.weight]})
    optimizer.step()
    optimizer.add_param_group({"params": [grouped.v.weight]})
    grouped.v.weight.grad.mul_(1.0 + ranks.rank)
    with pytest.raises(tp.PlanError, match=r"gradients-differ.*v.weight"):
        optimizer.step()
    handle.undo()  # from here on each rank's model is its own
    optimizer = torch.optim.SGD(grouped.parameters(), 0.1)
    models.square_loss(grouped(batch() * (1 + ranks.rank)), batch()).backward()
    optimizer.step()


class Summed(nn.Module):
    """A scale between the layers, to whose gradient each rank brings about one half."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.full((), 1.5))
        with torch.no_grad():
            for layer in (self.up, self.down):
                layer.weight.copy_(0.2 + 0.02 * torch.rand_like(layer.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)) * self.scale)
        return result


@pytest.mark.ranks(2)
def test_a_forgotten_sum_is_found_in_bfloat16(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of float64 runs: one element of a gradient may be off by 0.6 there, and half a sum is 0.5 off."""
    monkeypatch.setattr(checker, "FLOAT64_LIMIT", 1)
    mesh, found = ranks.mesh((2,), ("tp",)), 0
    scaled = tp.BlockParallel(sum_gradient=("scale",))
    for seed in range(4):
        for plan in (UP_DOWN, {**UP_DOWN, "": scaled}):
            model: Any = models.seeded(Summed, seed).bfloat16()
            tp.apply_plan(model, mesh, plan)
            x = torch.rand(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
            if plan is UP_DOWN:
                with pytest.raises(tp.PlanError, match=r"check-mismatch.*scale.*gradient differs"):
                    model(x)
                found += 1
            else:
                model(x)
    assert found == 4


class Turned(nn.Module):
    """A table of positions goes as an argument into a block that turns this rank's channels by it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            turned = self.up(x).unflatten(-1, (-1, 8)) * positions  # (batch, positions, heads, 8) by (positions, 1, 8)
            result: torch.Tensor = self.down(turned.flatten(-2))
            return result

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(Turned.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.table(torch.arange(6)).unsqueeze(1)
        for block in self.blocks:
            x = x + block(x, positions=positions)
        return x


@pytest.mark.ranks(2)
def test_an_argument_that_each_rank_uses_on_its_shard_has_its_gradient_summed(ranks: Ranks) -> None:
    """Frozen at the first call, a table without the sum is found there; with it the table trains once it thaws."""
    mesh = ranks.mesh((2,), ("tp",))
    plan: dict[str, Any] = {"blocks.*.up": tp.ColwiseParallel(), "blocks.*.down": tp.RowwiseParallel()}
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    forgotten = models.seeded(Turned).double()
    tp.apply_plan(forgotten, mesh, plan)
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*input-gradient differs"):
        forgotten(x)
    model, alone = (models.seeded(Turned).double() for _ in range(2))
    summed = tp.BlockParallel(sum_gradient=("positions",))
    handle = tp.apply_plan(model, mesh, {**plan, "blocks.*": summed})
    assert "positions" in handle.report()
    model(x)
    assert "equal to the original" in handle.report()
    for each in (model, alone):
        each.table.requires_grad_(True)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            models.square_loss(each(x), torch.ones_like(x)).backward()
            optimizer.step()
    assert models.assert_close(tp.full_state_dict(model), alone.state_dict(), atol=1e-12) == 48 + 2 * (544 + 528)


class Gain(nn.Module):
    """A gain for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class WithGain(nn.Module):
    """An output, and a loss of the gain's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(WIDTH, WIDTH), Gain()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, self.gain(y).square().mean()


class GainForward(Forward):
    """A forward of one's own; on the ranks in `detaches` its output has lost its gradient."""

    detaches: tuple[int, ...] = ()

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.leave = Output(only(spec), axis, name, local=True, inplace_ok=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.parameter("gain")
        assert gain is not None
        output = x * gain
        return self.leave(output.detach() if self.axis.rank in self.detaches else output)


class GainParallel(tp.ParallelStyle):
    """A style of one's own."""

    def __init__(self, forward: type[Forward]) -> None:
        self.forward = forward

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        flow = Redistribution(Replicate(), Replicate())
        replicated = (("gain", ParameterSpec(Split.replicated())),)
        return StyleSpec(self.forward, replicated, (("x", flow),), outputs=(flow,))


@pytest.mark.ranks(2)
def test_a_style_of_ones_own_that_detaches_is_refused(ranks: Ranks) -> None:
    """Outputs and all other gradients are right: the gain would never train. One rank's fault is raised by all."""
    mesh, x = ranks.mesh((2,), ("tp",)), torch.ones(4, WIDTH, dtype=torch.float64)
    for faulty in ((0, 1), (1,)):
        model: Any = models.seeded(WithGain).double()
        tp.apply_plan(model, mesh, {"gain": GainParallel(type("Detaching", (GainForward,), {"detaches": faulty}))})
        with pytest.raises(tp.PlanError, match=r"\[check-mismatch\] gain .*without a gradient on rank") as error:
            model(x)
        assert len(set(ranks.gather(str(error.value)))) == 1
    model, alone = models.seeded(WithGain).double(), models.seeded(WithGain).double()
    tp.apply_plan(model, mesh, {"gain": GainParallel(GainForward)})
    for each in (model, alone):
        output, loss = each(x)
        (output.sum() + loss).backward()
    wanted: dict[str, Any] = {name: p.grad for name, p in alone.named_parameters()}
    assert models.assert_close(models.full_gradients(model, mesh), wanted, 1e-12) > 280
