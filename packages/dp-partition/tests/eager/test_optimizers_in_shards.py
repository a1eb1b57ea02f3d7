"""Optimizers that update shards, and those that keep their parameters full: values equal one process either way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dp_partition as dp
import pytest
import torch
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition._torch_compat import TorchDispatchMode
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

CALLS, WIDTH = 5, 24


class Factored(torch.optim.Optimizer):
    """Means over rows for matrices with sides from 16 on, as timm's Adafactor of Big Vision; smaller ones as RMSprop.

    The running means are plain tensors, which do not mix with shards.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square()
                if p.ndim == 2 and min(p.shape) >= 16:
                    means = self.state[p].setdefault("means", torch.zeros(p.shape[1], dtype=p.dtype))
                    square = means.mul_(0.9).add_(square.mean(0), alpha=0.1).expand(p.shape)
                p.sub_(p.grad / (square.sqrt() + 1e-3), alpha=group["lr"])


class Signs(torch.optim.Optimizer):
    """Lion: elementwise, and of no class that is known. It reads a mark on its parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                first = self.state[p].setdefault("first", torch.zeros_like(p))
                p.sub_((0.9 * first + 0.1 * p.grad).sign(), alpha=group["lr"] * p.rate)
                first.mul_(0.99).add_(p.grad, alpha=0.01)


class Ratio(Signs):
    """LAMB's ratio of norms: not elementwise, but operators on shards mean the full tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=group["lr"] * p.rate)


class Halves(Signs):
    """Raises for a shard of less than half of the rows: of 5 rows on two ranks, on rank 1 alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, DTensor) and 2 * len(p.to_local()) < len(p):
                    raise ValueError("less than half of the rows")
        super().step()


def batch_of(call: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one call on one rank: 6 rows."""
    generator = torch.Generator().manual_seed(10 * call + rank)
    x, y = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (WIDTH, 5))
    return x, y


def made() -> nn.Module:
    """Three layers, two of them equal; every other parameter has another mark."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 5)).double()
    for number, p in enumerate(model.parameters()):
        p.rate = 1.0 + number % 2  # type: ignore[attr-defined]
    return model


def train(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


KINDS: list[tuple[Callable[[Any], Any], str, bool]] = [
    (lambda p: torch.optim.AdamW(p, lr=1e-2), "", True),
    (lambda p: torch.optim.Adagrad(p, lr=1e-2), "", True),  # has state before its first step
    (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True), "fails on shards", True),
    (lambda p: torch.optim.Rprop(p, lr=1e-2), "fails on shards", True),
    (lambda p: Signs(p, lr=1e-2), "", True),
    (lambda p: Ratio(p, lr=1e-2), "", False),  # the sum of each rank's squares rounds otherwise
    (lambda p: Factored(p, lr=1e-2), "fails on shards", True),
    (lambda p: Halves(p, lr=1e-2), "fails on shards (ValueError: less than half of the rows)", True),
]


@pytest.mark.ranks(2)
def test_values_of_known_and_unknown_optimizers_equal_one_process(ranks: Ranks) -> None:
    """No call is observed, so that the optimizer's own comparison decides alone."""
    compared = 0
    for make, reason, is_exact in KINDS:
        results = []
        for style in ("replicate", "fully_shard"):
            model = made()
            optim = make(model.parameters())
            step = dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), style=style, observe=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # parameters stay full, which is asserted below
                for call in range(CALLS):
                    x, y = batch_of(call, ranks.rank)
                    step(model, optim, x, y)
            with step.unsharded():
                results.append([p.detach().clone() for p in model.parameters()])
        text = step.explain()
        full = [line for line in text.splitlines() if "full: 0.weight:" in line and reason in line]
        assert bool(full) == bool(reason), text
        assert ("sharded: 0 of 6" in text) == bool(reason), text
        for want, got in zip(*results, strict=True):
            assert torch.equal(want, got) if is_exact else torch.allclose(want, got, rtol=1e-12), optim
            compared += got.numel()
    assert compared == len(KINDS) * (2 * (WIDTH + 1) * WIDTH + 5 * (WIDTH + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("foreach", [True, False])
def test_complex_parameters_of_a_known_class_stay_full(ranks: Ranks, foreach: bool) -> None:
    """Adam writes complex numbers through a real view. Of a vector of 33 on two ranks it is a copy, and lost."""
    results = []
    for style in ("replicate", "fully_shard"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*sizes, dtype=torch.complex64) for sizes in ((6, 33), (33, 2))))
        optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=foreach)

        def square(model: nn.Module, optim: Any, x: torch.Tensor) -> None:
            optim.zero_grad()
            model(x).abs().square().mean().backward()
            optim.step()

        step = dp.distribute(square, mesh=ranks.mesh((2,), ("dp",)), style=style, observe=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for call in range(CALLS):
                generator = torch.Generator().manual_seed(10 * call + ranks.rank)
                step(model, optim, torch.randn(4, 6, generator=generator, dtype=torch.complex64))
        results.append([p.detach().clone() for p in model.parameters()])
    assert "full: 0.weight: Adam updates shards differently" in step.explain()
    assert sum(torch.equal(*pair) * pair[0].numel() for pair in zip(*results, strict=True)) == 33 * 7 + 34 * 2


@pytest.mark.ranks(2)
def test_an_optimizer_that_comes_after_the_placement_is_compared_as_well(ranks: Ranks) -> None:
    """Fused SGD cannot step shards, and after release() it does, in full; LAMB's ratio steps them at once."""
    later: list[tuple[Any, str]] = [
        (lambda m: Ratio(m.parameters(), lr=1e-2), ""),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, fused=True), "fails on shards"),
    ]
    for make, reason in later:
        results = []
        for style in ("replicate", "fully_shard"):
            model = made()
            box = [torch.optim.SGD(model.parameters(), lr=1e-2)]

            def boxed(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model, box: list[Any] = box) -> None:
                train(model, box[0], x, y)

            step = dp.distribute(boxed, mesh=ranks.mesh((2,), ("dp",)), style=style, check="never")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for call in range(CALLS):
                    if call == 2:
                        box[0] = make(model)
                    x, y = batch_of(call, ranks.rank)
                    if call == 2 and reason and style == "fully_shard":
                        before = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
                        with pytest.raises(dp.PlanError, match=rf"not-elementwise.*{reason}.*release\(\)"):
                            step(x, y)
                        step.release()
                        assert all(map(torch.equal, model.parameters(), before))
                        box[0].zero_grad()
                    step(x, y)
            with step.unsharded():
                results.append([p.detach().clone() for p in model.parameters()])
        assert ("sharded: 6 of 6" in step.explain()) != bool(reason)
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


class Means(Signs):
    """Divides by a mean of this rank's rows: not elementwise, and no error on shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                own, grad = (x.to_local() if isinstance(x, DTensor) else x for x in (p, p.grad))
                own.sub_(grad / (grad.abs().mean() + 1e-3), alpha=group["lr"])


@pytest.mark.ranks(2)
def test_a_compiled_optimizer_step_is_compared_and_stays_one_graph(ranks: Ranks) -> None:
    """`torch.compile(optimizer.step)` after the placement: AdamW trains on, means of rows are refused on both ranks."""
    for make, way in ((torch.optim.AdamW, "right"), (Means, "refused"), (Means, "whole")):
        results, graphs = [], list[int]()
        torch.compiler.reset()

        def backend(module: Any, inputs: Any, graphs: list[int] = graphs) -> Any:
            graphs.append(len(inputs))
            return module

        for style in ("replicate", "fully_shard"):
            model = made()
            optim: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
            box = [optim, optim.step]

            def boxed(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model, box: list[Any] = box) -> None:
                F.mse_loss(model(x), y).backward()
                box[1]()
                box[0].zero_grad()

            step = dp.distribute(boxed, mesh=ranks.mesh((2,), ("dp",)), style=style, check="never")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler: TorchScript is deprecated, a hook is not traced
                for call in range(CALLS):
                    x, y = batch_of(call, ranks.rank)
                    if call == 2:
                        box[0] = make(model.parameters(), lr=1e-2)
                        box[1] = torch.compile(box[0].step, backend=backend, fullgraph=way == "whole")
                        graphs.clear()
                    if call == 2 and way != "right" and style == "fully_shard":
                        text = (
                            "not-elementwise.*Means updates shards diff" if way == "refused" else "make that one step"
                        )
                        with pytest.raises((dp.PlanError, RuntimeError), match=text):
                            step(x, y)
                        break
                    step(x, y)
            with step.unsharded():
                results.append([p.detach().clone() for p in model.parameters()])
        assert way != "right" or sum(map(torch.equal, *results)) == 6
        assert len(graphs) <= 2, graphs  # one with new state, one with state that is there


class Uncopied:
    """A value in an optimizer's state that raises when it is copied, on rank 1 alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __deepcopy__(self, memo: Any) -> Uncopied:
        if self.rank == 1:
            raise ValueError("no copy here")
        return Uncopied(self.rank)


class HalfRatio(Halves):
    """Raises on rank 1 alone, where rank 0 already reduces a norm of all rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not isinstance(p, DTensor) or 2 * len(p.to_local()) >= len(p):
                    p.norm() + 1
        super().step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", ["copy", "norm"])
def test_a_trial_that_fails_on_one_rank_alone_fails_on_all(ranks: Ranks, fault: str) -> None:
    """Rank 0 gathers shards, or reduces a norm, while rank 1 raises: it neither hangs nor reads rank 1's message."""
    model = made()
    box: list[Any] = [torch.optim.SGD(model.parameters(), lr=1e-2)]

    def boxed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(model, box[0], x, y)

    step = dp.distribute(boxed, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard", check="never")
    losses = []
    for call in range(CALLS):
        x, y = batch_of(call, ranks.rank)
        if call == 2:
            known, first = box[0], next(model.parameters())
            box[0] = Signs(model.parameters(), lr=1e-2) if fault == "copy" else HalfRatio(model.parameters(), lr=1e-2)
            if fault == "copy":
                box[0].state[first]["note"] = Uncopied(ranks.rank)
            text = "no copy here" if fault == "copy" else "less than half of the rows"
            with pytest.raises(dp.PlanError, match=f"not-elementwise.*{text}"):
                step(x, y)
            box[0] = known
            known.zero_grad()
        losses.append(step(x, y))
    assert len(losses) == CALLS and all(map(torch.isfinite, losses))


class Elements(TorchDispatchMode):
    """Counts the elements of random gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::randn":
            self.drawn.append(result.shape)
        return result


@pytest.mark.ranks(2)
def test_one_parameter_of_each_kind_is_compared_and_small_ones_of_known_classes(ranks: Ranks) -> None:
    """Placing draws gradients for both copies: of two equal layers one, cut for AdamW: 24 rows to 2, and 5 to 3."""
    wanted: dict[Any, list[tuple[int, ...]]] = {
        torch.optim.AdamW: [(2, 4), (2,), (3, 4), (3,)],
        Signs: [(WIDTH, WIDTH), (WIDTH,), (5, WIDTH), (5,)],
    }
    for kind, shapes in wanted.items():
        model = made()
        optim = kind(model.parameters(), lr=1e-2)
        step = dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), check="never")
        with Elements() as elements:
            step(model, optim, torch.ones(2, WIDTH, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64))
        drawn = sorted(map(tuple, elements.drawn))
        assert drawn == sorted(2 * shapes), drawn
