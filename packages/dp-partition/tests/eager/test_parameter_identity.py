"""Steps that look at which parameter a parameter is, write through views, or go on after a failed backward pass."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import dp_partition as dp
import pytest
import torch
import torch.distributed as dist
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition import PlanError
from dp_partition.api import EagerStyle as Style
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

CALLS = 5
Step = Callable[..., None]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _batch(rank: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * call + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (4,), generator=generator)


def _averaged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Average gradients by hand before each step, as DDP does behind backward."""

    def average(*_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    optimizer.register_step_pre_hook(average)
    return optimizer


def _full(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


MARKS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda model: [vars(p).update(no_decay=p.ndim == 1) for p in model.parameters()],
    "ids": lambda model: {id(p) for p in model.parameters() if p.ndim == 1},
    "memory": lambda model: {p.data_ptr() for p in model.parameters() if p.ndim == 1},
    "set": lambda model: {p for p in model.parameters() if p.ndim == 1},
    "frozenset": lambda model: frozenset(p for p in model.parameters() if p.ndim == 1),
    "dict": lambda model: {p: 1 for p in model.parameters() if p.ndim == 1},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
def test_weight_decay_by_marks_on_parameters(ranks: Ranks, door: Any, style: Style) -> None:
    """A trace, a copy and a shard are other objects than the parameter: each kind of mark has to survive them."""
    compared = 0
    for kind, mark in MARKS.items():

        def make(average: bool, mark: Any = mark, kind: str = kind) -> tuple[nn.Module, Any, Step]:
            model = _model()
            marks, optimizer = mark(model), torch.optim.SGD(model.parameters(), lr=0.1)

            def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
                F.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        key: Any = {"ids": id(p), "memory": kind == "memory" and p.data_ptr()}.get(kind, p)
                        if not (getattr(p, "no_decay", False) if kind == "attribute" else key in marks):
                            p.mul_(0.9)
                optimizer.step()
                optimizer.zero_grad()

            return model, _averaged(optimizer) if average else optimizer, step  # noqa: B023  # its own

        reference, hand_optimizer, by_hand = make(True)
        model, optimizer, step = make(False)
        compiled = door(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
        if door is dp.compile and kind != "attribute":
            with pytest.raises(PlanError, match=r"by identity.*dp_partition.distribute"):
                compiled(model, optimizer, *_batch(ranks.rank, 0))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in range(CALLS):
                rows = _batch(ranks.rank, call)
                by_hand(reference, hand_optimizer, *rows)
                compiled(model, optimizer, *rows)
        with compiled.unsharded(writeback=False):
            for got, want in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-14)
                compared += 1
        compiled.release()
    assert compared == 4 * (len(MARKS) if door is dp.distribute else 1)


WRITES: dict[str, Callable[[Any], Any]] = {
    "gradient row": lambda m: m[0].weight.grad[1].zero_(),
    "gradient narrowed": lambda m: m[0].weight.grad.narrow(0, 3, 2).mul_(2),
    "parameter row": lambda m: m[0].weight[0].fill_(0.5),
    "element": lambda m: m[2].bias.__setitem__(1, 0.25),
    "diagonal": lambda m: m[2].weight.diagonal().add_(0.1),
    "flat": lambda m: m[0].weight.view(-1)[3:5].mul_(0.5),
    "data": lambda m: m[0].weight.data[2].mul_(0.5),
    "detached": lambda m: m[0].weight.detach().mul_(0.9),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [1, 3])
def test_writes_through_views_reach_the_parameter_or_raise(ranks: Ranks, first: int) -> None:
    """From call 1 on they keep the parameter full; later, where it is a shard already, they raise."""
    right, refused = set(), set()
    for name, write in WRITES.items():
        number = [0]

        def step(
            model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, write: Any = write, at: Any = number
        ) -> None:
            at[0] += 1
            F.cross_entropy(model(x), y).backward()
            if at[0] >= first:
                with torch.no_grad():
                    write(model)
            optimizer.step()
            optimizer.zero_grad()

        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
        alone, x, y = _model(), *_batch(0, 0)  # the same rows on both ranks: their average is each one's gradient
        by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
        plain = [0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(CALLS):
                try:
                    compiled(model, optimizer, x, y)
                except PlanError as error:
                    refused |= {name} if {p.code for p in error.problems} == {"parameter-replaced"} else set()
                    break
                step(alone, by_hand, x, y, at=plain)
        if name in refused:
            continue
        for got, want in zip(_full(model), _full(alone), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, msg=name)
        right.add(name)
    assert right | refused == set(WRITES)
    assert right == (set(WRITES) if first == 1 else {"detached"})


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if dist.get_rank() in ctx.ranks:
            raise RuntimeError("planted")
        return grads[0], None


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("style", "failing", "is_caught", "retries"),
    [
        ("replicate", (0, 1), True, False),
        ("replicate", (0, 1), True, True),
        ("replicate", (0,), True, True),
        ("replicate", (0, 1), False, False),
        ("fully_shard", (0, 1), True, False),
        ("fully_shard", (0, 1), True, True),
        ("fully_shard", (0, 1), False, False),
    ],
)
def test_a_failed_backward_pass_raises_in_its_call_and_the_next_works(
    ranks: Ranks, style: Style, failing: tuple[int, ...], is_caught: bool, retries: bool
) -> None:
    model, reference = _model(), _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand = _averaged(torch.optim.SGD(reference.parameters(), lr=0.1))

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, now: tuple[int, ...] = ()) -> None:
        hidden: Any = fails(model[1](model[0](x)), now)
        loss = F.cross_entropy(model[2](hidden), y)
        if not is_caught:
            loss.backward()
        else:
            with suppress(RuntimeError):
                loss.backward()
            if retries and now:
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    fails: Any = _Fails.apply
    compiled = dp.distribute(step, mesh=ranks.mesh((2,), ("dp",)), style=style)
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(CALLS):
            x, y = _batch(ranks.rank, call)
            if call == 2:
                before = _full(model)
                with pytest.raises((PlanError, RuntimeError)) as caught:
                    compiled(model, optimizer, x, y, failing)
                codes = {p.code for p in caught.value.problems} if isinstance(caught.value, PlanError) else {"planted"}
                own = {"backward-failed"} if is_caught else {"planted"}
                assert codes == (own if ranks.rank in failing else {"rank-failed"})
                raised += 1
                if is_caught and not retries:
                    break  # the optimizer has stepped on gradients of a part of the model
                assert all(torch.equal(a, b) for a, b in zip(_full(model), before, strict=True))
                optimizer.zero_grad()
                continue
            compiled(model, optimizer, x, y)
            step(reference, by_hand, x, y)
    assert raised == 1
    if not is_caught or retries:
        for got, want in zip(_full(model), _full(reference), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def _step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_backward_between_calls_is_a_ranks_own_and_late_hooks_raise(ranks: Ranks) -> None:
    model: Any = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    compiled = dp.distribute(_step, mesh=ranks.mesh((2,), ("dp",)), style="replicate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(model, optimizer, *_batch(ranks.rank, 0))
        if ranks.rank == 0:  # a probe on one rank alone, which no other rank would answer
            model(_batch(0, 9)[0]).sum().backward()
            optimizer.zero_grad()
        compiled(model, optimizer, *_batch(ranks.rank, 1))
        if ranks.rank == 0:  # its peer raises with it, and does not wait
            model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
        text = "before it is averaged" if ranks.rank == 0 else "another rank raised"
        with pytest.raises(PlanError, match=text):
            compiled(model, optimizer, *_batch(ranks.rank, 2))


@pytest.mark.ranks(2)
def test_shards_take_full_checkpoints_and_go_back_to_the_optimizer(ranks: Ranks) -> None:
    """Full state is loaded between calls, another model comes and goes, a plain step trains at the end."""
    model, other, reference = _model(), _model(), _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    second = torch.optim.AdamW(other.parameters(), lr=0.01)
    by_hand = _averaged(torch.optim.AdamW(reference.parameters(), lr=0.01))

    compiled = dp.distribute(_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(CALLS):
            x, y = _batch(ranks.rank, call)
            _step(reference, by_hand, x, y)
            if call == 3:
                compiled(other, second, x, y)
            compiled(model, optimizer, x, y)
            if call == 2:
                assert sum(isinstance(p, DTensor) for p in model.parameters()) == 4
                model.load_state_dict(reference.state_dict())
                optimizer.load_state_dict(copy.deepcopy(by_hand.state_dict()))  # it shares counters otherwise
    compiled.release()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-11, atol=1e-13)
    _step(model, optimizer, *_batch(0, 7))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    moved = [not torch.equal(a.detach(), b.detach()) for a, b in pairs]
    assert all(moved)
    assert len(moved) == 4
