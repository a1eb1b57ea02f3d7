"""Random numbers between column-wise and row-wise layers, and what may draw them."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


class FlatBlock(nn.Module):
    """Attention and feed-forward in one module: dropouts before, inside and after both."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.drop, self.down = nn.Linear(16, 32), nn.Dropout(rate), nn.Linear(32, 16)
        self.rate = rate
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, self.rate, self.training)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), self.rate, self.training)
        x = x + F.dropout(self.o((weights @ v).transpose(1, 2).flatten(-2)), self.rate, self.training)
        hidden = self.drop(F.gelu(self.up(x)))
        self.seen = {"weights": weights.detach() == 0, "hidden": hidden.detach() == 0}
        return x + F.dropout(self.down(hidden), self.rate, self.training)


PLAN: dict[str, tp.ParallelStyle] = {
    "[qkv]": tp.ColwiseParallel(),
    "o": tp.RowwiseParallel(),
    "up": tp.ColwiseParallel(),
    "down": tp.RowwiseParallel(),
}


@pytest.mark.ranks(2)
def test_dropout_between_columns_and_rows(ranks: Ranks) -> None:
    """torch's styles draw the same mask on every rank there: the same places of each rank's heads and channels."""
    from torch.distributed.tensor import parallel as torch_tp

    mesh = ranks.mesh((2,), ("tp",))
    block: Any = models.seeded(FlatBlock).double()
    theirs: Any = copy.deepcopy(block)
    names = {"o": torch_tp.RowwiseParallel, "down": torch_tp.RowwiseParallel}
    columns = dict.fromkeys("qkv", torch_tp.ColwiseParallel) | {"up": torch_tp.ColwiseParallel}
    torch_tp.parallelize_module(theirs, mesh, {name: kind() for name, kind in (names | columns).items()})
    handle = tp.apply_plan(block, mesh, PLAN)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    for module, same in ((theirs, True), (block, False)):
        torch.manual_seed(1)
        out = module(x)
        one, other = ranks.gather(module.seen)
        assert [torch.equal(one[key], other[key]) for key in ("weights", "hidden")] == [same, same]
        one, other = ranks.gather(out.detach())  # what is whole is the same on all ranks, dropped in the same places
        assert torch.equal(one, other)
    again = torch.rand(1)
    assert len({value.item() for value in ranks.gather(again)}) == 1  # outside, all ranks go on alike
    torch.manual_seed(1)
    block.zero_grad()
    block(x).sum().backward()
    wanted = models.full_gradients(block, mesh)
    torch.manual_seed(1)
    block.zero_grad()
    torch.autograd.backward(checkpoint(block, x, use_reentrant=False).sum())
    assert models.assert_close(models.full_gradients(block, mesh), wanted, atol=0) > 2000
    block.down.forward = functools.partial(F.linear, weight=torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shape"):  # an error inside leaves no generator behind
        block(x)
    assert len({value.item() for value in ranks.gather(torch.rand(1))}) == 1
    del block.down.forward
    assert len(block._forward_hooks) == 2  # one for each pair
    assert len(copy.deepcopy(block)._forward_hooks) == 2
    assert pickle.dumps(block.q._forward_hooks)
    handle.undo()
    assert not block._forward_hooks
    assert not block.q._forward_hooks


@pytest.mark.ranks(2)
def test_heads_draw_on_their_own(ranks: Ranks) -> None:
    """Attention by heads, with a rate that is turned on later; evaluation draws nothing."""
    mesh = ranks.mesh((2,), ("tp",))

    class Attention(models.GroupedAttention):
        dropout: float = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            rate = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, enable_gqa=True)
            self.seen = out.detach()
            result: torch.Tensor = self.o(out.transpose(1, 2).flatten(-2))
            return result

    def make() -> nn.Module:
        module = Attention(16, 4, 4)
        module.dropout = 0.0
        for key in "qkv":  # every head alike: what differs between ranks is drawn
            layer = module.get_submodule(key)
            with torch.no_grad():
                layer.get_parameter("weight").copy_(layer.get_parameter("weight")[:4].repeat(4, 1))
                if layer.bias is not None:
                    layer.get_parameter("bias").copy_(layer.get_parameter("bias")[:4].repeat(4))
        return module

    module: Any = models.seeded(make).double()
    tp.apply_plan(module, mesh, tp.GQAParallel(q="q", k="k", v="v", o="o"))
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    for rate, training, same in ((0.0, True, True), (0.5, True, False), (0.5, False, True)):
        module.dropout = rate
        module.train(training)
        out = module(x)
        one, other = ranks.gather(module.seen)
        assert torch.allclose(one, other) == same
        one, other = ranks.gather(out.detach())
        assert torch.equal(one, other)


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3)


class Stored(nn.Module):
    """A function that is an attribute, and numbers that decide."""

    def __init__(self, function: Any, **attributes: Any) -> None:
        super().__init__()
        self.function, self.rate = function, 0.0
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x) + F.dropout(x, self.rate)
        return result


class Filled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.new_empty(x.shape[-1]).uniform_()


class OnlyIn(nn.Module):
    """Draws in training, by a name that says nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (-1, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, None, 0.3 if self.training else 0.0)
        return out.transpose(1, 2).flatten(-2)


REGISTRY = {"one": helper}
DRAWING: dict[str, Any] = {
    "a helper": lambda: Stored(helper),
    "a registry": lambda: Stored(lambda x: REGISTRY["one"](x)),
    "another name": lambda: Stored(lambda x, renamed=F.dropout: renamed(x)),
    "in a checkpoint": lambda: Stored(lambda x: checkpoint(helper, x, use_reentrant=False)),
    "in place": Filled,
    "attention": OnlyIn,
    "rand_like": lambda: Stored(lambda x: x * torch.rand_like(x)),
    "partial": lambda: Stored(functools.partial(F.dropout, p=0.3)),
    "rrelu": nn.RReLU,
    "dropout1d": lambda: nn.Dropout1d(),
    "alpha": lambda: nn.AlphaDropout(),
    "nested": lambda: nn.Sequential(nn.Identity(), nn.Sequential(Stored(helper))),
}
CALM: dict[str, Any] = {
    "tanh": nn.Tanh,
    "zero rate": lambda: nn.Dropout(0.0),
    "attention": lambda: OnlyIn().eval(),
    "unknown": lambda: Stored(lambda x: torch.sin(x)),
}


@pytest.mark.ranks(2)
def test_draws_are_seen_by_running_them(ranks: Ranks) -> None:
    """Ranks drop other places wherever the random operation stands; what draws nothing leaves the generator alone."""
    mesh = ranks.mesh((2,), ("tp",))
    found = {}
    for name, make in [*DRAWING.items(), *((f"calm {name}", make) for name, make in CALM.items())]:
        model: Any = models.seeded(lambda make=make: nn.Sequential(nn.Linear(8, 32), make(), nn.Linear(32, 8))).double()  # type: ignore[misc]
        with torch.no_grad():  # every channel alike: what differs between ranks is drawn
            for key in ("0.weight", "0.bias"):
                model.get_parameter(key).copy_(model.get_parameter(key)[:1].clone())
        seen: list[torch.Tensor] = []
        model[1].register_forward_hook(lambda _, args, output, seen=seen: seen.append(output.detach()))
        tp.apply_plan(model, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        differ = []
        for _ in range(3):
            torch.manual_seed(1)
            before = torch.get_rng_state()
            model(x)
            one, other = ranks.gather(seen[-1])
            differ.append(not torch.equal(one, other))
            moved = not torch.equal(before, torch.get_rng_state())
            assert len({value.item() for value in ranks.gather(torch.rand(1))}) == 1, name
        found[name] = differ == [True] * 3 and moved
        assert found[name] or (differ == [False] * 3 and not moved), name
    assert found == {**dict.fromkeys(DRAWING, True), **{f"calm {name}": False for name in CALM}}


@pytest.mark.ranks(2)
def test_rates_that_change(ranks: Ranks) -> None:
    """A number of a module that is new makes a call observed; so do calls 2, 4, 8, where nothing shows the change."""
    mesh = ranks.mesh((2,), ("tp",))
    hidden = {"rate": 0.0}
    model: Any = nn.Sequential(nn.Linear(8, 32), Stored(lambda x: F.dropout(x, hidden["rate"])), nn.Linear(32, 8))
    with torch.no_grad():
        for key in ("0.weight", "0.bias"):
            model.get_parameter(key).copy_(model.get_parameter(key)[:1].clone())
    tp.apply_plan(model, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda _, args, output: seen.append(output.detach()))

    def differs() -> bool:
        model(torch.ones(2, 8))
        one, other = ranks.gather(seen[-1])
        return not torch.equal(one, other)

    assert not differs()
    model[1].rate = 0.5
    assert differs()
    model[1].rate = 0.0
    assert not differs()
    hidden["rate"] = 0.5
    assert [differs() for _ in range(16)][-8:] == [True] * 8
    model.eval()
    model[1].rate, hidden["rate"] = 0.0, 0.0
    assert not differs()
