"""A copy of a function works on its own memory, keeps identity, and names what it cannot copy."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from typing import Any

import pytest
import torch
from shared.copying import CannotCopyError, Copier
from torch import nn


def test_a_copy_shares_nothing_that_is_written() -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
    rates: list[float] = []
    optim.register_step_post_hook(lambda own, args, kwargs: rates.append(own.param_groups[0]["lr"]))

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optim.step()
        optim.zero_grad()
        schedule.step()

    before = [p.detach().clone() for p in model.parameters()]
    copied = Copier({}).copy(step)
    for _ in range(3):
        copied(torch.ones(1, 2))
    assert all(map(torch.equal, before, model.parameters())) and rates == []
    assert optim.param_groups[0]["lr"] == 0.1
    inside = dict(zip(copied.__code__.co_freevars, copied.__closure__, strict=True))
    assert inside["optim"].cell_contents.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert inside["optim"].cell_contents.param_groups[0]["params"][0] is inside["model"].cell_contents.weight


def test_objects_without_a_copy_are_named() -> None:
    with pytest.raises(CannotCopyError, match="generator"):
        Copier({}).copy(types.SimpleNamespace(held=(i for i in range(3))))


def test_one_object_stays_one_object() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    weight.no_decay = True  # type: ignore[attr-defined]
    shared = {"weights": [weight]}
    parts: Any = {
        "list": [weight, shared],
        "partial": functools.partial(max, shared["weights"]),
        "deque": collections.deque([shared]),
        "reference": weakref.ref(weight),
        "method": nn.Sequential(nn.Linear(2, 2)).forward,
    }
    copied = Copier({}).copy((weight, parts))
    new, inside = copied
    assert new is not weight and new.no_decay and torch.equal(new.grad, weight.grad) and new.grad is not weight.grad
    assert inside["list"][0] is new and inside["list"][1]["weights"][0] is new
    assert inside["partial"].args[0] is inside["list"][1]["weights"]
    assert inside["deque"][0] is inside["list"][1]
    assert inside["reference"]() is new
    assert inside["method"].__self__ is not parts["method"].__self__


def test_tensors_are_replaced_and_transformed() -> None:
    placed, other = torch.zeros(2), torch.ones(2)
    copied = Copier({id(placed): torch.full((4,), 5.0)}, lambda x: x * 2).copy([placed, other, placed])
    assert copied[0] is copied[2]
    assert copied[0].tolist() == [5.0] * 4 and copied[1].tolist() == [2.0, 2.0] and other.tolist() == [1.0, 1.0]


def test_class_and_attributes_of_a_module_may_be_chosen() -> None:
    """A module in shards is copied as the module it was before: without the shards' class and hooks."""

    class Sharded(nn.Linear):
        pass

    module = Sharded(2, 2)
    module.register_forward_hook(lambda *_: 1 / 0)

    def plain(value: Any) -> tuple[type, dict[str, Any]]:
        own = dict(vars(value))
        return (
            (nn.Linear, own | {"_forward_hooks": collections.OrderedDict()}) if value is module else (type(value), own)
        )

    copied = Copier({}, plain=plain).copy(module)
    assert type(copied) is nn.Linear and copied.weight is not module.weight
    assert torch.equal(copied(torch.ones(1, 2)), nn.functional.linear(torch.ones(1, 2), module.weight, module.bias))


def test_globals_are_copied_if_the_copy_owns_them() -> None:
    model = nn.Linear(1, 1)
    scope: dict[str, Any] = {"model_of_globals": model}

    def of_globals(x: torch.Tensor) -> Any:
        return model_of_globals(x)  # type: ignore[name-defined]  # noqa: F821

    step = types.FunctionType(of_globals.__code__, scope)
    assert Copier({}).copy(step).__globals__["model_of_globals"] is model
    copied = Copier({}, owned={id(model)}).copy(step)
    assert copied.__globals__["model_of_globals"] is not model and scope["model_of_globals"] is model
    assert torch.equal(copied(torch.ones(1, 1)), model(torch.ones(1, 1)))
