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
from tp_styles.runtime.draws import what_draws


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


class Says(nn.Module):
    """A forward that is given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1)


def quiet(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


renamed = F.dropout
attend = F.scaled_dot_product_attention
REGISTRY = {"one": helper}


class Calm(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (self.inner(x).view(x.shape[0], -1) for _ in range(2))
        return quiet(F.scaled_dot_product_attention(q, k, k, is_causal=True)) + torch.arange(2, device=x.device)


class ByRate(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(x, x, x, dropout_p=rate)  # type: ignore[arg-type]  # set from outside


class Literal(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, 0.1)


class Helped(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


class Renamed(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return renamed(x)


class Attends(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attend(x, x, x, None, 0.1)


class Looked(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return REGISTRY["one"](x)


class Stored(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator,no-any-return]  # set from outside


class Recomputed(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(helper, x)
        return out


class Filled(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(2).uniform_()


class Method(Says):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)


def test_in_doubt_a_module_may_draw() -> None:
    """A wrong "no" would be silent, so only forwards of which everything is known draw nothing."""
    assert not what_draws(Calm())
    assert not what_draws(nn.Sequential(nn.LayerNorm(2), nn.GELU(), nn.Linear(2, 2)))
    assert not what_draws(models.GroupedAttention(16, 4, 2))
    by_rate = ByRate(dropout=0.0)
    assert not what_draws(by_rate).now()
    by_rate.dropout = 0.1  # type: ignore[assignment]  # a number, on purpose
    assert what_draws(by_rate).now()
    assert not what_draws(by_rate.eval()).now()
    drawing: list[nn.Module] = [
        Literal(),
        Helped(),
        Renamed(),
        Looked(),
        Stored(function=helper),
        Recomputed(),
        Filled(),
        Method(),
    ]
    drawing += [nn.RReLU(), nn.Dropout2d(), nn.FractionalMaxPool2d(2, 2), nn.LSTM(2, 2, 2, dropout=0.1)]
    wrapped = Calm()
    wrapped.forward = functools.partial(wrapped.forward)  # type: ignore[method-assign]  # what wrappers do
    drawing += [wrapped, nn.Sequential(nn.Linear(2, 2), Helped())]
    assert [type(module).__name__ for module in drawing if not what_draws(module).now()] == []
    dropout = nn.Sequential(nn.Dropout()).eval()
    assert not what_draws(dropout).now()
    dropout[0].train()  # Monte Carlo dropout: the child trains, its parent does not
    assert what_draws(dropout).now()
