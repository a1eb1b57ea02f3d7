"""Views in a forward: one per leaf, none kept or leaked, compiled without a break."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from ranktest import warm_up_compiler as before_ranks  # noqa: F401  # ranktest calls it
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tp_ddp_bridge import clip_grad_norm_, pre_dp_module_transform, wrap_ddp
from tp_ddp_bridge.module.view import _forward


class Region(nn.Module):
    """Reads one parameter outside and inside of checkpointed regions."""

    def __init__(self, mesh: Any, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.w = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1, mesh, [Shard(0)]))
        self.views: list[tuple[str, Any]] = []

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.views.append(("in", self.w))
        self.views.append(("in again", self.w))
        return torch.sin(x * self.w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.views.append(("before", self.w))
        x = x * self.w
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        self.views.append(("after", self.w))
        return (x * self.w).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_views_do_not_cross_a_checkpointed_region(ranks: Ranks, kind: str) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    reference = (torch.arange(4.0) + 1).requires_grad_()
    y = torch.ones(4) * reference
    for _ in range(2):
        y = torch.sin(y * reference)
    torch.autograd.backward((y * reference).sum())
    model = pre_dp_module_transform(Region(mesh, kind == "reentrant"))
    for _ in range(2):
        model.views.clear()
        model.zero_grad()
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        loss = model(x)
        views = dict(enumerate(model.views))
        before, first, first_again, second, _, after = (views[index][1] for index in range(6))
        assert before is after and first is first_again
        assert first is not before and second is not before
        if kind == "non_reentrant":
            assert second is not first
        assert not _forward.views
        loss.full_tensor().backward()
        assert len(model.views) == 6 + 4  # recomputed
        torch.testing.assert_close(models.whole(model.w.grad), reference.grad, atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_an_exception_leaves_nothing_behind(ranks: Ranks) -> None:
    model = pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), ranks.mesh((2,), ("tp",))))
    expected = model(torch.ones(1, 16))

    def fail(*args: Any) -> None:
        raise KeyError("mine")

    handle = model.down.register_forward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 16))
    handle.remove()
    assert not _forward.views
    assert len(list(model.parameters())) == 6
    assert torch.equal(model(torch.ones(1, 16)), expected)


@pytest.mark.ranks(2)
def test_a_hundred_steps_leak_nothing(ranks: Ranks) -> None:
    # The seed added one hook per parameter and step.
    mesh = ranks.mesh((1, 2), ("dp", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9)
    task = models.vectors()

    def hooks() -> int:
        return sum(
            len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
            for parameter in ddp.parameters()
        ) + sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in ddp.modules())

    def live() -> tuple[int, int, int]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]  # noqa: TID251
        return hooks(), sum(isinstance(tensor, DTensor) for tensor in tensors), len(tensors)

    def train(steps: int) -> None:
        for _ in range(steps // 5):
            for step in range(5):
                x, y = task.part(step, mesh["dp"].get_local_rank(), 2)
                optimizer.zero_grad()
                torch.autograd.backward(task.loss(ddp(x), y))
                clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
            ddp.state_dict()

    def least(seconds: float = 1.0) -> tuple[int, int, int]:
        """Gloo's threads let go of the last bucket late. Returns the least count meanwhile."""
        num_live, deadline = live(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.02)
            num_live = min(num_live, live())
        return num_live

    train(10)
    start = least()
    train(90)
    assert least() == start
    assert start[1] == 0  # no DTensor outlives its forward


@pytest.mark.ranks(2)
def test_compiles_without_a_break(ranks: Ranks) -> None:
    # The seed crashed; the private autograd function that makes DTensors breaks the graph 10 to 13 times.
    mesh = ranks.mesh((2,), ("tp",))
    torch.compiler.reset()
    eager = pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh))
    model = pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(eager.parameters(), 0.1)
    for count in range(5):
        # fullgraph: one graph or an error; the stance: no other one in the steps after the first, or an error
        with torch.compiler.set_stance("fail_on_recompile") if count else nullcontext():
            for run, optimizer in ((compiled, mine), (eager, theirs)):
                optimizer.zero_grad()
                run(x).pow(2).sum().backward()
                optimizer.step()
    models.assert_same_state(
        model.state_dict(), {n: models.whole(v) for n, v in eager.state_dict().items()}, count=6, atol=1e-6
    )


@pytest.mark.ranks(2)
def test_fields_of_a_view_and_reading_it_in_other_threads(ranks: Ranks) -> None:
    import threading

    mesh = ranks.mesh((2,), ("tp",))
    model = pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh))
    views: list[Any] = []

    def read() -> None:
        with torch.no_grad():
            views.append(model.up.weight)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    view = views[0]
    assert view.device_mesh == mesh and view.placements == (Shard(0),) and tuple(view.stride()) == (16, 1)
    full = distribute_tensor(view.full_tensor(), mesh, [Replicate()])
    assert torch.equal(full.to_local(), models.seeded(models.MLP).up.weight)


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
            reread = self.w
            with torch.no_grad():
                next(self.parameters()).add_(1.0)
            changed = self.w
            assert first is reread and quiet is quieter and first is not quiet
            assert first.requires_grad and not quiet.requires_grad
            assert changed is not first  # the leaf has another version
            return first, changed

    model: Any = pre_dp_module_transform(Modes())
    _, changed = model()
    assert float(changed.detach().full_tensor().sum()) == 32.0
    changed.sum().backward()
    assert float(next(model.parameters()).grad.detach().sum()) == 8.0
    assert model.w is not model.w  # nothing is kept outside a forward


@pytest.mark.ranks(2)
def test_a_step_between_forward_and_backward_raises(ranks: Ranks) -> None:
    # Without the bridge autograd notices; a view has a version counter of its own.
    model = models.bridged_mlp(ranks)
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
            reread: Any = self.w
            return (w**2).sum().full_tensor(), (reread * 3.0).sum().full_tensor()

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
