"""Optimizers before and after the bridge."""

from __future__ import annotations

from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch.distributed.tensor import DTensor
from tp_ddp_bridge import PlanError, check_optimizer, pre_dp_module_transform, undo_dp_transform, wrap_ddp


def sharded(ranks: Ranks, seed: int = 0) -> Any:
    mesh = ranks.mesh((2,), ("tp",))
    return models.parallelize_mlp(models.seeded(models.MLP, seed), mesh)


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 32).view(2, 16)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad"])
def test_repointed_in_the_middle_of_training(ranks: Ranks, kind: str) -> None:
    make: Any = {
        "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    }[kind]
    model, twin = sharded(ranks), models.seeded(models.MLP)
    optimizer, reference = make(model.parameters()), make(twin.parameters())
    steps(model, optimizer)
    steps(twin, reference)
    groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    pre_dp_module_transform(model, optimizers=[optimizer])
    assert optimizer.param_groups is groups and all(a["params"] is b for a, b in zip(groups, lists, strict=True))
    assert check_optimizer(model, optimizer) == 6
    steps(model, optimizer)
    steps(twin, reference)
    undo_dp_transform(model, optimizers=[optimizer])
    assert isinstance(optimizer.param_groups[0]["params"][0], DTensor)
    steps(model, optimizer)
    steps(twin, reference)
    models.assert_same_state(model.state_dict(), twin.state_dict(), count=6, atol=5e-6)  # 6 steps, SGD's are large
    compared = 0
    for mine, theirs in zip(optimizer.state.values(), reference.state.values(), strict=True):
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(models.whole(mine[key]), value, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared >= 6


@pytest.mark.ranks(2)
def test_a_forgotten_optimizer_raises_instead_of_standing_still(ranks: Ranks) -> None:
    # The seed: an optimizer built before the transform moved tensor-parallel weights by 0.0.
    model = sharded(ranks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight = model.up.weight
    pre_dp_module_transform(model)
    model(torch.ones(2, 16)).sum().backward()
    for act in (optimizer.step, optimizer.zero_grad, lambda: weight.grad):
        with pytest.raises(PlanError, match=r"parameter-replaced\] up\.weight.*optimizers="):
            act()
    assert weight.shape == (32, 16)  # its values can still be read
    with pytest.raises(ValueError, match="parameter-replaced") as caught:
        check_optimizer(model, optimizer)
    codes = [problem.code for problem in caught.value.problems]  # type: ignore[attr-defined]
    assert codes == ["parameter-replaced"] * 4 + ["not-in-optimizer"] * 4
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    pre_dp_module_transform(model, optimizers=optimizer)  # it is not too late
    assert check_optimizer(model, optimizer) == 6
    optimizer.step()
    assert sum(not torch.equal(before[name], p) for name, p in model.named_parameters()) == 6
    leaf = dict(model.named_parameters())["up.weight"]
    undo_dp_transform(model)
    with pytest.raises(PlanError, match=r"parameter-replaced\] up\.weight.*undo_dp_transform"):
        optimizer.step()
    with pytest.raises(PlanError, match=r"up\.weight"):
        leaf.grad
    undo_dp_transform(model, optimizers=optimizer)
    steps(model, optimizer)


@pytest.mark.ranks(2)
def test_an_optimizer_of_a_part(ranks: Ranks) -> None:
    # The seed: an optimizer built after a forward got 2 of 6 parameters, and frozen ones became trainable.
    model = sharded(ranks)
    model.up.weight.requires_grad_(False)
    pre_dp_module_transform(model)
    model(torch.ones(1, 16))
    assert check_optimizer(model, torch.optim.SGD(model.parameters(), 0.1)) == 5
    with pytest.raises(ValueError, match=r"not-in-optimizer.*head\.bias"):
        check_optimizer(model, torch.optim.SGD([p for n, p in model.named_parameters() if n != "head.bias"], 0.1))
    assert not dict(model.named_parameters())["up.weight"].requires_grad
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.SGD([model.up.bias], 0.1)


@pytest.mark.ranks(4)
def test_zero_is_refused_by_name(ranks: Ranks) -> None:
    from bridge_cells import zero_optimizer

    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    group = mesh["dp"].get_group()
    optimizer = zero_optimizer(model.head.parameters(), process_group=group)
    wrap_ddp(model, mesh=mesh, optimizers=optimizer)  # it holds none of the replaced ones
    leaves = zero_optimizer(model.parameters(), process_group=group)
    with pytest.raises(ValueError, match="unsupported-wrapper"):
        undo_dp_transform(model, optimizers=leaves)


@pytest.mark.ranks(2)
def test_schedulers_and_scalers_go_on(ranks: Ranks) -> None:
    model = sharded(ranks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pre_dp_module_transform(model, optimizers=optimizer)
    steps(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    steps(model, optimizer, 1)
