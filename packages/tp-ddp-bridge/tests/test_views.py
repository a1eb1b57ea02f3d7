"""What a bridged module is like from outside and inside, on two tensor-parallel ranks without DDP."""

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
from torch.nn import functional
from tp_ddp_bridge import _pre_dp_module_transform as seed_name
from tp_ddp_bridge import bridge_plan, dp_bridge, is_bridged, pre_dp_module_transform, undo_dp_transform


def bridged_mlp(ranks: Ranks) -> Any:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    return pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh))


@pytest.mark.ranks(2)
def test_parameters_are_leaves_and_attributes_are_dtensors(ranks: Ranks) -> None:
    # The seed: after a forward named_parameters() had 2 of 6 names left.
    model = bridged_mlp(ranks)
    x = torch.ones(2, 16)
    for _ in range(3):
        model(x).sum().backward()
        named = dict(model.named_parameters())
        assert len(named) == 6
        assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in named.values())
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.shape == (32, 16)
    assert named["up.weight"].shape == (16, 16)
    assert model.up.weight.placements == (Shard(0),)
    assert isinstance(model.up.weight, nn.Parameter)
    assert type(model.up).__name__ == "Linear" and isinstance(model.up, nn.Linear)
    assert repr(model) == repr(models.MLP())
    assert is_bridged(model)
    assert seed_name is pre_dp_module_transform


@pytest.mark.ranks(2)
def test_once_is_enough(ranks: Ranks) -> None:
    model = bridged_mlp(ranks)
    before = dict(model.named_parameters())
    classes = [type(module) for module in model.modules()]
    assert pre_dp_module_transform(model) is model
    after = dict(model.named_parameters())
    assert all(before[name] is after[name] for name in before) and len(after) == 6
    assert classes == [type(module) for module in model.modules()]
    assert type(model.up) is type(bridged_mlp(ranks).up)  # one class per class and names, not per module


@pytest.mark.ranks(2)
def test_undo_gives_back_what_there_was(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    model.up.weight.requires_grad_(False)
    model.down.weight.mark = "mine"
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    classes = [type(module) for module in model.modules()]
    wanted = {name: models.whole(value) for name, value in model.state_dict().items()}
    x = torch.ones(2, 16)
    model(x).sum().backward()
    optimizer.step()
    stepped = {name: models.whole(value).clone() for name, value in model.state_dict().items()}
    grads = {name: models.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert wanted.keys() == stepped.keys()
    state_before = {key: models.whole(value["exp_avg"]) for key, value in optimizer.state_dict()["state"].items()}

    pre_dp_module_transform(model, optimizers=optimizer)
    frozen = dict(model.named_parameters())["up.weight"]
    assert not frozen.requires_grad
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(isinstance(v, DTensor) for state in optimizer.state.values() for v in state.values())
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "up.weight")

    undo_dp_transform(model, optimizers=[optimizer])
    assert not is_bridged(model)
    assert [type(module) for module in model.modules()] == classes
    models.assert_same_state(model.state_dict(), stepped, count=6, atol=0)
    back = dict(model.named_parameters())
    assert [name for name, p in back.items() if isinstance(p, DTensor)] == [
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert not back["up.weight"].requires_grad and back["up.bias"].requires_grad
    assert back["down.weight"].mark == "mine"
    assert not hasattr(back["down.weight"], "_sharding_info") and not hasattr(back["head.weight"], "_sharding_info")
    compared = 0
    for name, grad in grads.items():
        assert torch.equal(models.whole(back[name].grad), grad)
        compared += 1
    assert compared == 5
    for key, value in optimizer.state_dict()["state"].items():
        assert torch.equal(models.whole(value["exp_avg"]), state_before[key])
    optimizer.step()


@pytest.mark.ranks(2)
def test_context_manager_undoes_after_an_error(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_mlp(models.MLP(), mesh)

    def fail_inside() -> None:
        with dp_bridge(model) as inside:
            assert inside is model and is_bridged(model)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()
    assert not is_bridged(model)
    assert isinstance(next(model.parameters()), DTensor)


@pytest.mark.ranks(2)
def test_ties_frozen_integers_and_attributes(ranks: Ranks) -> None:
    # The seed failed on ties and integers, and made frozen parameters trainable.
    mesh = ranks.mesh((2,), ("tp",))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight
            self.codes = nn.Parameter(torch.arange(8), requires_grad=False)
            self.items = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
            self.named = nn.ParameterDict({"scale": nn.Parameter(torch.full((4,), 2.0))})

        def forward(self, x: torch.Tensor) -> Any:
            assert self.a.weight is self.b.weight  # one view per leaf and forward
            y = self.b(self.a(x))
            extra = self.items[0] + self.items[1] * self.named["scale"]
            codes: Any = self.codes.sum()
            return y.sum().full_tensor() + extra.sum().full_tensor() + codes.full_tensor()

    torch.manual_seed(0)
    model = Odd()

    def spread(module: nn.Module) -> None:
        done: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                new = done.setdefault(
                    id(parameter),
                    nn.Parameter(
                        distribute_tensor(parameter.detach(), mesh, [Shard(0)]), requires_grad=parameter.requires_grad
                    ),
                )
                owner.register_parameter(name, new)

    reference = copy.deepcopy(model)
    spread(model)
    pre_dp_module_transform(model)
    plan = bridge_plan(model)
    assert plan.entries[0].names == ("codes",)
    tied = next(entry for entry in plan.entries if len(entry.names) > 1)
    assert tied.names == ("a.weight", "b.weight")
    names = [name for name, _ in model.named_parameters()]
    assert names == ["codes", "a.weight", "items.0", "items.1", "named.scale"]
    assert model.codes.dtype == torch.int64 and not dict(model.named_parameters())["codes"].requires_grad
    x = distribute_tensor(torch.ones(2, 8), mesh, [Replicate()])
    model(x).backward()
    want = functional.linear(functional.linear(torch.ones(2, 8), reference.a.weight), reference.a.weight).sum()
    torch.autograd.backward(want)
    leaf = dict(model.named_parameters())["a.weight"]
    assert leaf.grad is not None and type(leaf.grad) is torch.Tensor
    torch.testing.assert_close(models.whole(model.a.weight.grad), reference.a.weight.grad, atol=1e-5, rtol=0)
    undo_dp_transform(model)
    assert model.a.weight is model.b.weight


@pytest.mark.ranks(2)
def test_users_hooks_see_dtensors_before_under_and_after(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    seen: list[Any] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append((type(grad), tuple(grad.shape)))
        return grad * 2

    def after(parameter: torch.Tensor) -> None:
        seen.append(("after", type(parameter), type(parameter.grad), tuple(parameter.shape)))

    handle = model.up.weight.register_hook(double)
    later = model.up.weight.register_post_accumulate_grad_hook(after)
    x = torch.ones(2, 16)
    model(x).sum().backward()
    plain = models.whole(model.up.weight.grad).clone()
    first = list(seen)
    seen.clear()
    pre_dp_module_transform(model)
    model.zero_grad()
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    assert seen == first * 2
    assert torch.equal(models.whole(model.up.weight.grad), plain)
    handle.remove()
    seen.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert seen == first[1:]
    assert torch.equal(models.whole(model.up.weight.grad) * 2, plain)
    undo_dp_transform(model)
    seen.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert seen == first[1:]
    later.remove()
    seen.clear()
    model(x).sum().backward()
    assert seen == []


@pytest.mark.ranks(2)
def test_hook_on_a_leaf_stops_undo(ranks: Ranks) -> None:
    model = bridged_mlp(ranks)
    handle = dict(model.named_parameters())["up.weight"].register_hook(lambda grad: None)
    with pytest.raises(ValueError, match="hook-on-leaf"):
        undo_dp_transform(model)
    assert is_bridged(model)
    handle.remove()
    undo_dp_transform(model)


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

    wanted = run(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert is_bridged(other) and type(other[0]) is type(model[0])
        assert torch.equal(run(other), wanted)
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
    model = bridged_mlp(ranks)
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
def test_submodules_called_directly_and_writes_in_place(ranks: Ranks) -> None:
    model = bridged_mlp(ranks)
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
    assert float(gradient.mean()) == 6.0
    model.up.weight.grad = None
    assert leaves["up.weight"].grad is None
    with pytest.raises(TypeError, match=r"data of a parameter.* assign a DTensor of that global shape"):
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
def test_a_view_belongs_to_its_grad_mode(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))

        def forward(self) -> tuple[torch.Tensor, ...]:
            first = self.w
            with torch.no_grad():
                quiet = self.w
                quieter = self.w
            again = self.w
            with torch.no_grad():
                next(self.parameters()).add_(1.0)
            changed = self.w
            assert first is again and quiet is quieter and first is not quiet
            assert first.requires_grad and not quiet.requires_grad
            assert changed is not first  # the leaf has another version
            return first, changed

    model: Any = pre_dp_module_transform(Modes())
    _, changed = model()
    assert float(changed.detach().full_tensor().sum()) == 32.0
    changed.sum().backward()
    assert float(next(model.parameters()).grad.sum()) == 8.0
    assert model.w is not model.w  # nothing is kept outside a forward


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
    assert [(entry.names, entry.kind) for entry in bridge_plan(model).entries] == [
        (("w",), "parameter"),
        (("mean",), "buffer"),
        (("secret",), "buffer"),
    ]
    for _ in range(2):
        model()
    buffers = dict(model.named_buffers())
    assert type(buffers["mean"]) is torch.Tensor and buffers["mean"].shape == (2,)
    assert float(buffers["mean"][0]) == 1.5 and float(buffers["secret"][0]) == 3.0
    state = model.state_dict()
    assert list(state) == ["w", "mean"] and state["mean"].shape == (4,)
    with pytest.raises(TypeError, match="mean"):
        model.mean = torch.zeros(4)
    undo_dp_transform(model)
    assert isinstance(model._buffers["mean"], DTensor) and isinstance(model._buffers["secret"], DTensor)
    untouched = pre_dp_module_transform(WithBuffers(), buffers=False)
    assert isinstance(untouched._buffers["mean"], DTensor)


@pytest.mark.ranks(2)
def test_functional_call(ranks: Ranks) -> None:
    model = bridged_mlp(ranks)
    x = torch.ones(2, 16)
    wanted = model(x)
    named = dict(model.named_parameters())
    with torch.no_grad():
        doubled = {name: (parameter * 2).requires_grad_() for name, parameter in named.items()}
    got = torch.func.functional_call(model, doubled, (x,))
    model_doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model_doubled.parameters():
            parameter.mul_(2)
    assert torch.equal(got, model_doubled(x))
    got.sum().backward()
    assert doubled["up.weight"].grad is not None and doubled["up.weight"].grad.shape == (16, 16)
    assert torch.equal(torch.func.functional_call(model, OrderedDict(model.state_dict()), (x,)), wanted)  # DTensors
    with pytest.raises(RuntimeError, match=r"up\.weight"):
        torch.func.functional_call(model, {"up.weight": torch.zeros(32, 16)}, (x,))
    assert torch.equal(model(x), wanted)


@pytest.mark.ranks(2)
def test_an_attribute_error_inside_the_view_is_not_swallowed(ranks: Ranks) -> None:
    # nn.Module.__getattr__ would answer it with the local leaf: a silently wrong shape.
    from tp_ddp_bridge.view import View

    model = bridged_mlp(ranks)

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
    from torch.nn.utils import parametrizations, parametrize

    mesh = ranks.mesh((2,), ("tp",))
    model = bridged_mlp(ranks)
    # The original would become a buffer, or a parameter that DDP has never seen.
    with pytest.raises(RuntimeError, match=r"up\.weight.*before bridging"):
        parametrizations.weight_norm(model.up)
    with pytest.raises(RuntimeError, match=r"up\.weight.*before bridging"):
        parametrize.register_parametrization(model.up, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match=r"up\.weight.*before bridging"), pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.up)
    assert torch.equal(model(torch.ones(1, 16)), bridged_mlp(ranks)(torch.ones(1, 16)))
    assert not parametrize.is_parametrized(model.up)

    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    # Registered before the bridge it works: the original is an ordinary DTensor parameter.
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh)
    parametrize.register_parametrization(model.up, "weight", Double())
    wanted = model(torch.ones(2, 16))
    pre_dp_module_transform(model)
    got = model(torch.ones(2, 16))
    assert torch.equal(got, wanted)
    got.sum().backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert "up.parametrizations.weight.original" in names and len(names) == 6


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
    model = LoRA(bridged_mlp(ranks))
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


@pytest.mark.ranks(2)
def test_a_step_between_forward_and_backward_raises(ranks: Ranks) -> None:
    # Without the bridge autograd notices; a view has a version counter of its own.
    model = bridged_mlp(ranks)
    out = model(torch.ones(2, 16)).sum()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("head"):  # of plain ones autograd notices
                parameter.add_(1.0)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        out.backward()


@pytest.mark.ranks(2)
def test_two_losses_of_one_forward_and_second_derivatives(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1, mesh, [Shard(0)]))

        def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
            w: Any = self.w
            again: Any = self.w
            return (w**2).sum().full_tensor(), (again * 3.0).sum().full_tensor()

    model = pre_dp_module_transform(Two())
    first, second = model()
    first.backward()
    second.backward()  # the view they share is still there
    leaf = dict(model.named_parameters())["w"]
    expected = models.whole(model.w) * 2 + 3
    assert torch.equal(models.whole(model.w.grad), expected)
    (gradient,) = torch.autograd.grad(model()[0] * 1.0, leaf, create_graph=True)
    (twice,) = torch.autograd.grad(gradient.sum(), leaf)
    assert torch.equal(twice, torch.full_like(leaf, 2.0))


@pytest.mark.ranks(2)
def test_hooks_registered_through_an_attribute(ranks: Ranks) -> None:
    # On the view itself they would vanish with it, silently.
    model = bridged_mlp(ranks)
    seen: list[Any] = []
    first = model.up.weight.register_hook(lambda grad: seen.append(type(grad)))
    second = model.up.weight.register_hook(lambda grad: grad * 0)
    later = model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.full_tensor().sum())))
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
    assert seen == [DTensor, 0.0] * 2
    for handle in (first, second, later):
        handle.remove()
    model(torch.ones(2, 16)).sum().backward()
    assert len(seen) == 4 and float(model.up.weight.grad.full_tensor().abs().sum()) > 0
    undo_dp_transform(model)
