"""Optimizers on shards: torch's elementwise ones and declared ones step, all others are refused."""

from __future__ import annotations

from typing import Any

import bridge_models as models
import pytest
import torch
from bridge_cells import zero_optimizer
from ranktest import Ranks
from torch.distributed.tensor import DTensor
from tp_ddp_bridge import PlanError, check_optimizer, clip_grad_norm_, pre_dp_module_transform, wrap_ddp


def sharded(ranks: Ranks) -> Any:
    mesh = ranks.mesh((2,), ("tp",))
    return models.parallelize_mlp(models.seeded(models.MLP), mesh)


@pytest.mark.ranks(2)
def test_optimizers_that_need_whole_matrices(ranks: Ranks) -> None:
    model = sharded(ranks)
    optimizers = [torch.optim.LBFGS(model.parameters()), torch.optim.Adafactor(model.parameters())]
    if hasattr(torch.optim, "Muon"):
        optimizers.append(torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]))
    parameters = [list(o.param_groups[0]["params"]) for o in optimizers]
    with pytest.raises(ValueError, match="not-elementwise") as caught:
        pre_dp_module_transform(model, optimizers=optimizers)
    assert len(caught.value.problems) == len(optimizers)  # type: ignore[attr-defined]
    assert all(
        a is b
        for o, originals in zip(optimizers, parameters, strict=True)
        for a, b in zip(o.param_groups[0]["params"], originals, strict=True)
    )
    assert isinstance(next(model.parameters()), DTensor)  # nothing was changed
    pre_dp_module_transform(model)
    with pytest.raises(ValueError, match="not-elementwise"):
        check_optimizer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="Optimizer"):
        pre_dp_module_transform(model, optimizers=[model])


class TrustRatio(torch.optim.Optimizer):
    """LAMB's way: an update as long as the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad * p.norm() / p.grad.norm()


class LatePreconditioner(TrustRatio):
    """Elementwise for the first ten steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                scale = p.grad.norm() if state["step"] > 10 else 1.0
                p -= group["lr"] * p.grad / scale


class ScaledAdam(torch.optim.Adam):
    """Torch's Adam after a trust ratio of its own: a step of its own makes it another optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm() / p.grad.norm())
        super().step(closure)


class BlockwisePreconditioner(TrustRatio):
    """The mean of each block of 8 rows: on a small tensor, of one block, its halves agree with the full one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                scale = p.grad.abs().mean() if len(p) > 8 else 1.0
                p -= group["lr"] * p.grad / scale


class NeedsClosure(TrustRatio):
    """A sharpness-aware optimizer: its closure runs twice, first to move by the norm of everything."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        (p,) = self.param_groups[0]["params"][:1]
        p -= self.param_groups[0]["lr"] * p.grad / (1 + p.grad.norm())


class Odd(TrustRatio):
    """A constructor that no one else can call."""

    def __init__(self, params: Any, model: Any) -> None:
        assert isinstance(model, torch.nn.Module)
        super().__init__(params)


class Lion(TrustRatio):
    """Elementwise, not of torch, and says so."""

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p -= group["lr"] * (m * 0.9 + grad * 0.1).sign()
                m.mul_(0.99).add_(grad, alpha=0.01)


@pytest.mark.ranks(2)
def test_full_matrix_optimizers_raise_at_their_first_step(ranks: Ranks) -> None:
    model = pre_dp_module_transform(sharded(ranks))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    wrong: dict[str, Any] = {
        "LBFGS": torch.optim.LBFGS(model.parameters()),
        "Adafactor": torch.optim.Adafactor(model.parameters()),
        "trust ratio": TrustRatio(model.parameters()),
        "late": LatePreconditioner(model.parameters()),
        "blockwise": BlockwisePreconditioner(model.parameters()),
        "Adam with a step of its own": ScaledAdam(model.parameters()),
        "closure": NeedsClosure(model.parameters()),
        "odd": Odd(model.parameters(), model=model),
        "warmup": TrustRatio(model.parameters(), lr=0.0),
    }
    if hasattr(torch.optim, "Muon"):
        wrong["Muon"] = torch.optim.Muon(matrices)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, optimizer in wrong.items():
        for _ in range(2):
            with pytest.raises(PlanError, match=r"not-elementwise"):
                optimizer.step(lambda: 0.0)
        assert all(torch.equal(before[key], p) for key, p in model.named_parameters()), name
        assert not optimizer.state, name
    optimizer = Odd(model.parameters(), model=model)
    optimizer.is_elementwise = True  # type: ignore[attr-defined]  # the user's word
    optimizer.step()
    assert sum(not torch.equal(before[key], p) for key, p in model.named_parameters()) == 6


@pytest.mark.ranks(2)
def test_elementwise_optimizers_step_and_draw_nothing(ranks: Ranks) -> None:
    model = pre_dp_module_transform(sharded(ranks))
    optim = torch.optim
    kinds: list[tuple[Any, dict[str, Any]]] = [
        *((kind, {}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax)),
        *((kind, {}) for kind in (optim.NAdam, optim.RAdam, optim.RMSprop, optim.ASGD, optim.Rprop, Lion)),
        (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
        (optim.AdamW, {"fused": True}),
        (optim.Adam, {"amsgrad": True, "maximize": True, "lr": torch.tensor(1e-3)}),
    ]
    stepped = 0
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for kind, settings in kinds:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer = kind(model.parameters(), **settings)
            random = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(random, torch.get_rng_state())
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
            optimizer.step()  # tried again, with the new group
            stepped += 1
    assert stepped == 2 * 15


@pytest.mark.ranks(2)
def test_optimizers_on_dtensors_and_on_replicated_parameters_are_not_tried(ranks: Ranks) -> None:
    pre_dp_module_transform(sharded(ranks))
    model = sharded(ranks)  # DTensors: what looks at full matrices sees them
    x = torch.ones(2, 16)
    model(x).sum().backward()
    TrustRatio(list(model.parameters())).step()
    bridged = pre_dp_module_transform(sharded(ranks))
    bridged(x).sum().backward()
    TrustRatio(bridged.head.parameters()).step()
    TrustRatio([torch.nn.Parameter(torch.ones(2))]).step()


@pytest.mark.ranks(4)
def test_zero_over_tensor_parallel_ranks_raises_at_its_first_step(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    ddp(torch.ones(2, 16)).sum().backward()
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    with pytest.raises(PlanError, match="mesh-mismatch"):
        zero_optimizer(ddp.parameters()).step()
    assert all(map(torch.equal, before, ddp.parameters()))
    zero_optimizer(ddp.parameters(), process_group=ddp.process_group).step()
    assert not any(map(torch.equal, before, ddp.parameters()))


@pytest.mark.ranks(4)
def test_gradients_that_are_scaled_by_one_ranks_shards_raise_at_the_step(ranks: Ranks) -> None:
    # Replicated weights of tensor-parallel ranks would drift apart.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))

    def by_hand(parameters: Any, limit: float) -> None:
        gradients = [parameter.grad.detach() for parameter in parameters]  # what it reads so, it reads as shards
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, limit / float(norm)))

    ways: list[Any] = [(by_hand, 0.01, True), (by_hand, 1e6, False), (clip_grad_norm_, 0.01, False)]
    for clip, limit, is_refused in ways:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model = models.parallelize_mlp(models.seeded(models.MLP).to(dtype), mesh["tp"])
            ddp = wrap_ddp(model, mesh=mesh)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            steps = 0
            for step in range(5):
                x, y = models.vectors(dtype=dtype).part(step, mesh["dp"].get_local_rank(), 2)
                optimizer.zero_grad()
                torch.autograd.backward(torch.nn.functional.mse_loss(ddp(x), y))
                clip(ddp.parameters(), limit)
                if is_refused:
                    with pytest.raises(PlanError, match="gradients-differ"):
                        optimizer.step()
                    break
                optimizer.step()
                steps += 1
            assert steps == (0 if is_refused else 5)
