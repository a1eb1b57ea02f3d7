"""An optimizer to its callers: groups, learning rates, schedulers, closures, hooks, a second optimizer beside it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, WholeMatrices
from torch.distributed.tensor import Shard
from whole_models import SIZES, mesh_of, of_mesh


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.ranks(2, 3)
def test_groups_schedulers_clipping_and_late_groups(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((ranks.world_size,)), [Shard(0)], SIZES)
    late, names = "f", [name for name in SIZES if name != "f"]
    parts: list[tuple[list[str], dict[str, float]]] = [(names[:2], {"lr": 0.05}), (names[2:], {"weight_decay": 0.3})]

    def groups(named: dict[str, Any], pairs: bool) -> list[dict[str, Any]]:
        return [{"params": [(n, named[n]) if pairs else named[n] for n in own], **given} for own, given in parts]

    optimizer = WholeMatrices(groups(twin.named, True), _muon, bucket_bytes=100)
    one = _muon(groups(twin.reference, False))
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(own) for own, _ in parts]
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=[0.1, 0.2], total_steps=20, cycle_momentum=False)
        for each in (optimizer, one)
    ]
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": [(late, twin.named[late])], "lr": 0.5})
            one.add_param_group({"params": [twin.reference[late]], "lr": 0.5})
            for scheduler in schedulers:
                scheduler.optimizer.param_groups[-1] |= {"max_lr": 0.3, "initial_lr": 0.1, "min_lr": 0.01}
                scheduler.base_lrs.append(0.1)
        twin.backward(step, [] if step >= 2 else [late])
        # torch's own clipping, which reads the gradients of the groups' parameters.
        norms = [
            torch.nn.utils.clip_grad_norm_([p for group in each.param_groups for p in group["params"]], 1e9)
            for each in (optimizer, one)
        ]
        own: Any = norms[0]
        torch.testing.assert_close(own.full_tensor(), norms[1])
        optimizer.step()
        one.step()
        assert twin.compared() > 0
        for scheduler in schedulers:
            scheduler.step()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in one.param_groups]
    with pytest.raises(PlanError, match=r"duplicate-name\] a: it is in a group already"):
        optimizer.add_param_group({"params": [("a", twin.named["a"])]})
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in twin.named.values())


@pytest.mark.ranks(2)
def test_muon_for_matrices_and_adamw_beside_it(ranks: Ranks) -> None:
    sizes = {"layers.0.w": (9, 8), "layers.1.w": (6, 4), "head.weight": (8, 5), "head.bias": (7,), "norm": (5,)}
    for beside in ("in shards", "on owners"):
        twin = of_mesh(mesh_of((2,)), [Shard(0)], sizes)
        make: dict[str, Any] = {"layers.*": _muon}
        if beside == "on owners":
            make["*"] = _adamw
        optimizer = WholeMatrices(twin.named, make, in_shards=_adamw if beside == "in shards" else None)
        one = _muon([twin.reference[name] for name in list(sizes)[:2]])
        other = _adamw([twin.reference[name] for name in list(sizes)[2:]])
        for step in range(5):
            for group, lr in zip(optimizer.param_groups, (0.01 * (step + 1), 0.03), strict=True):
                group["lr"] = lr
            one.param_groups[0]["lr"], other.param_groups[0]["lr"] = 0.01 * (step + 1), 0.03
            twin.backward(step)
            optimizer.step()
            one.step()
            other.step()
            assert twin.compared() > 0
        assert len(optimizer.plan.matrices) == (2 if beside == "in shards" else 5)
        if beside == "in shards":  # a late group of such parameters alone
            late = of_mesh(mesh_of((2,)), [Shard(0)], {"tail": (5, 3)})
            optimizer.add_param_group({"params": late.named.items(), "lr": 0.03})
            tail = _adamw([{"params": list(late.reference.values()), "lr": 0.03}])
            for step in range(5):
                late.backward(step)
                optimizer.zero_grad()
                late.backward(step)
                optimizer.step()
                tail.step()
                assert late.compared() > 0
    twin = of_mesh(mesh_of((2,)), [Shard(0)], sizes)
    with pytest.raises(PlanError, match=r"head.weight: no pattern of make= matches it"):
        WholeMatrices(twin.named, {"layers.*": _muon})
    with pytest.raises(PlanError, match=r"unmatched-pattern\] make\['blocks"):
        WholeMatrices(twin.named, {"layers.*": _muon, "blocks.*": _muon, "*": _adamw})
    with pytest.raises(PlanError, match=r"not-elementwise\] optimizer: Muon"):
        WholeMatrices({n: p for n, p in twin.named.items() if p.dim() == 2}, {"layers.*": _muon}, in_shards=_muon)
    with pytest.raises(PlanError, match=r"conflicting-arguments\] in_shards"):
        WholeMatrices(twin.named, _adamw, in_shards=_adamw)
    with pytest.raises(PlanError, match=r"rank-failed.*Muon only supports 2D"):
        WholeMatrices(twin.named, _muon)


@pytest.mark.ranks(2)
def test_closures_hooks_and_copies(ranks: Ranks) -> None:
    twin = of_mesh(mesh_of((2,)), [Shard(0)], {"w": (9, 8)})
    optimizer, one = WholeMatrices(twin.named, _adamw), _adamw(list(twin.reference.values()))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(5):

        def closure(step: int = step) -> float:
            assert torch.is_grad_enabled()
            twin.backward(step)
            return float(step)

        assert optimizer.step(closure) == float(step)
        one.step()
        assert twin.compared() > 0
    assert calls == ["before", "after"] * 5
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(str(state["note"])))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls[10:] == ["state", "3", "loaded"]
    assert optimizer.state  # else torch's get_optimizer_state_dict would take a step on zeros
    shared = twin.named["w"].detach()
    with pytest.raises(PlanError, match=r"tied-weights\] w: the memory of u"):
        WholeMatrices({"w": torch.nn.Parameter(shared), "u": torch.nn.Parameter(shared)}, _adamw)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="WholeMatrices belongs to a process group"):
            attempt(optimizer)
    with pytest.raises(PlanError, match=r"wrong-type\] named_parameters"):
        WholeMatrices(list(twin.named.values()), _adamw)
    with pytest.raises(PlanError, match=r"missing-argument\] named_parameters"):
        WholeMatrices([], _adamw)
