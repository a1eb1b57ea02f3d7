"""Parameters outside a forward: writes, gradients and hooks go to the leaf."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from tp_ddp_bridge import PlanError, pre_dp_module_transform, undo_dp_transform


@pytest.mark.ranks(2)
def test_users_hooks_see_dtensors_before_under_and_after(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    calls: list[Any] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        calls.append((type(grad), tuple(grad.shape)))
        return grad * 2

    def see(grad: torch.Tensor) -> None:
        calls.append(("after", type(grad), tuple(grad.shape)))

    handle = model.up.weight.register_hook(double)
    later = model.up.weight.register_hook(see)
    refused = model.up.bias.register_post_accumulate_grad_hook(see)
    with pytest.raises(PlanError, match=r"parameter-hooks\] up\.bias"):
        pre_dp_module_transform(model)
    refused.remove()
    x = torch.ones(2, 16)
    model(x).sum().backward()
    plain = models.whole(model.up.weight.grad).clone()
    first_calls = list(calls)
    calls.clear()
    pre_dp_module_transform(model)
    model.zero_grad()
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    assert calls == first_calls * 2
    assert torch.equal(models.whole(model.up.weight.grad), plain)
    handle.remove()
    calls.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert calls == first_calls[1:]
    assert torch.equal(models.whole(model.up.weight.grad) * 2, plain)
    undo_dp_transform(model)
    calls.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert calls == first_calls[1:]
    later.remove()
    calls.clear()
    model(x).sum().backward()
    assert calls == []


@pytest.mark.ranks(2)
def test_submodules_called_directly_and_writes_in_place(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    reference = models.seeded(models.MLP)
    x = torch.ones(2, 16)
    torch.testing.assert_close(model.down(model.up(x)), reference.down(reference.up(x)), atol=1e-6, rtol=0)
    with torch.no_grad():
        model.up.weight.zero_()
        nn.init.constant_(model.up.bias, 3.0)
        model.down.weight.data.fill_(0.5)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert float(named["up.weight"].abs().sum()) == 0.0
    assert float(named["up.bias"].mean()) == 3.0
    assert float(named["down.weight"].mean()) == 0.5
    # What is assigned to a view reaches the leaf; torch lets it be lost.
    model.up.weight.data = model.up.weight.data + 2.0
    assert float(named["up.weight"].abs().sum()) == 0.0  # other memory now, as of any parameter
    leaves = dict(model.named_parameters())
    assert float(leaves["up.weight"].detach().mean()) == 2.0
    model.up(x).sum().backward()
    model.up.weight.grad = model.up.weight.grad * 3
    gradient = leaves["up.weight"].grad
    assert gradient is not None
    assert float(gradient.detach().mean()) == 6.0
    model.up.weight.grad = None
    assert leaves["up.weight"].grad is None
    with pytest.raises(TypeError, match=r"laid out as.* assign a DTensor of that global shape"):
        model.up.weight.data = torch.zeros(32, 16)
    assert type(copy.deepcopy(model.up.weight.detach())) is DTensor
    assert type(pickle.loads(pickle.dumps(model.up.weight)).detach()) is DTensor
    # What goes into a parameter's place is a parameter; anything derived from a view is refused.
    with pytest.raises((TypeError, ValueError)):
        model.up.weight = model.up.weight * 2
    with pytest.raises((TypeError, ValueError)):
        model.head.weight = model.up.weight
    with pytest.raises(RuntimeError):
        model.up.weight.requires_grad_(False)


@pytest.mark.ranks(2)
def test_hooks_registered_through_an_attribute(ranks: Ranks) -> None:
    # On the view itself they would vanish with it, silently.
    model = models.bridged_mlp(ranks)
    for register in (model.up.weight.register_hook, model.up.weight.register_post_accumulate_grad_hook):
        with pytest.raises(RuntimeError, match="named_parameters"):
            register(lambda _: None)
    calls: list[Any] = []
    leaf = dict(model.named_parameters())["up.weight"]
    leaf.register_hook(lambda grad: calls.append(tuple(grad.shape)))
    leaf.register_post_accumulate_grad_hook(lambda each: calls.append(tuple(each.grad.shape)))
    model(torch.ones(2, 16)).sum().backward()
    assert calls == [(16, 16), (16, 16)]
