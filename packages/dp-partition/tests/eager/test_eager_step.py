"""Steps that run eagerly with replicated parameters, against one process on all ranks' rows."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import dp_models as models
import dp_partition as dp
import pytest
import torch
import torch.distributed as dist
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition import PlanError
from dp_partition._shared.consensus import tensor_hashes
from dp_partition.eager.step import EagerStep
from dp_partition.plan.plan import CommConfig, Settings
from dp_step_patterns import PATTERNS, WIDTH, Bag, mlp, mse_step
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

CALLS = 7
# Patterns that FSDP2 cannot hold, at least in part.
FULL = {
    "adafactor",  # rows' means
    "average_made_by_the_first_call",
    "average_of_weights",  # plain tensors beside the model
    "backward_of_inputs",
    "gradient_hook_and_saving",
    "gradient_penalty",
    "gradients_of_samples",
    "lbfgs",
    "module_inside_itself",
    "sam",
    "sparse_embedding",
    "tied_and_complex",  # a parameter of no module
    "torchscript_inside",
}


class AsOnGPU(EagerStep):
    """Flags of gradients go beside them, over the CPU, as in groups for CPU and GPU."""

    def start(self, *arguments: Any) -> None:
        super().start(*arguments)
        assert self.reducer is not None
        self.reducer._flags_apart = True


WAYS = [EagerStep, AsOnGPU]


def _eager(step: Any, *, is_sharded: bool = False, way: type[EagerStep] = EagerStep) -> EagerStep:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    style = dp.DataParallelStyle.FULLY_SHARD if is_sharded else dp.DataParallelStyle.REPLICATE
    return way((step,), mesh, "step", Settings(style, comm=CommConfig(1 << 10)))


def _batch(call: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(call)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("names", [list(PATTERNS)[part::6] for part in range(6)], ids=lambda names: ", ".join(names))
def test_a_step_trains_as_in_one_process(ranks: Ranks, names: list[str]) -> None:
    """Several patterns in each process, each in three ways, or in two in turn, beside one process on all rows."""
    rank, rows, compared = dist.get_rank(), 4, 0
    warnings.simplefilter("ignore")
    for name in names:
        torch.manual_seed(1)
        reference, expected = PATTERNS[name]()
        before = [value.detach().clone() for value in expected()]
        for call in range(CALLS):
            reference(*_batch(call, 2 * rows))
        as_on_gpu = ["replicate as on a GPU"] if names.index(name) % 2 == 0 else []
        for style in ("replicate", *as_on_gpu, "fully_shard"):
            copies = name == "average_of_weights"  # plain tensors, made before rank 0's values are taken
            torch.manual_seed(1 if copies else 1 + rank)
            step, trained = PATTERNS[name]()
            eager = _eager(step, is_sharded=style == "fully_shard", way=AsOnGPU if "GPU" in style else EagerStep)
            with ranks.record() as log:
                for call in range(CALLS):
                    x, y = _batch(call, 2 * rows)
                    eager((x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows]), {})
            assert "all_reduce" in log.ops
            assert eager.num_compared == 3, (name, style)
            if style == "fully_shard":
                sharded = [p for p in eager.parameters.values() if isinstance(p, DTensor)]
                assert (len(sharded) == len(eager.parameters)) == (name not in FULL), (name, eager.explain())
            eager.release()
            for got, want, start in zip(trained(), expected(), before, strict=True):
                full = got.full_tensor() if isinstance(got, DTensor) else got
                text = f"{name} {style}"
                torch.testing.assert_close(full.detach(), want.detach(), rtol=1e-9, atol=1e-11, msg=text)
                assert not torch.equal(want, start), f"{text}: a value never changed, nothing was compared there"
                compared += 1
    assert compared >= 3 * len(names)  # several values of each


class Residual(nn.Module):
    """A model with a forward of its own: the compiler leaves out frames of torch's containers after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return cast(torch.Tensor, self.last(x + torch.tanh(self.inner(x))))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_compiled_model(ranks: Ranks, style: Any) -> None:
    """A model under `torch.compile` is sharded as the model itself is, and runs compiled."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch.manual_seed(1)
    model, rows, rank = Residual().double(), 4, dist.get_rank()
    one = copy.deepcopy(model)
    reference = mse_step(one, torch.optim.AdamW(one.parameters(), lr=0.1))
    optimizer, compiled = torch.optim.AdamW(model.parameters(), lr=0.1), torch.compile(model, backend=backend)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
        return mse_step(model, optimizer)(x, y)

    step = dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(CALLS):
            x, y = _batch(call, 2 * rows)
            reference(x, y)
            mine = slice(rank * rows, (rank + 1) * rows)
            step(compiled, optimizer, x[mine], y[mine])
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert len(sharded) == (6 if style == "fully_shard" else 0), step.plan.explain()
    assert f"{2 + len(sharded) // 6} calls of train checked" in step.plan.explain()
    assert sum(graph.count("linear") for graph in graphs) >= 3, "nothing ran compiled"
    step.release()
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


class Recurrent(nn.Module):
    """A GRU whose weights move as cuDNN's do, for each call or only when one is another object."""

    class Moving(nn.GRU):
        def flatten_parameters(self) -> None:
            for weight in self.parameters():
                weight.data = weight.data.clone()  # leaves the version as it is

    def __init__(self, in_each_call: bool) -> None:
        super().__init__()
        self.gru, self.out, self.in_each_call = self.Moving(5, 7, bidirectional=True), nn.Linear(14, 3), in_each_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_each_call:
            self.gru.flatten_parameters()
        hidden: torch.Tensor = self.gru(x)[0]
        return cast(torch.Tensor, self.out(hidden))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_each_call", [False, True])
def test_recurrent_weights_that_move(ranks: Ranks, in_each_call: bool) -> None:
    """A weight moved by a forward is stale in the next call: it stays full, or it does not move."""
    torch.manual_seed(0)
    model, mesh = Recurrent(in_each_call).double(), ranks.mesh((2,), ("dp",))
    other, one = copy.deepcopy(model), copy.deepcopy(model)
    step = mse_step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    reference = mse_step(one, torch.optim.AdamW(one.parameters(), lr=0.1))
    eager = _eager(step, is_sharded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(CALLS):
            generator = torch.Generator().manual_seed(call)
            x, y = (torch.randn(4, 4, n, generator=generator, dtype=torch.float64) for n in (5, 3))
            mine = slice(2 * ranks.rank, 2 * ranks.rank + 2)
            reference(x, y)
            eager((x[:, mine], y[:, mine]), {})
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        assert len(sharded) == (2 if in_each_call else 10), eager.explain()
        assert ("a forward writes it or puts other memory in its place" in eager.explain()) == in_each_call
        eager.release()
        for got, want in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        again = mse_step(other, torch.optim.AdamW(other.parameters(), lr=0.1))
        unseen = dp.distribute(again, mesh=mesh, style="fully_shard", observe=False)
        if in_each_call:
            with pytest.raises(dp.PlanError, match=r"parameter-replaced.*moves a gathered"):
                unseen(x[:, mine], y[:, mine])
        else:
            unseen(x[:, mine], y[:, mine])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", [dp.distribute, dp.compile])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_under_another_default_device(ranks: Ranks, style: Any, door: Any) -> None:
    """Tensors of the library's own lie where they belong, whatever `torch.set_default_device` says."""
    torch.manual_seed(0)
    model, mesh = mlp(), ranks.mesh((2,), ("dp",))
    one = copy.deepcopy(model)
    # Older torch makes AdamW's own counts on that device.
    reference = mse_step(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = door(mse_step(model, optimizer), mesh=mesh, style=style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(CALLS):
            x, y = _batch(call, 8)
            reference(x, y)
            with torch.device("meta"):
                step(x[4 * ranks.rank :][:4], y[4 * ranks.rank :][:4])
        assert (" full: " in step.plan.explain()) is False
    step.release()
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_reach_other_parameters(ranks: Ranks, way: Any) -> None:
    torch.manual_seed(0)
    model = mlp()
    spare = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD([*model.parameters(), *spare.parameters()], lr=0.1)

    def step(x: torch.Tensor, skip: bool, holder: nn.Module) -> None:
        optimizer.zero_grad()
        hidden = model[1](model[0](x))
        hidden = hidden if skip else model[3](model[2](hidden))
        model[4](hidden).square().mean().backward()
        optimizer.step()

    eager = _eager(step, way=way)
    plain = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(6):
            x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
            skips = [call % 3 == rank for rank in range(3)]
            eager((x[dist.get_rank()], skips[dist.get_rank()], spare), {})
            values = [p.requires_grad_() for p in plain]
            losses = []
            for rank in range(3):
                hidden = torch.tanh(F.linear(x[rank], values[0], values[1]))
                if not skips[rank]:
                    hidden = torch.tanh(F.linear(hidden, values[2], values[3]))
                losses.append(F.linear(hidden, values[4], values[5]).square().mean())
            gradients = torch.autograd.grad(sum(losses) / 3, values)  # type: ignore[arg-type]
            plain = [(p - 0.1 * g).detach() for p, g in zip(values, gradients, strict=True)]
    for got, want in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-10, atol=1e-12)
    assert all(p.grad is None for p in spare.parameters())


class _Second(nn.Linear):
    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if other is None else super().forward(x) + F.linear(x, other)


class _Peeking(nn.Module):
    """A block's forward reads the weight of another block, where the caller asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Second(WIDTH, WIDTH), _Second(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, peeks: bool) -> torch.Tensor:
        weight = self.blocks[0].weight if peeks else None
        return torch.as_tensor(self.blocks[1](torch.tanh(self.blocks[0](x)), weight))


@pytest.mark.ranks(2)
def test_ranks_use_a_parameter_in_other_modules(ranks: Ranks) -> None:
    def make() -> tuple[_Peeking, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = _Peeking().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (model, optimizer), (plain, reference) = make(), make()

    def step(x: torch.Tensor, peeks: bool) -> None:
        optimizer.zero_grad()
        model(x, peeks).square().mean().backward()
        optimizer.step()

    eager = _eager(step, is_sharded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(3):
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
            eager((x[dist.get_rank()], dist.get_rank() == 1), {})
            reference.zero_grad()
            torch.stack([plain(x[rank], rank == 1).square().mean() for rank in range(2)]).mean().backward()
            reference.step()
    assert len(eager.units.modules) == 2, "the root, and the block that no other reads"
    for got, want in zip(eager.parameters.values(), plain.parameters(), strict=True):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor().detach(), want.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_one_rank_raises_and_all_do_and_the_next_call_works(ranks: Ranks, at: int, way: Any) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [0]

    def step(x: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == at and dist.get_rank() == 1:
            raise IndexError("a row of this rank's own")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    eager = _eager(step, way=way)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(1, 6):
            if call != at:
                eager((x,), {})
                continue
            with pytest.raises(IndexError if dist.get_rank() == 1 else PlanError) as caught:
                eager((x,), {})
            assert dist.get_rank() == 1 or "[rank-failed]" in str(caught.value)
    eager.compare_ranks()


@pytest.mark.ranks(2)
def test_a_step_in_shards_that_raises_before_its_forward(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = mlp()
    inner = mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        if not len(x):
            raise IndexError("a batch without rows")
        return inner(x, y)

    eager = _eager(step, is_sharded=True)
    x, y = _batch(0, 4)
    eager((x, y), {})
    with pytest.raises(IndexError, match="a batch without rows"):  # FSDP2 has not run yet
        eager((x[:0], y[:0]), {})
    eager((x, y), {})


@pytest.mark.ranks(2)
def test_a_layer_and_an_optimizer_replaced_while_they_are_in_shards(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = mlp()
    one = copy.deepcopy(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
        return mse_step(model, optimizer)(x, y)

    eager = _eager(step, is_sharded=True)
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, one))
    warnings.simplefilter("ignore")
    for call in range(CALLS):
        if call == 3:
            model[2] = nn.Linear(16, 16).double()
            one[2] = copy.deepcopy(model[2])
            # Of shards, and of the new layer's parameters.
            optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, one))
        x, y = _batch(call, 8)
        eager((model, optimizer, x[4 * ranks.rank :][:4], y[4 * ranks.rank :][:4]), {})
        step(one, alone, x, y)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    eager.release()
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_other_numbers_of_backward_passes_raise_on_all_ranks(ranks: Ranks, way: Any) -> None:
    model = mlp()

    def step(x: torch.Tensor, passes: int) -> None:
        for _ in range(passes):
            model(x).square().mean().backward()

    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = _eager(step, way=way)
        with pytest.raises(PlanError, match="different numbers of backward passes"):
            eager((x, 1 + dist.get_rank()), {})
        eager.release()
        model.zero_grad()
        eager = _eager(step, way=way)
        eager((x, 1), {})
        with pytest.raises(PlanError, match="different numbers of backward passes"):
            eager((x, 1 + dist.get_rank()), {})
        model.zero_grad()
        eager((x, 2), {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_parameter_made_in_a_call_raises_and_one_made_before_it_trains(ranks: Ranks, style: str) -> None:
    torch.manual_seed(0)
    model = mlp()
    parts: Any = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced: list[int] = []

    def replace() -> None:
        parts[2] = nn.Linear(16, 16).double().requires_grad_(False)  # the frozen one comes first
        parts[4] = nn.Linear(16, 3).double()
        optimizer.param_groups[0]["params"] = list(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        if len(replaced) == 3:
            replace()
        replaced.append(1)
        return mse_step(model, optimizer)(x, y)  # type: ignore[no-any-return]

    eager = _eager(step, is_sharded=style == "fully_shard")
    warnings.simplefilter("ignore")
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    batches = [tuple(one[mine] for one in _batch(call, 8)) for call in range(CALLS)]
    for batch in batches[:3]:
        eager(batch, {})
    with pytest.raises(PlanError, match="model-changed"):
        eager(batches[3], {})
    replace()
    start = parts[4].weight.detach().clone()
    for batch in batches[4:]:
        eager(batch, {})
    eager.release()
    assert not torch.equal(parts[4].weight, start)
    assert len(set(ranks.gather(tensor_hashes({0: parts[4].weight})[0]))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_rows_of_a_sparse_table(ranks: Ranks, way: Any) -> None:
    """One rank leaves the table out in some calls; one raises in another. The others get the average of all."""
    torch.manual_seed(0)
    model, rank = Bag(), dist.get_rank()
    one = copy.deepcopy(model)
    chosen = {"rank": -1, "fails": -1}

    def train(model: Bag, x: torch.Tensor, y: torch.Tensor, *, has_rows: bool) -> None:
        hidden = model.table((x.abs() * 7).long() % 20).mean(1) if has_rows else torch.zeros(len(x), 8).double()
        F.mse_loss(model.last(hidden), y).backward()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        if chosen["fails"] == rank:
            raise ValueError("of one rank")
        train(model, x, y, has_rows=rank != chosen["rank"])
        for p in model.parameters():
            gradient: Any = p.grad
            p.data.sub_(gradient.to_dense() if gradient.is_sparse else gradient)
            p.grad = None

    eager = _eager(step, way=way)
    warnings.simplefilter("ignore")
    for call in range(CALLS):
        x, y = _batch(call, 6)
        chosen |= {"rank": call % 4 - 1 if call > 1 else -1, "fails": 1 if call == 4 else -1}
        if call == 4:
            with pytest.raises(ValueError if rank == 1 else PlanError):
                eager((x[:2], y[:2]), {})
            model.zero_grad()
            continue
        eager((x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]), {})
        one.zero_grad()
        for other in range(3):
            mine = slice(2 * other, 2 * other + 2)
            train(one, x[mine], y[mine], has_rows=other != chosen["rank"])
        for p in one.parameters():
            total: Any = p.grad
            p.data.sub_((total.to_dense() if total.is_sparse else total) / 3)
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_turns_sparse_on_one_rank_raises_on_both(ranks: Ranks, way: Any) -> None:
    torch.manual_seed(0)
    model = Bag()
    model.table.sparse = False
    eager = _eager(mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), way=way)
    warnings.simplefilter("ignore")
    for call in range(3):
        eager(_batch(call, 4), {})
    model.table.sparse = dist.get_rank() == 1
    with pytest.raises(PlanError, match="sparse-gradient" if dist.get_rank() else "rank-failed"):
        eager(_batch(3, 4), {})
    model.table.sparse = False
    for call in range(4, CALLS):
        eager(_batch(call, 4), {})
    assert len(set(ranks.gather(tensor_hashes({0: model.table.weight})[0]))) == 1


@pytest.mark.ranks(2)
def test_full_parameters_for_a_while_and_for_good(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = mlp()
    names = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        value: float = loss.item()
        return value

    eager = _eager(step, is_sharded=True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    eager((x,), {})
    local = {name: value.to_local().numel() for name, value in model.state_dict().items()}
    assert sum(local.values()) < sum(p.numel() for p in model.parameters())
    with eager.unsharded():
        assert all(type(p) is nn.Parameter for p in model.parameters())
        full = {name: value.detach().clone() for name, value in model.state_dict().items()}
        _ = model(x)
        with torch.no_grad():
            model.get_parameter("0.bias").add_(1.0)
    with eager.unsharded(writeback=False), torch.no_grad():
        model.get_parameter("0.bias").zero_()
    eager((x,), {})
    eager.release()
    assert list(model.state_dict()) == names
    assert all(type(p) is nn.Parameter for p in model.parameters())
    moved = model.get_parameter("0.bias").detach() - full["0.bias"]
    torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0, atol=0.05)
    state = optimizer.state[model.get_parameter("0.weight")]
    assert state["exp_avg"].shape == model.get_parameter("0.weight").shape
    before = model.get_parameter("4.weight").detach().clone()
    step(x)
    assert not torch.equal(before, model.get_parameter("4.weight"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_writes_without_writeback_are_dropped_and_a_full_model_is_copied(ranks: Ranks, style: str) -> None:
    model = mlp()
    step = mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    eager = _eager(step, is_sharded=style == "fully_shard")
    eager(_batch(0, 4), {})
    with eager.unsharded():
        before = copy.deepcopy(model)
        assert type(before) is nn.Sequential and before(_batch(0, 4)[0]).shape == (4, 3)
    with eager.unsharded(writeback=False), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    eager(_batch(1, 4), {})
    mse_step(before, torch.optim.SGD(before.parameters(), lr=0.1))(*_batch(1, 4))  # ranks have one batch
    eager.release()
    for got, want in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_release_reaches_what_only_the_calls_were_given(ranks: Ranks) -> None:
    """A list to clip and an optimizer kept old shards: later calls clipped nothing, and trained nothing."""
    torch.manual_seed(0)
    model = mlp()
    one = copy.deepcopy(model)

    def step(model: Any, optimizer: Any, clipped: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(clipped, 1e-2)
        optimizer.step()

    lists: Any
    optimizers: Any
    lists, optimizers = ([[*m.parameters()], torch.optim.SGD(m.parameters(), lr=0.1)] for m in (model, one))
    eager = _eager(step, is_sharded=True)
    warnings.simplefilter("ignore")
    for call in range(CALLS):
        if call == 2:  # of shards
            lists[1], optimizers[1] = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, one))
        x, y = _batch(call, 8)
        eager((model, lists[1], lists[0], x[4 * ranks.rank :][:4], y[4 * ranks.rank :][:4]), {})
        step(one, optimizers[1], optimizers[0], x, y)
        if call == 3:
            unused = torch.optim.SGD(model.parameters(), lr=0.1)
            eager.release()
            with pytest.raises(PlanError, match="parameter-replaced"):
                unused.step()
    eager.release()
    assert all(a is b for a, b in zip(lists[0], model.parameters(), strict=True))
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_buffers_stay_each_ranks_own_when_a_model_grows(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    statistics: Any = model[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eager = _eager(mse_step(model, optimizer))
    warnings.simplefilter("ignore")
    for call in range(CALLS):
        x, y = _batch(2 * call + ranks.rank, 8)
        x = x + ranks.rank
        with torch.no_grad():
            expected = 0.9 * statistics.running_mean + 0.1 * model[0](x).mean(0)
        if call == 3:
            model.append(nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": list(model[3].parameters())})
        eager((x, y), {})
        if call:  # in the first call rank 0's are taken
            torch.testing.assert_close(statistics.running_mean, expected)
    assert len({str(row) for row in ranks.gather(statistics.running_mean.tolist())}) == 2


@pytest.mark.ranks(2)
def test_a_parameter_in_strides_of_its_own_stays_full(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 3)).double()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # of torch's stubs
    eager = _eager(mse_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), is_sharded=True)
    warnings.simplefilter("ignore")
    x, y = torch.ones(4, 2, 4, 4, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    losses = [eager((x, y), {}) for _ in range(CALLS)]
    assert eager.units.full["0.weight"] == "is not contiguous" and losses[-1] < losses[0]


@pytest.mark.ranks(2)
def test_an_old_parameter_that_something_else_holds_raises(ranks: Ranks) -> None:
    model = mlp()

    class Hidden:
        __slots__ = ("weights",)
        weights: list[nn.Parameter]

    hidden = Hidden()
    hidden.weights = [model.get_parameter("0.weight")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    x = torch.ones(4, WIDTH, dtype=torch.float64)
    eager = _eager(step, is_sharded=True)
    eager((x,), {})
    eager((x,), {})  # what nobody uses does no harm
    (weight,) = hidden.weights
    uses: list[Any] = [weight.detach, lambda: weight + 1, lambda: weight.grad, lambda: torch.optim.SGD([weight])]
    for use in uses:
        with pytest.raises(PlanError, match=r"parameter-replaced.*0\.weight"):
            use()


@pytest.mark.ranks(2)
def test_a_graph_of_the_first_call_does_no_harm_until_a_backward_pass_reaches_it(ranks: Ranks) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=not losses)
        optimizer.step()
        losses.append(loss)

    x = torch.ones(4, WIDTH, dtype=torch.float64)
    eager = _eager(step, is_sharded=True)
    eager((x,), {})
    eager((x,), {})
    with pytest.raises((PlanError, RuntimeError)):
        losses[0].backward()


@pytest.mark.ranks(2)
def test_plain_tensors_train_where_there_is_no_module(ranks: Ranks) -> None:
    a, b = (torch.full((), value, dtype=torch.float64, requires_grad=True) for value in (0.0, 1.0))
    xs = torch.arange(8.0, dtype=torch.float64).view(2, 4)

    def step(x: torch.Tensor) -> None:
        (a + b * x - 3 * x).square().mean().backward()
        with torch.no_grad():
            for one in (a, b):
                assert one.grad is not None
                one -= 0.01 * one.grad
                one.grad = None

    eager = _eager(step, is_sharded=True)
    with models.warns_once(ranks, "stay full"):
        eager((xs[ranks.rank],), {})
    own = a.item(), b.item()
    gradient = float((2 * (xs - 3 * xs)).mean()), float((2 * xs * (xs - 3 * xs)).mean())
    assert own == pytest.approx((-0.01 * gradient[0], 1 - 0.01 * gradient[1]), rel=1e-12)


@pytest.mark.ranks(2)
def test_traps_of_sharded_parameters_are_closed(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms: list[float] = []

    def step(x: torch.Tensor, then: str) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        norms.append(model.get_parameter("0.weight").detach().norm().item())
        if then == "replace":
            model.get_parameter("0.weight").data = torch.zeros(16, WIDTH, dtype=torch.float64)
        if then == "combine":
            norms.append((model.get_parameter("0.weight") - torch.zeros(16, WIDTH, dtype=torch.float64)).norm().item())

    eager = _eager(step, is_sharded=True)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    eager((x, ""), {})
    for _ in range(4):
        eager((x, ""), {})
    with eager.unsharded():
        assert norms[-1] == pytest.approx(model.get_parameter("0.weight").detach().norm().item(), rel=1e-12)
    with pytest.raises(PlanError, match="data ="):
        eager((x, "replace"), {})
    with pytest.raises(RuntimeError, match="mixed") as caught:  # call 1 has not shown it
        eager((x, "combine"), {})
    assert 'style="replicate"' in caught.value.__notes__[-1]
    eager((x, ""), {})


@pytest.mark.ranks(2)
def test_values_of_one_rank_in_parameters_are_found(ranks: Ranks) -> None:
    model = mlp()

    def step(x: torch.Tensor) -> None:
        gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(g)

    x = torch.full((4, WIDTH), 1.0 + dist.get_rank(), dtype=torch.float64)
    with pytest.raises(PlanError, match="ranks-diverge") as caught:
        _eager(step)((x,), {})
    assert len(caught.value.problems) == 6


class Tower(nn.Module):
    """A model of text with a tower for images, which a batch may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, has_image: bool) -> Any:
        return self.head(self.text(x) + (self.image(x) if has_image else 0))


def one_loss(model: Any, x: torch.Tensor, has_image: bool) -> Any:
    return model(x, has_image).square().mean()


def two_losses(model: Any, x: torch.Tensor, has_image: bool) -> Any:
    """The tower comes last, so its gradients come first: before FSDP2 knows of a backward pass."""
    return model.text(x).square().mean() + (model.image(x).square().mean() if has_image else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("whose", ["rank 0's", "in turns"])
@pytest.mark.parametrize("loss_of", [two_losses, one_loss])
def test_a_branch_that_one_rank_alone_runs(ranks: Ranks, loss_of: Any, whose: str) -> None:
    """It stays full, and the other rank enters the average of its gradients all the same, behind FSDP2's messages."""

    def train(model: Any, optimizer: Any, x: torch.Tensor, has_image: bool) -> float:
        loss = loss_of(model, x, has_image)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return cast(float, loss.item())

    warnings.simplefilter("ignore")  # of what stays full
    values: list[list[torch.Tensor]] = []
    for style in ("replicate", "fully_shard"):
        torch.manual_seed(0)
        model = Tower().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = dp.distribute(train, mesh=ranks.mesh((2,), ("dp",)), style=style)
        for call in range(6):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2 * call + ranks.rank)).double()
            step(model, optimizer, x, ranks.rank == (call % 2 if whose == "in turns" else 0))
        step.release()
        values.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    assert len(values[0]) == 6
