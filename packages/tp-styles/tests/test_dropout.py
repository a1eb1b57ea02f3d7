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
    """Torch's styles draw the same mask on every rank there: the same places of each rank's heads and channels."""
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
    draw = torch.rand(1)
    assert len({value.item() for value in ranks.gather(draw)}) == 1  # outside, all ranks go on alike
    torch.manual_seed(1)
    block.zero_grad()
    block(x).sum().backward()
    expected = models.full_gradients(block, mesh)
    torch.manual_seed(1)
    block.zero_grad()
    torch.autograd.backward(checkpoint(block, x, use_reentrant=False).sum())
    assert models.assert_close(models.full_gradients(block, mesh), expected, atol=0) > 2000
    block.down.forward = functools.partial(F.linear, weight=torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shape"):  # an error inside leaves no generator behind
        block(x)
    assert len({value.item() for value in ranks.gather(torch.rand(1))}) == 1
    del block.down.forward
    assert len(block._forward_hooks) == 1
    assert len(copy.deepcopy(block)._forward_hooks) == 1
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


class Functional(nn.Module):
    """Drops by an attribute of some name."""

    def __init__(self, name: str, rate: float = 0.3, checkpoints: bool = False) -> None:
        super().__init__()
        self.name, self.checkpoints = name, checkpoints
        setattr(self, name, rate)

    def function(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, getattr(self, self.name), self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            checkpoint(self.function, x, use_reentrant=False) if self.checkpoints else self.function(x)
        )
        return result


class DropPath(nn.Module):
    """Drops samples: the same ones on every rank."""

    drop_path_prob = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) + self.drop_path_prob).floor()


DRAWING: dict[str, Any] = {
    "a module": nn.Dropout,
    "dropout1d": nn.Dropout1d,
    "alpha": nn.AlphaDropout,
    "an attribute": lambda: Functional("attention_dropout"),
    "dropout_p": lambda: Functional("dropout_p"),
    "rate": lambda: Functional("rate"),
    "in a checkpoint": lambda: Functional("dropout", checkpoints=True),
    "nested": lambda: nn.Sequential(nn.Identity(), nn.Sequential(Functional("drop"))),
}
CALM: dict[str, Any] = {
    "tanh": nn.Tanh,
    "zero rate": lambda: nn.Dropout(0.0),
    "an attribute of zero": lambda: Functional("dropout", 0.0),
    "evaluation": lambda: Functional("dropout").eval(),
    "drop path": DropPath,
}


@pytest.mark.ranks(2)
def test_rates_decide(ranks: Ranks) -> None:
    """Ranks drop other places where a rate is above zero; everything else draws the same on all ranks."""
    mesh = ranks.mesh((2,), ("tp",))
    outcomes = {}
    for name, make in [*DRAWING.items(), *((f"calm {name}", make) for name, make in CALM.items())]:
        model: Any = models.seeded(lambda make=make: nn.Sequential(nn.Linear(8, 32), make(), nn.Linear(32, 8))).double()  # type: ignore[misc]
        with torch.no_grad():  # every channel alike: what differs between ranks is drawn
            for key in ("0.weight", "0.bias"):
                model.get_parameter(key).copy_(model.get_parameter(key)[:1].clone())
        outputs: list[torch.Tensor] = []
        model[1].register_forward_hook(lambda _, args, output, outputs=outputs: outputs.append(output.detach()))
        tp.apply_plan(model, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}, check="never")
        differ = []
        for _ in range(3):
            torch.manual_seed(1)
            model(torch.randn(2, 4, 8, dtype=torch.float64))
            one, other = ranks.gather(outputs[-1])
            differ.append(not torch.equal(one, other))
            assert len({value.item() for value in ranks.gather(torch.rand(1))}) == 1, name
        outcomes[name] = differ
    expected = {**dict.fromkeys(DRAWING, [True] * 3), **{f"calm {name}": [False] * 3 for name in CALM}}
    assert outcomes == expected


@pytest.mark.ranks(2)
def test_a_rate_that_changes(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(lambda: nn.Sequential(nn.Linear(8, 32), Functional("rate", 0.0), nn.Linear(32, 8)))
    tp.apply_plan(model, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    with torch.no_grad():
        for key in ("0.weight", "0.bias"):
            model.get_parameter(key).fill_(0.5)
    outputs: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda _, args, output: outputs.append(output.detach()))

    def differs() -> bool:
        torch.manual_seed(1)
        model(torch.ones(2, 8))
        one, other = ranks.gather(outputs[-1])
        return not torch.equal(one, other)

    assert not differs()
    model[1].rate = 0.5
    assert differs()
    model.eval()
    assert not differs()
