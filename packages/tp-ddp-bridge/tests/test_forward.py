"""Inside a forward: one view per leaf, nothing kept, nothing leaked, and compiled without a break."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import bridge_models as models
import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tp_ddp_bridge import clip_grad_norm_, pre_dp_module_transform, wrap_ddp
from tp_ddp_bridge.cache import live_views


class Region(nn.Module):
    """Reads one parameter outside and inside of checkpointed regions."""

    def __init__(self, mesh: Any, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.w = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1, mesh, [Shard(0)]))
        self.seen: list[tuple[str, Any]] = []

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(("in", self.w))
        self.seen.append(("in again", self.w))
        return torch.sin(x * self.w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(("before", self.w))
        x = x * self.w
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        self.seen.append(("after", self.w))
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
        model.seen.clear()
        model.zero_grad()
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        loss = model(x)
        seen = dict(enumerate(model.seen))
        before, first, first_again, second, _, after = (seen[index][1] for index in range(6))
        assert before is after and first is first_again
        assert first is not before and second is not before
        if kind == "non_reentrant":
            assert second is not first
        assert live_views() == 0
        loss.full_tensor().backward()
        assert len(model.seen) == 6 + 4  # recomputed
        torch.testing.assert_close(models.whole(model.w.grad), reference.grad, atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_an_exception_leaves_nothing_behind(ranks: Ranks) -> None:
    model = pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), ranks.mesh((2,), ("tp",))))
    wanted = model(torch.ones(1, 16))

    def fail(*args: Any) -> None:
        raise KeyError("mine")

    handle = model.down.register_forward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 16))
    handle.remove()
    assert live_views() == 0
    assert len(list(model.parameters())) == 6
    assert torch.equal(model(torch.ones(1, 16)), wanted)


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
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
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
        """Gloo's threads let go of the last bucket late: the least of what is seen meanwhile."""
        found, deadline = live(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.02)
            found = min(found, live())
        return found

    train(10)
    start = least()
    train(90)
    assert least() == start
    assert start[1] == 4  # a spare view of each sharded leaf


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
    got: list[Any] = []

    def read() -> None:
        with torch.no_grad():
            got.append(model.up.weight)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    view = got[0]
    assert view.device_mesh == mesh and view.placements == (Shard(0),) and tuple(view.stride()) == (16, 1)
    whole = distribute_tensor(view.full_tensor(), mesh, [Replicate()])
    assert torch.equal(whole.to_local(), models.seeded(models.MLP).up.weight)


@pytest.mark.ranks(2)
def test_a_spare_view_is_as_good_as_a_new_one_or_not_used(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1, mesh, [Shard(0)]))
            self.kept: list[Any] = []
            self.act: Any = None

        def forward(self, x: Any) -> Any:
            view: Any = self.w
            self.kept.append(id(view))
            if self.act is not None:
                self.act(view)
            return (x * view).sum().full_tensor()

    def same_as_before(model: Any) -> bool:
        """Whether this forward took up the view of the one before."""
        model(x).backward()
        return bool(model.kept[-1] == model.kept[-2])

    model: Any = pre_dp_module_transform(Keeper())
    leaf = next(model.parameters())
    x: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    model(x).backward()
    assert same_as_before(model)
    with torch.no_grad():
        leaf.mul_(2.0)  # an optimizer step: the view shows it
    leaf.grad = None
    assert same_as_before(model) and float(leaf.grad.sum()) == 2.0
    assert float(x.grad.full_tensor()[3]) == 4.0 * 2 + 8.0
    graph = model(x)  # a graph that is still to be run
    held = model.w  # outside a forward: another one
    assert id(held) != model.kept[-1]
    another = model(x)
    assert model.kept[-1] != model.kept[-2]
    (graph + another).backward()
    del graph, another
    mine: list[Any] = []
    model.act = mine.append  # the module keeps it
    model(x).backward()
    model.act = None
    assert not same_as_before(model)
    model.act = lambda view: view.register_hook(lambda grad: grad * 100)
    model(x).backward()
    model.act = None
    leaf.grad = None
    model(x).backward()
    assert float(leaf.grad.sum()) == 2.0  # the hook of that forward is gone
    model.to(torch.float64)
    assert not same_as_before(model) or model.w.dtype == torch.float64
    leaf.grad = None
    with torch.no_grad():
        leaf.data = torch.full((2,), 7.0, dtype=torch.float64)  # other memory under the leaf
    assert float(model(x.detach().double()).detach()) == 28.0
    stale = model(x)
    with torch.no_grad():
        leaf.add_(1.0)
    model(x)  # takes no view from under the graph that is still to be run
    with pytest.raises(RuntimeError, match="between forward and backward"):
        stale.backward()
