"""A bridged module's copies, pickles, ``.to()``, buffers, functional calls and replaced parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tp_ddp_bridge import PlanError, is_bridged, pre_dp_module_transform, undo_dp_transform
from tp_ddp_bridge.module.transform import survey


@pytest.mark.ranks(2)
def test_copies_and_pickles_stay_bridged(ranks: Ranks) -> None:
    # The seed: deepcopy failed.
    mesh = ranks.mesh((2,), ("tp",))
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))  # torch's styles leave hooks that no pickle takes
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    model.append(nn.LayerNorm(16))
    pre_dp_module_transform(model)
    x = distribute_tensor(torch.ones(2, 16), mesh, [Replicate()])

    def run(module: nn.Module) -> torch.Tensor:
        return module[1](module[0](x)).full_tensor()  # type: ignore[index, no-any-return]

    expected = run(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert is_bridged(other) and type(other[0]) is type(model[0])
        assert torch.equal(run(other), expected)
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        assert len(pairs) == 6
        for mine, theirs in pairs:
            assert theirs is not mine and theirs.data_ptr() != mine.data_ptr()
            assert theirs._sharding_info == mine._sharding_info  # type: ignore[attr-defined]
        undo_dp_transform(other)
        assert isinstance(other[0].weight, DTensor) and other[0].weight.is_leaf


@pytest.mark.ranks(2)
def test_to_and_zero_grad_and_eval(ranks: Ranks) -> None:
    # The seed: .to(), zero_grad() and state_dict() passed tensor-parallel parameters by; a first forward without
    # grad failed.
    model = models.bridged_mlp(ranks)
    x = torch.ones(2, 16)
    model.eval()
    with torch.no_grad():
        quiet = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), quiet, atol=1e-6, rtol=0)
    model.train()
    loud = model(x)
    assert loud.requires_grad
    torch.testing.assert_close(loud.detach(), quiet, atol=1e-6, rtol=0)  # with autograd another kernel may run
    loud.sum().backward()
    assert sum(p.grad is not None for p in model.parameters()) == 6
    assert isinstance(model.up.weight.grad, DTensor)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert model.up.weight.dtype == torch.float64 and model.state_dict()["up.weight"].dtype == torch.float64
    assert model(x.double()).dtype == torch.float64
    assert model.up.weight._local_tensor.data_ptr() == dict(model.named_parameters())["up.weight"].data_ptr()
    model.to("meta")
    assert model.up.weight.device.type == "meta" and model.up.weight.shape == (32, 16)
    model.to_empty(device="cpu")
    assert model.up.weight.device.type == "cpu"
    assert all(hasattr(p, "_sharding_info") for p in model.parameters())


@pytest.mark.ranks(2)
def test_buffers(ranks: Ranks) -> None:
    # The seed: DTensor buffers made DDP fail.
    mesh = ranks.mesh((2,), ("tp",))

    class WithBuffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
            self.register_buffer("mean", distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
            self.register_buffer("secret", distribute_tensor(torch.ones(4), mesh, [Replicate()]), persistent=False)

        mean: Any
        secret: Any

        def forward(self) -> Any:
            with torch.no_grad():
                self.mean = self.mean * 0.5 + self.w
                self.secret.add_(1.0)
            return (self.w * self.mean).sum()

    model: Any = pre_dp_module_transform(WithBuffers())
    surveyed = survey(model).bridgeable
    kinds = {each.name: each.kind for each in surveyed}
    assert kinds == {"w": "parameter", "mean": "buffer", "secret": "buffer"}
    for _ in range(2):
        model()
    buffers = dict(model.named_buffers())
    assert not isinstance(buffers["mean"], DTensor) and buffers["mean"].shape == (2,)
    assert float(buffers["mean"].detach()[0]) == 1.5 and float(buffers["secret"][0]) == 3.0
    state = model.state_dict()
    assert list(state) == ["w", "mean"] and state["mean"].shape == (4,)
    with pytest.raises(TypeError, match="mean"):
        model.mean = torch.zeros(4)
    undo_dp_transform(model)
    assert isinstance(model._buffers["mean"], DTensor) and isinstance(model._buffers["secret"], DTensor)


@pytest.mark.ranks(2)
def test_functional_call(ranks: Ranks) -> None:
    model = models.bridged_mlp(ranks)
    x = torch.ones(2, 16)
    expected = model(x)
    named = dict(model.named_parameters())
    with torch.no_grad():
        doubled = {name: (parameter * 2).requires_grad_() for name, parameter in named.items()}
    out = torch.func.functional_call(model, doubled, (x,))
    model_doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model_doubled.parameters():
            parameter.mul_(2)
    assert torch.equal(out, model_doubled(x))
    out.sum().backward()
    assert doubled["up.weight"].grad is not None and doubled["up.weight"].grad.shape == (16, 16)
    assert torch.equal(torch.func.functional_call(model, OrderedDict(model.state_dict()), (x,)), expected)  # DTensors
    with pytest.raises(RuntimeError, match=r"up\.weight"):
        torch.func.functional_call(model, {"up.weight": torch.zeros(32, 16)}, (x,))
    assert torch.equal(model(x), expected)


@pytest.mark.ranks(2)
def test_an_attribute_error_inside_the_view_is_not_swallowed(ranks: Ranks) -> None:
    # nn.Module.__getattr__ would answer it with the local leaf: a silently wrong shape.
    from tp_ddp_bridge.module.view import View

    model = models.bridged_mlp(ranks)

    def broken(self: Any, leaf: torch.Tensor) -> Any:
        raise AttributeError("inside")

    original, View.make = View.make, broken  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match=r"up\.weight.*inside"):
            model.up.weight
        assert not hasattr(model.up, "nothing_of_that_name")
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            model.up.nothing_of_that_name
    finally:
        View.make = original  # type: ignore[method-assign]


@pytest.mark.ranks(2)
def test_weight_norm_and_parametrize(ranks: Ranks) -> None:
    from torch.nn.utils import parametrizations, parametrize, prune

    mesh = ranks.mesh((2,), ("tp",))
    model = models.bridged_mlp(ranks)
    # The original would become a buffer, or a parameter that DDP has never seen.
    for act in (parametrizations.weight_norm, parametrizations.orthogonal):
        with pytest.raises((RuntimeError, ValueError)):  # torch's own: a view is no parameter to register
            act(model.up)
    with pytest.raises((RuntimeError, ValueError)):
        parametrize.register_parametrization(model.up, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match=r"'weight'.*before bridging"), pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.up)
    with pytest.raises(RuntimeError, match=r"'weight'.*before bridging"):
        nn.utils.spectral_norm(model.up)
    with pytest.raises(RuntimeError, match=r"'weight'.*before bridging"):
        del model.up.weight
    with pytest.raises((RuntimeError, ValueError)):
        prune.l1_unstructured(model.up, "weight", amount=1)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in models.MLP().named_parameters()]
    assert torch.equal(model(torch.ones(1, 16)), models.bridged_mlp(ranks)(torch.ones(1, 16)))
    assert not parametrize.is_parametrized(model.up)

    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    # Registered before the bridge it works: the original is an ordinary DTensor parameter.
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    parametrize.register_parametrization(model.up, "weight", Double())
    expected = model(torch.ones(2, 16))
    pre_dp_module_transform(model)
    out = model(torch.ones(2, 16))
    assert torch.equal(out, expected)
    out.sum().backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert "up.parametrizations.weight.original" in names and len(names) == 6

    # Torch would raise in the backward pass.
    norms: list[tuple[str, Any]] = [("up.parametrizations.weight", parametrizations.weight_norm)]
    for name, norm in (*norms, ("up", deprecated_weight_norm)):
        model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
        norm(model.up)
        with pytest.raises(PlanError, match=rf"module-not-shardable. {name}: .*freeze it"):
            pre_dp_module_transform(model)
        for key, parameter in model.up.named_parameters():
            parameter.requires_grad = key == "bias"  # which no norm is of
        expected = model(torch.ones(2, 16))
        out = pre_dp_module_transform(model)(torch.ones(2, 16))
        assert torch.equal(out, expected)
        out.sum().backward()
        assert [key for key, parameter in model.up.named_parameters() if parameter.grad is not None] == ["bias"]


def deprecated_weight_norm(module: nn.Module) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(module)


@pytest.mark.ranks(2)
def test_lora_wrapping(ranks: Ranks) -> None:
    class LoRA(nn.Module):
        base: Any

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, 16))
            self.b = nn.Parameter(torch.zeros(16, 2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.base(x) + x @ self.a.t() @ self.b.t()

    mesh = ranks.mesh((2,), ("tp",))
    torch.manual_seed(3)
    model = LoRA(models.bridged_mlp(ranks))
    assert is_bridged(model)
    model(torch.ones(2, 16)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["a", "b"]
    assert all(not p.requires_grad for p in model.base.parameters())
    with torch.no_grad():  # merging writes through the view
        model.base.up.weight.add_(distribute_tensor(torch.ones(32, 16), mesh, [Replicate()]))
    changed = models.seeded(models.MLP)
    with torch.no_grad():
        changed.up.weight.add_(1.0)
    torch.testing.assert_close(model.base(torch.ones(2, 16)), changed(torch.ones(2, 16)), atol=1e-4, rtol=0)
