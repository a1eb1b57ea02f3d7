"""The check by execution: sharded modules against their originals on full weights, at the first call of each mode."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint
from tp_styles._torch_compat import dispatch_modes

Tensor = torch.Tensor
EXACT = 1e-12


class Pair(nn.Module):
    """A column-wise and a row-wise layer around a function."""

    def __init__(self, function: Callable[[Any], Any] = torch.tanh, up: Any = nn.Linear, down: Any = nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up(16, 32), down(32, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.function(self.up(x)))
        return result


PAIR = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}


def heads(x: Tensor) -> Tensor:
    """Attention of 8 channels a head, however many heads there are."""
    q = x.view(*x.shape[:-1], -1, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)


RIGHT: dict[str, Callable[[Any], Any]] = {
    "gelu": F.gelu,
    "selu": F.selu,
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand_like": lambda x: x * (torch.rand_like(x) > 0.5),
    "noise": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "heads": heads,
    "norm of heads": lambda x: F.normalize(x.view(*x.shape[:-1], -1, 8), dim=-1).flatten(-2),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "in float32": lambda x: x.float().exp().to(x.dtype),
    "in bfloat16": lambda x: x.bfloat16().exp().to(x.dtype),
    "in place": lambda x: x.mul_(2).relu_(),
    "over tokens": lambda x: x.softmax(1) + x.mean(1, keepdim=True),
    "interleaved": lambda x: x[..., ::2].repeat_interleave(2, -1),
    "checkpointed": lambda x: checkpoint(F.gelu, x, use_reentrant=False),
}

WRONG: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x * x.argmax(-1, keepdim=True),
    "sort": lambda x: x.sort(-1).values,
    "max": lambda x: x * x.max(-1, keepdim=True).values,
    "log_softmax": lambda x: x.log_softmax(-1),
    "var_mean": lambda x: x * torch.var_mean(x, -1, keepdim=True)[0],
    "mse_loss": lambda x: x * F.mse_loss(x, x * 2),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "local_response_norm": lambda x: F.local_response_norm(x.transpose(1, 2), 3).transpose(1, 2),
    "roll": lambda x: torch.roll(x, 1),
    "flip": lambda x: x.flip(-1),
    "cat": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    "cumsum": lambda x: x.cumsum(-1),
    "avg_pool": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "index": lambda x: x * x[..., [0]],
    "index_select": lambda x: x * x.index_select(-1, torch.tensor([0])),
    "gram": lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x,
    "einsum": lambda x: torch.einsum("bth,bsh->bts", x, x).softmax(-1) @ x,
    "number of channels": lambda x: x / x.shape[-1],
    "item": lambda x: x * float(x.detach().abs().max()),
    "numpy": lambda x: x * float(x.detach().numpy().max()),
    "sum": lambda x: x * torch.sigmoid(x.sum()),
    "fixed heads": lambda x: heads(x.view(*x.shape[:-1], 4, -1).softmax(-2).flatten(-2)),
    "mean over heads": lambda x: x - x.view(*x.shape[:-1], -1, 8).mean(-2).repeat(1, 1, x.shape[-1] // 8),
    "chunks swapped": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "movedim": lambda x: x.view(*x.shape[:-1], 2, -1).movedim(-2, 0).flatten(0, 1).view_as(x),
    "detached sum": lambda x: x * x.detach().abs().sum(-1, keepdim=True),
}


def tokens() -> Tensor:
    return torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.ranks(2)
def test_functions_between_column_and_row(ranks: Ranks) -> None:
    """What is right passes and trains on; what mixes a rank's channels raises on every rank, and changes nothing."""
    mesh = ranks.mesh((2,), ("tp",))
    hits = alarms = 0
    for name, function in {**RIGHT, **WRONG}.items():
        model = models.seeded(partial(Pair, function)).double()
        handle = tp.apply_plan(model, mesh, PAIR)
        before = copy.deepcopy(model.state_dict())
        torch.manual_seed(5)
        try:
            model(tokens().requires_grad_()).sum().backward()
        except tp.PlanError as error:
            raised = str(error)
        else:
            raised = ""
        assert len(set(ranks.gather(raised[:80]))) == 1, name
        hits += name in WRONG and "check-mismatch" in raised and "Pair" in raised
        alarms += name in RIGHT and bool(raised)
        assert not raised or "both part first at the output of down" in raised, raised
        assert bool(raised) == (name in WRONG), (name, raised)
        if raised:
            assert all(p.grad is None for p in model.parameters()), name
            assert "function" in vars(model)
            for key, value in model.state_dict().items():
                assert torch.equal(value.full_tensor(), before[key].full_tensor()), (name, key)
            handle.undo()
    assert (hits, alarms) == (len(WRONG), 0)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=0), self.bias)


class Direct(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)


class Tied(nn.Module):
    """A loss on logits by the weight of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0] * 5).long().abs() % 6
        logits = F.linear(torch.tanh(self.embed(ids)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Bare(Pair):
    """A scale and a norm between the layers that no style speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(1)), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x).unflatten(-1, (-1, 8))).flatten(-2)
        result: Tensor = self.down(hidden * self.scale)
        return result


class Heads(nn.Module):
    """Attention with q, k and v apart, and a mode."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.num_heads, self.mode = 4, mode
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        count = -1 if self.mode == "" else self.num_heads
        size = -1 if self.mode == "fixed" else 4
        q, k, v = (f(x).view(batch, length, count, size).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = q @ k.transpose(-1, -2)
        if self.mode == "alibi":
            slopes = 2.0 ** (-torch.arange(1, self.num_heads + 1, dtype=x.dtype) / self.num_heads)
            weights = weights + slopes[:, None, None] * torch.arange(length)
        if self.mode == "mean":
            weights = weights - weights.mean(1, keepdim=True)
        result: Tensor = self.o((weights.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))
        return result


class Parallel(nn.Module):
    """One projection out of two column-wise outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.cat([self.a(x), torch.tanh(self.b(x))], -1))
        return result


class Stack(nn.Module):
    """A trainable layer before a region: the gradient of the region's input counts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(16, 16), inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.first(x))
        return result


class NoBackward(tp.ColwiseParallel):
    """A column-wise layer whose input gradient is not summed."""

    def spec(self, info: Any, tp_size: int) -> Any:
        spec = super().spec(info, tp_size)
        ((name, flow),) = spec.inputs
        return type(spec)(**{**vars(spec), "inputs": ((name, type(flow)(**{**vars(flow), "gradient": None})),)})


class NoSum(tp.RowwiseParallel):
    """A row-wise layer whose partial results are taken for the sum."""

    def spec(self, info: Any, tp_size: int) -> Any:
        spec = super().spec(info, tp_size)
        (flow,) = (one for one in spec.outputs if one is not None)
        return type(spec)(**{**vars(spec), "outputs": (type(flow)(**{**vars(flow), "src": Replicate()}),)})


class Loss(nn.Module):
    """A loss inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(8) % 4)


COLUMN, ROW = tp.ColwiseParallel(), tp.RowwiseParallel()
ATTENTION = {"[qkv]": COLUMN, "o": ROW}
PLANTED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "row-wise subclass with a forward of its own": (lambda: Pair(down=Twice), PAIR, "output"),
    "standardized weight, row-wise": (lambda: Pair(down=Standardized), PAIR, "output"),
    "normalized weight, column-wise": (lambda: Pair(up=Cosine), PAIR, "output"),
    "bare weights of styled layers": (Direct, PAIR, "check-raises"),
    "logits by the weight of an embedding": (Tied, {"embed": ROW}, "check-raises"),
    "forgotten norm and bare scale": (Bare, PAIR, "gradient"),
    "norm styled, scale bare": (Bare, {**PAIR, "norm": tp.NoParallel(sum_gradient=True)}, "gradient"),
    "norm that is not summed": (Bare, {**PAIR, "norm": tp.NoParallel()}, "gradient"),
    "fixed number of heads": (lambda: Heads("fixed"), ATTENTION, "output"),
    "slopes of local heads": (lambda: Heads("alibi"), {"": tp.GQAParallel(q="q", k="k", v="v", o="o")}, "output"),
    "mean over heads": (lambda: Heads("mean"), {"": tp.GQAParallel(q="q", k="k", v="v", o="o")}, "output"),
    "two column-wise outputs side by side": (Parallel, {"[ab]": COLUMN, "down": ROW}, "output"),
    "fused weight as a plain one": (lambda: models.Gated(16), {"both": COLUMN, "down": ROW}, "output"),
    "wrong number of sections": (lambda: models.Gated(16), {"both": tp.FusedColwiseParallel(4), "down": ROW}, "output"),
    "plain weight as a fused one": (Pair, {"up": tp.FusedColwiseParallel(2), "down": ROW}, "output"),
    "missing sum": (Pair, {"up": COLUMN, "down": NoSum()}, "output"),
    "missing sum in backward": (lambda: Stack(Pair()), {"inner.up": NoBackward(), "inner.down": ROW}, "gradient"),
    "key heads in the wrong order": (
        Heads,
        {"[qv]": COLUMN, "k": tp.FusedColwiseParallel(2, unit=4), "o": ROW},
        "output",
    ),
    "local head that leaves": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32)), {"1": COLUMN}, "leaves"),
    "local logits, then softmax": (lambda: nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1)), {"0": COLUMN}, "leaves"),
    "loss of local logits": (Loss, {"head": COLUMN}, "output"),
    "partial gradient of a replicated layer": (
        lambda: Pair(nn.Sequential(nn.Unflatten(-1, (-1, 8)), nn.Linear(8, 8), nn.Flatten(-2))),
        PAIR,
        "gradient",
    ),
}


@pytest.mark.ranks(2)
def test_a_pair_of_which_one_is_styled(ranks: Ranks) -> None:
    """A shape error that the original has not names the layer, its global shapes and what to write."""
    mesh = ranks.mesh((2,), ("tp",))
    up, down = tp.ColwiseParallel(), tp.RowwiseParallel()
    plans: list[tuple[dict[str, Any], str]] = [
        ({"up": up}, r"down \(Linear, weight \[16, 32\], bias \[16\]\).*mat1 and mat2.*RowwiseParallel\(\) for it"),
        ({"up": up, "down": tp.ColwiseParallel()}, r"check-raises.*down \(Linear, weight \[16, 32\].*in region 'Pair'"),
        ({"down": down}, r"down .*RowwiseParallel\(input_layouts=Replicate\(\)\)"),
    ]
    for plan, text in plans:
        model = models.seeded(Pair).double()
        tp.apply_plan(model, mesh, plan)
        with pytest.raises(tp.PlanError, match=text):
            model(tokens())
    # A projection that nn.MultiheadAttention reads and never calls.
    attention = models.seeded(lambda: nn.MultiheadAttention(16, 2)).double()
    tp.apply_plan(attention, mesh, {"out_proj": down})
    with pytest.raises(tp.PlanError, match="check-"):
        attention(*[tokens()[0]] * 3)
    # What the original raises too stays as it is.
    model = models.seeded(Pair).double()
    tp.apply_plan(model, mesh, PAIR)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        model(torch.ones(2, 7, dtype=torch.float64))
    assert not isinstance(caught.value, tp.PlanError)


class Adapted(nn.Module):
    """A linear layer with a low-rank update, under peft's names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs)
        self.lora_A, self.lora_B = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return result


@pytest.mark.ranks(2)
def test_an_adapter_of_which_a_part_is_styled(ranks: Ranks) -> None:
    """The error names the adapter and its style; the style is right."""
    mesh, column, row = ranks.mesh((2,), ("tp",)), tp.LoRAParallel("column"), tp.LoRAParallel("row")
    parts: dict[str, Any] = {"base_layer": tp.ColwiseParallel(), "lora_A": tp.NoParallel()}
    plans: list[tuple[dict[str, Any], str]] = [
        ({**{f"up.{name}": style for name, style in parts.items()}, "down": row}, "up"),  # B is forgotten
        ({"up.lora_B": tp.ColwiseParallel(), "down": row}, "up"),
        ({"up": column, "down.base_layer": tp.RowwiseParallel()}, "down"),
        ({"up": column}, "down"),
    ]
    for plan, name in plans:
        model = models.seeded(AdaptedPair).double()
        tp.apply_plan(model, mesh, plan)
        with pytest.raises(tp.PlanError, match=rf"layers of the adapter {name} have no style: LoRAParallel"):
            model(tokens())
    model, alone = models.seeded(AdaptedPair).double(), models.seeded(AdaptedPair).double()
    tp.apply_plan(model, mesh, {"up": column, "down": row})
    torch.testing.assert_close(model(tokens()), alone(tokens()))


class AdaptedPair(nn.Module):
    """Two adapters around a function of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(16, 32), Adapted(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


@pytest.mark.ranks(2)
def test_planted_mistakes(ranks: Ranks) -> None:
    """Each is accepted by the plan, runs, and gives other numbers; with check="never" nobody would know."""
    mesh = ranks.mesh((2,), ("tp",))
    outcomes = {}
    for name, (make, plan, kind) in PLANTED.items():
        model = models.seeded(make).double()
        tp.apply_plan(model, mesh, plan)
        try:
            model(tokens().requires_grad_(kind != "leaves"))
        except tp.PlanError as error:
            outcomes[name] = kind if kind in f"{error.problems[0].code} {error.problems[0].found}" else str(error)
        except Exception as error:
            outcomes[name] = repr(error)
    assert outcomes == {name: kind for name, (_, _, kind) in PLANTED.items()}
    assert len(PLANTED) >= 22


@pytest.mark.ranks(2)
def test_other_data_on_each_rank(ranks: Ranks) -> None:
    """The most frequent mistake of tensor parallelism: a sampler over all ranks."""
    mesh = ranks.mesh((2,), ("tp",))
    modes: tuple[Literal["first", "always"], ...] = ("first", "always")
    for mode in modes:
        model = models.seeded(Pair)
        tp.apply_plan(model, mesh, PAIR, check=mode)
        with pytest.raises(tp.PlanError, match="ranks-disagree"):
            model(torch.full((2, 4, 16), float(ranks.rank)))
        model(torch.ones(2, 4, 16))
    with pytest.raises(tp.PlanError, match="ranks-disagree"):
        model(torch.full((2, 4, 16), float(ranks.rank)))
    with pytest.raises(tp.PlanError, match=r"\[invalid-argument\].*'sometimes'.*\"first\", \"always\" or \"never\""):
        tp.apply_plan(models.seeded(Pair), mesh, PAIR, check="sometimes")  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_the_check_leaves_nothing_behind(ranks: Ranks) -> None:
    """Generators, buffers, lists, gradients, a checkpoint around the call are as without it; later calls are free."""
    mesh = ranks.mesh((2,), ("tp",))

    class Keeps(Pair):
        def __init__(self) -> None:
            super().__init__(lambda x: F.dropout(x, 0.5))
            self.norm = nn.BatchNorm1d(4)
            self.calls: list[torch.Size] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(x.shape)
            result: Tensor = self.norm(super().forward(x))
            return result

    results = []
    modes: tuple[Literal["first", "never"], ...] = ("first", "never")
    for check in modes:
        model: Any = models.seeded(Keeps).double()
        tp.apply_plan(model, mesh, PAIR, check=check)
        torch.manual_seed(3)
        x = tokens().requires_grad_()
        out = checkpoint(model, x, use_reentrant=False)
        torch.autograd.backward([out.square().sum()])
        model.eval()
        with torch.no_grad():
            evaluated = model(x)
        gradients = models.full_gradients(model, mesh)
        state = {"out": out.detach(), "next": torch.rand(2), "mean": model.norm.running_mean, "x": x.grad}
        results.append({**gradients, **state, "evaluated": evaluated, "calls": torch.tensor(len(model.calls))})
        with ranks.record() as log:
            model.train()(x)
        assert log.ops == ("all_reduce",)
    assert models.assert_close(results[0], results[1], atol=0) > 1000


@pytest.mark.ranks(2)
def test_a_steady_region_calls_nothing_of_the_check(ranks: Ranks) -> None:
    """Regions' hooks go once their mode is checked, and are back, in their place, for a mode that is new."""

    def in_evaluation(x: Tensor) -> Tensor:
        return x.tanh() if model[0].training else x.flip(-1)

    model: Any = models.seeded(lambda: nn.Sequential(Pair(in_evaluation), Pair())).double()
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"*.up": tp.ColwiseParallel(), "*.down": tp.RowwiseParallel()})
    model[1].register_forward_pre_hook(lambda module, args: None, prepend=True)  # as FSDP2's
    called: Counter[str] = Counter()
    for step in range(5):
        called.clear()
        sys.setprofile(lambda frame, event, arg: called.update([frame.f_code.co_filename] * (event == "call")))
        model(tokens()).sum().backward()
        sys.setprofile(None)
        in_check = sum(count for name, count in called.items() if "tp_styles/check/" in name)
        assert (in_check > 100) if step == 0 else (in_check <= 4) if step > 1 else True, (step, in_check)
    hooks = [[type(hook).__name__ for hook in part._forward_pre_hooks.values()] for part in model]
    assert "Scope" not in hooks[0] + hooks[1]
    model[0].eval()  # alone
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*region '0'"):
        model(tokens())
    assert next(iter(model[0]._forward_pre_hooks.values())).name == "0"  # the check's
    assert [type(hook).__name__ for hook in model[1]._forward_pre_hooks.values()] == hooks[1]  # its mode was checked
    model[1].eval()
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*region '0'"):
        model(tokens())
    assert [type(hook).__name__ for hook in model[1]._forward_pre_hooks.values()] == [
        "function",
        "Scope",
        *hooks[1][1:],
    ]


@pytest.mark.ranks(2)
def test_shards_that_are_meant_to_leave(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    for style in (tp.ColwiseParallel(output_layouts=Shard(-1)), tp.ColwiseParallel(use_local_output=True)):
        model = models.seeded(lambda: nn.Sequential(nn.Linear(16, 32)))
        tp.apply_plan(model, mesh, {"0": style})
        assert model(torch.ones(2, 16)).shape == (2, 16)
    layer = models.seeded(lambda: nn.Linear(16, 32))
    tp.parallelize_module(layer, mesh, tp.ColwiseParallel())  # a part of a model: torch's staged calls
    assert layer(torch.ones(2, 16)).shape == (2, 16)


@pytest.mark.ranks(2)
def test_a_loss_of_shards_inside_the_model(ranks: Ranks) -> None:
    """The original computes it on full logits."""
    mesh = ranks.mesh((2,), ("tp",))

    class Ours(Loss):
        def forward(self, x: Tensor) -> Tensor:
            return tp.vocab_parallel_cross_entropy(self.head(x), torch.arange(8).view(2, 4) % 4, mesh=mesh)

    model = models.seeded(Ours).double()
    alone = models.seeded(Loss).double()
    tp.apply_plan(model, mesh, {"head": COLUMN})
    torch.testing.assert_close(model(tokens()), alone(tokens()), atol=EXACT, rtol=0)


class Outside(nn.Module):
    """A scale that a region reaches through a closure, also when a re-entrant checkpoint runs it again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.elsewhere = torch.ones(16, dtype=torch.float64, requires_grad=True)
        scale, elsewhere = self.scale, [self.elsewhere]

        class Inner(Pair):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x * scale * elsewhere[0])

        self.inner, self.reentrant = Inner(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


@pytest.mark.filterwarnings("ignore:.*gradients of the sharded model are not checked.*When use_reentrant=True")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_leaves_that_are_no_copies_get_one_gradient(ranks: Ranks, reentrant: bool) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    results = []
    modes: tuple[Literal["first", "never"], ...] = ("first", "never")
    for check in modes:
        model: Any = models.seeded(lambda: Outside(reentrant).double())
        tp.apply_plan(model, mesh, {"inner.up": COLUMN, "inner.down": ROW}, check=check)
        for _ in range(2):
            model(tokens().requires_grad_()).square().sum().backward()
        results.append({**models.full_gradients(model, mesh), "elsewhere": model.elsewhere.grad})
    assert models.assert_close(results[0], results[1], atol=0) > 500


class Only(torch.autograd.Function):
    """A function whose backward takes tensors of one width only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = width
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if gradient.shape[-1] != ctx.width:
            raise RuntimeError("this kernel is compiled for shards")
        return gradient * 2, None


class FromOutside(nn.Module):
    """A region that takes a shard from an attribute, which the module around it has put there."""

    inner: Any

    def __init__(self) -> None:
        super().__init__()
        self.side, self.inner = nn.Linear(16, 32), Pair(lambda x: x * self.inner.gate[0])
        self.inner.gate = []

    def forward(self, x: Tensor) -> Tensor:
        self.inner.gate[:] = [self.side(x)]
        result: Tensor = self.inner(x)
        return result


@pytest.mark.ranks(2)
def test_unchecked_calls_are_reported(ranks: Ranks) -> None:
    """Gradients that the original cannot give, and a region that cannot be run alone, are no equal ones."""
    mesh = ranks.mesh((2,), ("tp",))
    only: Any = Only
    model: Any = models.seeded(lambda: Pair(lambda x: only.apply(x, 16))).double()
    handle = tp.apply_plan(model, mesh, PAIR)
    with pytest.warns(UserWarning, match=r"gradients of the sharded model are not checked.*compiled for shards"):
        model(tokens().requires_grad_()).sum().backward()
    assert "check of Pair (training, with gradients): unchecked: the original's backward raised" in handle.report()
    with torch.no_grad():
        model(tokens())
    assert "check of Pair (training, without gradients): equal to the original" in handle.report()
    model = models.seeded(FromOutside).double()
    handle = tp.apply_plan(model, mesh, {"side": COLUMN, "inner.up": COLUMN, "inner.down": ROW})
    model(tokens().requires_grad_()).sum().backward()
    report = handle.report()
    assert "check of inner (training, with gradients): unchecked: the original raised" in report, report
    assert "check of FromOutside (training, with gradients): equal to the original" in report


class MistakeInOneMode(nn.Module):
    """Dropout, and channels in another order in one mode of (training, gradients)."""

    def __init__(self, wrong_in: tuple[bool, bool] | None = None) -> None:
        super().__init__()
        self.wrong_in = wrong_in

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        return x.flip(-1) if (self.training, torch.is_grad_enabled()) == self.wrong_in else x


@dataclass(slots=True)
class Counts:
    """Without a `__dict__`; `last` comes with the first call."""

    calls: int = 0
    last: int = field(init=False)


class Cached(Pair):
    """Keeps what it was given in an object of its own, and counts calls in containers and in slots."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.kept = SimpleNamespace(seen=None, total=torch.zeros(16), last=deque(maxlen=3))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        memory: Any = self.kept
        memory.seen = x if memory.seen is None else torch.cat([memory.seen, x])
        memory.total += x.sum(0)
        memory.last.append(len(memory.seen))
        self.counts.last = self.counts.calls + getattr(self.counts, "last", 10)
        self.counts.calls += 1
        self.scale.data.mul_(0.9)
        result: Tensor = super().forward(x * self.scale + memory.total) * sum(memory.last) * self.counts.last
        return result


@pytest.mark.ranks(2)
def test_objects_that_modules_write_to(ranks: Ranks) -> None:
    """A cache in an attribute held what the check's runs had put there, and later calls read it."""
    model: Any = models.seeded(Cached).double()
    alone: Any = models.seeded(Cached).double()
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    for call in range(6):
        x = torch.randn(3, 16, dtype=torch.float64)
        with torch.set_grad_enabled(call not in (2, 3)):
            torch.testing.assert_close(model(x), alone(x), atol=EXACT, rtol=0)
    assert list(model.kept.last) == [12, 15, 18]
    assert model.counts == alone.counts and model.counts.calls == 6
    assert torch.equal(model.kept.seen, alone.kept.seen)


class Layers(nn.Module):
    """Two pairs that write to one cache, made by the forward: it is filled when the second one is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(CachedPair() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache = SimpleNamespace(seen=[])
        for pair in self.pairs:
            x = pair(x, cache=cache)
        return x


class CachedPair(Pair):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache.seen.append(self.up(x))
        result: Tensor = self.down(torch.tanh(cache.seen[-1]))
        return result


@pytest.mark.ranks(2)
def test_a_cache_that_the_first_layer_fills_costs_a_later_call_nothing(ranks: Ranks) -> None:
    """The second region was never ready for its check, and each call compared its inputs."""
    model = models.seeded(Layers)
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {f"pairs.*.{name}": style for name, style in PAIR.items()})
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(3, 16))
        with ranks.record() as log:
            model(torch.randn(3, 16))
    assert log.ops == ("all_reduce",) * 2
    assert "equal to the original" in str(handle.report()) and "is filled" in str(handle.report())


class Draws(Pair):
    """Takes numbers that torch did not draw: of global generators, of its own, of iterators, of an array."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(1)
        self.array = np.zeros(2)
        self.numpy = np.random.default_rng(2)
        self.iterators: list[Any] = [iter(range(9)), itertools.count(3), itertools.cycle([1, 2, 4])]

    def forward(self, x: Tensor) -> Tensor:
        self.array += 1.5
        drawn = float(np.random.rand())  # noqa: NPY002  # the global generator is meant
        scale = random.random() + drawn + self.own.random() + self.numpy.random() + self.array.sum()
        result: Tensor = super().forward(x) * (scale + sum(next(one) for one in self.iterators))
        return result


@pytest.mark.ranks(2)
def test_numbers_that_torch_did_not_draw(ranks: Ranks) -> None:
    """Both runs of a check take the same ones, and the call the next: a loud false alarm before."""
    model, alone = (models.seeded(Draws).double() for _ in range(2))
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), PAIR)
    outputs = []
    for each in (model, alone):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # the global one is meant
        torch.manual_seed(0)
        outputs.append([each.train(call < 3)(torch.randn(3, 16, dtype=torch.float64)) for call in range(6)])
    for out, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(out, expected, atol=EXACT, rtol=1e-10)


@pytest.mark.ranks(2)
def test_hooks_for_one_call_run_in_the_call(ranks: Ranks) -> None:
    """A hook that removes itself was removed by the check's runs, and the call went without it."""
    model: Any = models.seeded(Pair)
    x = torch.randn(3, 16)
    outputs = [model(x * 3), model(x)]
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})

    def once(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        handle.remove()
        return args[0] * 3

    handle = model.up.register_forward_pre_hook(once)
    for expected in outputs:
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


@pytest.mark.ranks(2)
def test_a_check_after_steady_steps_leaves_nothing_behind(ranks: Ranks) -> None:
    """A region's hooks, put back while another mode is checked, were gone after it: its constants stayed for good."""
    mesh = ranks.mesh((2,), ("tp",))
    plan = {"*.up": tp.ColwiseParallel(), "*.down": tp.RowwiseParallel()}
    model = models.seeded(lambda: nn.Sequential(Pair(MistakeInOneMode()), Pair()))
    handle = tp.apply_plan(model, mesh, plan)
    x = torch.randn(3, 16)
    for training in (True, False, True, False):
        model.train(training)
        for _ in range(6):
            model(x).sum().backward()
            assert not dispatch_modes()
        with torch.no_grad():
            model(x)
        assert not dispatch_modes()
        assert torch.rand(8).unique().numel() == 8
        assert torch.equal(model(x), model(x)) != training
        assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))
    handle.undo()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    # One mistake after another in one process, each found in the mode in which it shows.
    modes = [(training, grad) for training in (True, False) for grad in (True, False)]
    for wrong in modes:
        model = models.seeded(partial(lambda wrong: nn.Sequential(Pair(), Pair(MistakeInOneMode(wrong))), wrong))
        tp.apply_plan(model, mesh, plan)
        for mode in [*(mode for mode in modes if mode != wrong), wrong]:
            model.train(mode[0])
            with torch.set_grad_enabled(mode[1]):
                for _ in range(5):
                    if mode == wrong:
                        with pytest.raises(tp.PlanError, match="check-mismatch"):
                            model(x)
                        break
                    model(x)
        assert not dispatch_modes()


@pytest.mark.ranks(2)
def test_what_was_refused_is_refused_again(ranks: Ranks) -> None:
    """Whoever catches an error and calls once more gets it once more, until the mistake is mended."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: Pair(lambda x: x.flip(-1)))
    tp.apply_plan(model, mesh, PAIR)
    inner: Any = models.seeded(lambda: nn.Sequential(nn.Linear(16, 16), Pair(lambda x: x.flip(-1))))
    tp.apply_plan(inner, mesh, {"1.up": tp.ColwiseParallel(), "1.down": tp.RowwiseParallel()})
    data = models.seeded(Pair)
    tp.apply_plan(data, mesh, PAIR)
    replicas: Any = models.seeded(lambda: nn.Sequential(nn.Linear(16, 16), Pair()))
    replicas[0].weight.data += ranks.rank
    tp.apply_plan(replicas, mesh, {"1.up": tp.ColwiseParallel(), "1.down": tp.RowwiseParallel()})
    for _ in range(3):
        for refused in (model, inner):
            with pytest.raises(tp.PlanError, match="check-mismatch"):
                refused(torch.ones(2, 4, 16))
        with pytest.raises(tp.PlanError, match="ranks-disagree"):
            data(torch.full((2, 4, 16), float(ranks.rank)))
        with pytest.raises(tp.PlanError, match="replicas-differ"):
            replicas(torch.ones(2, 4, 16))
    replicas[0].weight.data -= ranks.rank
    for pair in (model, inner[1]):
        pair.function = torch.tanh
    for mended in (model, inner, data, replicas):
        mended(torch.ones(2, 4, 16)).sum().backward()


@pytest.mark.ranks(2)
def test_what_is_put_in_after_checked_calls(ranks: Ranks) -> None:
    """It is checked as if it had been there from the first call on, whether it has parameters or not."""
    mesh = ranks.mesh((2,), ("tp",))

    def model(calls: int) -> Any:
        net: Any = models.seeded(lambda: nn.Sequential(nn.Linear(16, 16), Pair(lambda x: net[1].act(x)))).double()
        net[1].act = nn.GELU()
        tp.apply_plan(net, mesh, {"1.up": tp.ColwiseParallel(), "1.down": tp.RowwiseParallel()})
        for _ in range(calls):
            net(tokens()).sum().backward()
        return net

    for calls in (0, 3):
        one = model(calls)
        one[1].act = nn.Softmax(-1)
        for _ in range(2):
            with pytest.raises(tp.PlanError, match="check-mismatch"):
                one(tokens())
        one[1].act = nn.Tanh()
        one(tokens())
        one[1].k = nn.Parameter(torch.tensor(1.5).double())
        one[1].function = lambda x, one=one: one[1].k * x
        with pytest.raises(tp.PlanError, match=r"check-mismatch\] 1\.k: .*gradient"):
            one(tokens())
        one = model(calls)
        one[1].up = copy.deepcopy(one[1].up)
        one(tokens()).sum().backward()
    torch.manual_seed(ranks.rank)
    one[0] = nn.Linear(16, 16).double()
    with pytest.raises(tp.PlanError, match=r"replicas-differ\] 0\.weight"):
        one(tokens())


@pytest.mark.ranks(2)
def test_another_class_after_the_plan(ranks: Ranks) -> None:
    """Its forward is what the original runs; a class that takes the forward over (FSDP2's) changes nothing."""
    for forward, is_right in ((nn.Linear.forward, True), (lambda self, x: 2 * F.linear(x, self.weight), False)):
        model = models.seeded(Pair)
        tp.apply_plan(model, ranks.mesh((2,), ("tp",)), PAIR)
        model.up.__class__ = type("Derived", (nn.Linear,), {"forward": forward})
        with nullcontext() if is_right else pytest.raises(tp.PlanError, match="check-mismatch"):
            model(tokens().float())


class Adapter(nn.Module):
    """A low-rank update beside a layer, sized by what its output has."""

    def __init__(self, base: nn.Module, features: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(16, 2), nn.Linear(2, features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(x))
        return result


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(2)
def test_layers_that_come_after_checked_calls(ranks: Ranks) -> None:
    """Adapters of a shard's size trained as another model on each rank, if a call had been checked before."""
    mesh = ranks.mesh((2,), ("tp",))
    for call in range(3):
        model: Any = models.seeded(lambda: nn.Sequential(nn.Linear(16, 16), Pair()))
        tp.apply_plan(model, mesh, {"1.up": tp.ColwiseParallel(), "1.down": tp.RowwiseParallel()})
        for _ in range(call):
            model(tokens().float()).sum().backward()
        model[0] = Adapter(model[0], 16)  # of replicated layers: right
        for _ in range(2):
            model(tokens().float()).sum().backward()
        model[1].up = Adapter(model[1].up, 16)
        for _ in range(2):
            with pytest.raises(tp.PlanError, match=r"model-changed|check-raises"):
                model(tokens().float())
