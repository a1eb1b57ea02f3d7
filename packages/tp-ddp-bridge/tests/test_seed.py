"""Torch's own transform fails silently in eight cases and loudly in seven; ours in none.

Each case answers whether the thing came out right; torch's copy of the seed is run to show that the case tests
something.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from tp_ddp_bridge import clip_grad_norm_, pre_dp_module_transform

Transform = Callable[..., Any]
Case = Callable[[Transform, Any], bool]
X = torch.linspace(-1, 1, 32).view(2, 16)


def seed_transform(module: Any, optimizers: Any = ()) -> Any:
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(module)
    return module


def sharded(mesh: Any) -> Any:
    return models.parallelize_mlp(models.seeded(models.MLP), mesh)


def backward(model: Any) -> None:
    model(X).pow(2).sum().backward()


def optimizer_built_before(transform: Transform, mesh: Any) -> bool:
    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    transform(model, optimizers=[optimizer])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    backward(model)
    optimizer.step()
    named = dict(model.named_parameters())
    return all(name in named and not torch.equal(named[name], value) for name, value in before.items())


def optimizer_built_after_a_forward(transform: Transform, mesh: Any) -> bool:
    model = transform(sharded(mesh))
    backward(model)
    return len(torch.optim.SGD(model.parameters(), 0.1).param_groups[0]["params"]) == 6


def frozen_stays_frozen(transform: Transform, mesh: Any) -> bool:
    model = sharded(mesh)
    model.up.weight.requires_grad_(False)
    transform(model)
    return not dict(model.named_parameters())["up.weight"].requires_grad


def clip_norm(transform: Transform, mesh: Any) -> bool:
    reference = models.seeded(models.MLP)
    backward(reference)
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    model = transform(sharded(mesh))
    clip: Any = nn.utils.clip_grad_norm_ if transform is seed_transform else clip_grad_norm_
    named = dict(model.named_parameters())
    backward(model)
    return abs(float(clip(named.values(), 1e9)) - expected) < 1e-4 * expected


def checkpoint_has_whole_weights(transform: Transform, mesh: Any) -> bool:
    return tuple(transform(sharded(mesh)).state_dict()["up.weight"].shape) == (32, 16)


def zero_grad_clears_all(transform: Transform, mesh: Any) -> bool:
    model = transform(sharded(mesh))
    named = dict(model.named_parameters())
    backward(model)
    model.zero_grad()
    return all(parameter.grad is None for parameter in named.values())


def to_moves_all(transform: Transform, mesh: Any) -> bool:
    model = transform(sharded(mesh))
    model(X)
    model.to(torch.float64)
    return len(list(model.parameters())) == 6 and bool(model.up.weight.dtype == torch.float64)


def state_dict_is_complete(transform: Transform, mesh: Any) -> bool:
    model = transform(sharded(mesh))
    model(X)
    return len(model.state_dict()) == 6


SILENT: list[Case] = [
    optimizer_built_before,
    optimizer_built_after_a_forward,
    frozen_stays_frozen,
    clip_norm,
    checkpoint_has_whole_weights,
    zero_grad_clears_all,
    to_moves_all,
    state_dict_is_complete,
]


def tied_parameters(transform: Transform, mesh: Any) -> bool:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
            self.b = self.a

        def forward(self) -> Any:
            total: Any = self.a + self.b
            return total.sum()

    model = transform(Tied())
    for _ in range(2):
        total = model().full_tensor()
    return float(total.detach()) == 32.0 and len(list(model.parameters())) == 1


def dtensor_buffers(transform: Transform, mesh: Any) -> bool:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
            self.register_buffer("b", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
            self.register_buffer("plain", torch.zeros(1))

        b: Any

        def forward(self) -> Any:
            return (self.w * self.b).sum()

    new_subgroups: Any = torch.distributed.new_subgroups
    one = new_subgroups(group_size=1)[0]
    ddp = DistributedDataParallel(transform(Buffered()), process_group=one)
    out: Any = ddp()
    return float(out.full_tensor().detach()) == 4.0


def integer_parameters(transform: Transform, mesh: Any) -> bool:
    model = nn.ParameterDict(
        {"codes": nn.Parameter(distribute_tensor(torch.arange(4), mesh, [Shard(0)]), requires_grad=False)}
    )
    return bool(transform(model)["codes"].dtype == torch.int64)


def first_forward_without_grad(transform: Transform, mesh: Any) -> bool:
    model = transform(sharded(mesh))
    with torch.no_grad():
        model(X)
    backward(model)
    return len(list(model.parameters())) == 6


def deep_copies(transform: Transform, mesh: Any) -> bool:
    model = transform(sharded(mesh))
    model(X)
    other = copy.deepcopy(model)
    backward(other)
    return len([p for p in other.parameters() if p.grad is not None]) == 6


def submodule_called_directly(transform: Transform, mesh: Any) -> bool:
    model, reference = transform(sharded(mesh)), models.seeded(models.MLP)
    out = model.down(model.up(X))
    return torch.allclose(out, reference.down(reference.up(X)), atol=1e-6)


def compiled(transform: Transform, mesh: Any) -> bool:
    torch._dynamo.reset()
    model = transform(sharded(mesh))
    expected = model(X).detach()
    run = torch.compile(model, backend="eager", fullgraph=True)
    return torch.allclose(run(X), expected, atol=1e-6)


LOUD: list[Case] = [
    tied_parameters,
    dtensor_buffers,
    integer_parameters,
    first_forward_without_grad,
    deep_copies,
    submodule_called_directly,
    compiled,
]


@pytest.mark.ranks(2)
def test_eight_silent_failures(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    assert len(SILENT) == 8
    for case in SILENT:
        assert case(pre_dp_module_transform, mesh), case.__name__
        assert not case(seed_transform, mesh), f"{case.__name__}: torch gets it right now"


@pytest.mark.ranks(2)
def test_seven_loud_failures(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    assert len(LOUD) == 7
    for case in LOUD:
        assert case(pre_dp_module_transform, mesh), case.__name__
        try:
            right = case(seed_transform, mesh)
        except Exception:  # whatever it is: torch's errors are not ours to fix in a test
            right = False
        assert not right, f"{case.__name__}: torch gets it right now"
