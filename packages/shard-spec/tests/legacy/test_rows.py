"""Sharded modules run under recomputation, grad modes, copies and wrappers; layouts and bytes of outputs."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_orders import chunk as chunk_of
from ranktest import Ranks
from shard_spec import shard_module, shard_parameter
from shard_spec._shared.problems import PlanError
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}  # other order of summation


def chunk(ranks: Ranks, dim: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{ranks.device}" for rank in range(ranks.world_size)])


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class Net(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, 6)
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)
        self.reentrant = recompute
        self.double()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))  # type: ignore[no-any-return]  # Any from a module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        x = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.out(x)  # type: ignore[no-any-return]  # Any from a module


def plan_for(ranks: Ranks) -> ShardingPlan:
    return ShardingPlan(
        {"fc1.weight": chunk(ranks, 0), "fc2.weight": chunk(ranks, 1)}, {"fc2": chunk(ranks, 0)}, ["fc2"]
    )


def batch(rank: int, rows: int = 2, step: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def step_and_compare(ranks: Ranks, full: nn.Module, sharded: nn.Module, rows: int = 2, step: int = 0) -> int:
    """One forward and backward of both; every gradient is compared."""
    batches = [batch(rank, rows, step) for rank in range(ranks.world_size)]
    expected, actual = full(torch.cat(batches)), sharded(batches[ranks.rank])
    torch.testing.assert_close(actual, expected[ranks.rank * rows : (ranks.rank + 1) * rows].detach(), **CLOSE)
    expected.square().sum().backward()
    actual.square().sum().backward()
    names = {name.removeprefix("module."): p for name, p in sharded.named_parameters()}
    for name, parameter in full.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(whole(names[name].grad), parameter.grad, **CLOSE)
    full.zero_grad()
    sharded.zero_grad()
    return len(names)


@pytest.mark.ranks(2)
def test_activation_checkpointing(ranks: Ranks) -> None:
    for reentrant in (False, True):
        full, sharded = Net(), Net(reentrant)
        shard_module(sharded, plan_for(ranks))
        for step in range(2):
            assert step_and_compare(ranks, full, sharded, rows=2 + step, step=step) == 8


@pytest.mark.ranks(2)
def test_grad_modes_training_and_eval(ranks: Ranks) -> None:
    full, sharded = Net(), Net()
    shard_module(sharded, plan_for(ranks))
    x = batch(ranks.rank)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(sharded(x), full(x), **CLOSE)
    # Without grad mode nothing asks for a gradient, and no hook stays on the caller's tensor, also where it passes.
    passing, leaf = nn.Sequential(nn.Identity()), x.clone().requires_grad_()
    shard_module(passing, ShardingPlan({}, {"": "S(0)"}, [""], mesh={"rank": ranks.world_size}))
    with torch.no_grad():
        assert not passing(leaf).requires_grad
    assert not leaf._backward_hooks
    assert passing(leaf).requires_grad
    sharded.eval()
    torch.testing.assert_close(sharded(x), full(x), **CLOSE)
    with torch.autocast(ranks.device.type, torch.bfloat16):
        assert sharded.float()(x.float()).dtype == torch.bfloat16
    sharded.double()
    # The gradient of the input; a second derivative is refused, of inputs and of replicated parameters.
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(sharded(ours).pow(3).sum(), ours)
    (expected,) = torch.autograd.grad(full(theirs).pow(3).sum(), theirs)
    torch.testing.assert_close(grad, expected, **CLOSE)
    for inputs in ([ours], [each for each in sharded.parameters() if not isinstance(each, DTensor)]):
        with pytest.raises(RuntimeError, match="no second derivatives: leave out create_graph=True"):
            torch.autograd.grad(sharded(ours).pow(3).sum(), inputs, create_graph=True)


@pytest.mark.ranks(2)
def test_copies_and_pickles_go_on_training(ranks: Ranks) -> None:
    """Hooks on parameters are in no copy: without putting them back, replicated parameters would drift apart."""
    full, sharded = Net(), Net()
    shard_module(sharded, plan_for(ranks))
    assert step_and_compare(ranks, full, sharded) == 8
    copied = copy.deepcopy(sharded)
    assert isinstance(copied.fc1.weight, DTensor)
    assert copied.fc1.forward.module is copied.fc1  # type: ignore[attr-defined]  # a ShardedLinear
    assert step_and_compare(ranks, full, copied) == 8
    loaded = pickle.loads(pickle.dumps(sharded))
    assert step_and_compare(ranks, full, loaded) == 8
    buffer = io.BytesIO()
    torch.save(sharded, buffer)
    buffer.seek(0)
    assert step_and_compare(ranks, full, torch.load(buffer, weights_only=False)) == 8
    # A parameter that starts to need its gradient later.
    frozen = Net()
    frozen.inp.requires_grad_(False)
    shard_module(frozen, plan_for(ranks))
    frozen.inp.requires_grad_(True)
    assert step_and_compare(ranks, full, frozen) == 8
    # Parameters that are swapped with others list their hooks still, and torch runs them no more.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        sharded.float().double()
        full.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for _ in range(2):  # once each, also in the second step
        assert step_and_compare(ranks, full, sharded) == 8


@pytest.mark.ranks(2)
def test_state_dicts(ranks: Ranks) -> None:
    full, sharded = Net(), Net()
    shard_module(sharded, plan_for(ranks))
    assert list(sharded.state_dict()) == list(full.state_dict())
    other = Net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    shard_module(other, plan_for(ranks))
    sharded.load_state_dict(other.state_dict())
    for name, value in full.state_dict().items():
        assert torch.equal(whole(sharded.state_dict()[name]), value + 1)


@pytest.mark.ranks(2)
def test_ddp_around_a_sharded_module(ranks: Ranks) -> None:
    """Gradients of replicated parameters are sums already; DDP's mean of equal gradients leaves them as they are."""
    full, sharded = Net(), Net()
    shard_module(sharded, plan_for(ranks))
    ignored = [name for name, p in sharded.named_parameters() if isinstance(p, DTensor)]
    sharded._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]  # DDP's documented way to leave some out
    wrapped = DistributedDataParallel(sharded)
    for step in range(3):
        assert step_and_compare(ranks, full, wrapped, step=step) == 8


@pytest.mark.ranks(2)
def test_accumulating_gradients(ranks: Ranks) -> None:
    """A hook that sums what is accumulated already would count the first batch twice."""
    full, sharded = Net(), Net()
    shard_module(sharded, plan_for(ranks))
    for step in range(3):
        batches = [batch(rank, 2, step) for rank in range(2)]
        full(torch.cat(batches)).square().sum().backward()
        sharded(batches[ranks.rank]).square().sum().backward()
    for (name, one), two in zip(full.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(whole(two.grad), one.grad, **CLOSE, msg=name)


@pytest.mark.ranks(2)
def test_sharding_twice_sums_once(ranks: Ranks) -> None:
    full, sharded = Net(), Net()
    plan = plan_for(ranks)
    first = shard_module(sharded, ShardingPlan({"fc1.weight": plan.plan["fc1.weight"]}, None, ["fc1"]))
    second = shard_module(sharded, ShardingPlan({"out.weight": chunk(ranks, 1)}, None, ["out"]))
    assert step_and_compare(ranks, full, sharded) == 8
    second.undo()
    assert step_and_compare(ranks, full, sharded) == 8
    first.undo()
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in sharded.modules())
    local = sharded(batch(ranks.rank)).square().sum()
    local.backward()
    alone = full(batch(ranks.rank)).square().sum()
    alone.backward()
    torch.testing.assert_close(sharded.inp.weight.grad, full.inp.weight.grad, **CLOSE)  # nothing is summed any more


@pytest.mark.ranks(2)
def test_undo_after_training(ranks: Ranks) -> None:
    full, sharded = Net(), Net()
    optimizer_before = torch.optim.SGD(sharded.parameters(), lr=0.1)
    objects = [id(p) for p in sharded.parameters()]
    handle = shard_module(sharded, plan_for(ranks))
    one, two = torch.optim.SGD(full.parameters(), lr=0.1), torch.optim.SGD(sharded.parameters(), lr=0.1)
    batches = [batch(rank) for rank in range(2)]
    full(torch.cat(batches)).square().sum().backward()
    sharded(batches[ranks.rank]).square().sum().backward()
    one.step(), two.step()
    handle.undo()
    assert [id(p) for p in sharded.parameters()] == objects
    for (name, expected), parameter in zip(full.named_parameters(), sharded.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter, expected, **CLOSE, msg=name)
        torch.testing.assert_close(parameter.grad, expected.grad, **CLOSE, msg=name)
    optimizer_before.step()
    torch.testing.assert_close(sharded.fc1.weight, full.fc1.weight - 0.1 * full.fc1.weight.grad, **CLOSE)  # type: ignore[operator]  # there is one


# ---- outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_output_layouts(ranks: Ranks) -> None:
    """`output_plan` also on plain outputs and on meshes of their own; torch does nothing there, without a word."""
    full = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6)).double()
    ids = [torch.arange(chunk_of(10, 4, at)) % 9 for at in range(4)]  # 3, 3, 3 and 1
    me, everything = ranks.rank, torch.cat(ids)
    mesh = MeshSpec({"a": 2, "b": 2})
    cases: list[tuple[Any, bool]] = [
        (chunk(ranks, 0), False),
        (chunk(ranks, -1), True),
        (chunk(ranks, 1), False),
        (chunk(ranks, -2), True),
        (Layout(mesh, "a:S(0), b:S(1)"), False),
        (Layout(mesh, "a:S(1), b:R"), True),
        (Layout(mesh, "R, R"), True),
    ]
    for number, (target, local) in enumerate(cases):
        plan = {"0.weight": chunk(ranks, 1), "1.weight": chunk(ranks, number % 2)}
        for at in (0, 1):
            sharded = copy.deepcopy(full)
            name, layer = str(at), full[: at + 1]
            local_plan = ShardingPlan(plan, {name: target}, [name] if local else None)
            shard_module(sharded, local_plan)
            actual = sharded[: at + 1](ids[me])
            expected = layer(everything)
            weights = torch.arange(expected.numel(), dtype=expected.dtype).view_as(expected)
            shape = tuple(expected.shape)
            if local:
                layout = target if isinstance(target, Layout) else target.to_layout(shape)
                keeps_rows = any(spec.dim is not None for spec in layout.specs) and not any(
                    spec.dim in (0, -2) for spec in layout.specs
                )
                start = sum(each.numel() for each in ids[:me])
                slices = [slice(pieces[0][0], sum(pieces[0])) for pieces in layout.intervals(me, shape)]
                index = tuple(slices) if keeps_rows else (slice(start, start + ids[me].numel()),)
                assert not isinstance(actual, DTensor)
                torch.testing.assert_close(actual, expected[index].detach(), **CLOSE)
                part = (actual * weights[index]).sum()
                replicas = 2 if keeps_rows and isinstance(target, Layout) else 1
            else:
                assert isinstance(actual, DTensor)
                torch.testing.assert_close(whole(actual), expected.detach(), **CLOSE)
                part, replicas = (actual.full_tensor() * weights).sum(), 1
            part.backward()
            (expected * weights).sum().backward()
            for (key, one), two in zip(layer.named_parameters(), sharded[: at + 1].parameters(), strict=True):
                if replicas == 1:
                    torch.testing.assert_close(whole(two.grad), one.grad, **CLOSE, msg=f"{number} {key}")
            full.zero_grad()


@pytest.mark.ranks(4)
def test_layouts_with_replicas(ranks: Ranks) -> None:
    """A weight cut along one axis and replicated along another: replicas compute alike and count once."""
    mesh = MeshSpec({"r": 2, "s": 2})
    full, sharded = Net(), Net()
    plan = ShardingPlan(
        {
            "fc1.weight": "s:S(0)",
            "fc1.bias": "s:S(0)",
            "fc2.weight": "s:S(1)",
            "inp.weight": "r:S(1)",
            "out.weight": "R, R",
        },
        None,
        ["inp", "fc2"],
        mesh=mesh,
    )
    shard_module(sharded, plan)
    assert not isinstance(sharded.out.weight, DTensor)  # replicated everywhere: it stays a plain parameter
    for step in range(2):
        assert step_and_compare(ranks, full, sharded, step=step, rows=1 + step) == 8


@pytest.mark.ranks(2)
def test_dtensor_inputs(ranks: Ranks) -> None:
    """The output of one sharded module, relaid by hand, is the input of the next."""
    full, sharded = Net(), Net()
    shard_module(sharded, ShardingPlan({"fc1.weight": chunk(ranks, 0), "fc2.weight": chunk(ranks, 1)}))
    hidden = torch.randn(4, 6, dtype=torch.float64)
    expected = full.fc2(full.fc1(torch.cat([hidden, hidden])))
    for placement in (Shard(0), Shard(1), Replicate()):
        out = sharded.fc2(sharded.fc1(hidden).redistribute(placements=[placement]))
        assert isinstance(out, DTensor)
        torch.testing.assert_close(whole(out), expected.detach(), **CLOSE)
        torch.autograd.backward(out.redistribute(placements=[Replicate()]).to_local().sum())
    full.fc2(full.fc1(torch.cat([hidden] * 2))).sum().backward()
    for name in ("fc1", "fc2"):
        one, two = getattr(full, name), getattr(sharded, name)
        torch.testing.assert_close(whole(two.weight.grad), 3 * one.weight.grad, **CLOSE)
        torch.testing.assert_close(whole(two.bias.grad), 3 * one.bias.grad, **CLOSE)
    # Torch says so itself when a plain module meets a sharded output.
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        sharded.out(sharded.fc2(sharded.fc1(hidden)))


@pytest.mark.ranks(1)
def test_one_rank(ranks: Ranks) -> None:
    full, sharded = Net(), Net()
    plan = plan_for(ranks)
    shard_module(sharded, ShardingPlan({**plan.plan, "out.weight": chunk(ranks, 1)}, plan.output_plan, ["fc2", ""]))
    assert isinstance(sharded.out.weight, DTensor)
    assert step_and_compare(ranks, full, sharded) == 8


@pytest.mark.ranks(4)
def test_modules_on_different_meshes_and_under_two_names(ranks: Ranks) -> None:
    """Rows on a line of 4 ranks, then a grid of 2 x 2, then columns; one module is called twice."""
    torch.manual_seed(0)
    middle = nn.Linear(6, 6)
    full = nn.Sequential(nn.Linear(4, 6), middle, nn.ReLU(), middle, nn.Linear(6, 3)).double()
    sharded = copy.deepcopy(full)
    cells = [((0, 0), 0), ((0, 3), 1), ((3, 0), 2), ((3, 3), 3)]
    grid = EnumerableShardingSpec([ShardMetadata(at, (3, 3), f"rank:{rank}/{ranks.device}") for at, rank in cells])
    plan = ShardingPlan({"0.weight": chunk(ranks, 0), "3.weight": grid, "4.weight": chunk(ranks, 1)}, None, [""])
    handle = shard_module(sharded, plan)
    for step in range(2):
        assert step_and_compare(ranks, full, sharded, step=step) == 6
    handle.undo()
    assert sharded[1] is sharded[3]
    assert "forward" not in sharded[1].__dict__


@pytest.mark.ranks(2)
def test_rows_that_nobody_can_tell_apart(ranks: Ranks) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.last(self.a(x) + self.b(y))  # type: ignore[no-any-return]  # Any from a module

    model = Two()
    shard_module(model, ShardingPlan({"a.weight": chunk(ranks, 0), "b.weight": chunk(ranks, 0)}, None, ["last"]))
    few, many = torch.randn(1, 4), torch.randn(3, 4)
    first, second = (few, many) if ranks.rank == 0 else (many, few)
    uneven = pytest.raises(PlanError, match=r"invalid-argument.*\[1, 3\] rows.*\[2, 2\] rows of 4 would be right")
    with ranks.record() as log, uneven:
        model(first, second)
    assert {event.dtype for event in log.events} == {torch.uint8}  # ranks compared, and nothing ran
    first, second = (many[:2], many[1:]) if ranks.rank == 0 else (many[1:], many[:2])
    assert model(first, first).shape == first.shape
    # An output whose rows are not those of the batch.
    other = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    shard_module(other, ShardingPlan({"0.weight": chunk(ranks, 0)}, {"0": chunk(ranks, 0)}, ["1"]))
    with pytest.raises(PlanError, match="invalid-layout"):
        other(few)
    pair = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    shard_module(pair, ShardingPlan({"0.weight": chunk(ranks, 0)}, None, ["0", "1"]))
    with pytest.raises(PlanError, match="wrong-type"):
        pair(few)
    for wrong in (torch.randn(4), torch.randn(2, 5)):
        with pytest.raises(PlanError, match="invalid-argument") as error:
            model.a(wrong if ranks.rank else torch.randn(2, 4))
        assert len(set(ranks.gather(str(error.value)))) == 1


# ---- other modules around -----------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_inside_a_transformer_layer(ranks: Ranks) -> None:
    """In eval the layer reads the weights of its Linears itself, past their forward, unless they have hooks."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    full = copy.deepcopy(layer)
    plan = ShardingPlan(
        {"linear1.weight": chunk(ranks, 0), "linear2.weight": chunk(ranks, 1)},
        {"linear2": chunk(ranks, 0)},
        ["linear2"],
    )
    shard_module(layer, plan)
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), full(x))


@pytest.mark.ranks(2)
def test_compiled_around_the_sharded_modules(ranks: Ranks) -> None:
    """Traced, the exchange of shapes in front of each forward would hang; it runs eagerly between compiled pieces."""
    full = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    sharded = copy.deepcopy(full)
    shard_module(sharded, ShardingPlan({"0.weight": chunk(ranks, 0)}, None, ["0"]))
    x = torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it looks at while tracing
        out = torch.compile(sharded, backend="eager")(x)
    torch.testing.assert_close(out, full(x))


@pytest.mark.ranks(2)
def test_batch_statistics_are_local(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="statistics of its own rows"):
        shard_module(model, ShardingPlan({"0.weight": chunk(ranks, 0)}, None, ["0"]))


# ---- what is sent -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
def test_what_a_linear_moves(ranks: Ranks) -> None:
    world = ranks.world_size
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    spec = {dim: chunk(ranks, dim) for dim in (0, 1)}
    shard_module(model, ShardingPlan({"0.weight": spec[0], "2.weight": spec[1]}, None, ["2"]))
    x = torch.randn(3, 8, requires_grad=True)
    with ranks.record() as log:
        out = model(x)
    rows = 3 * 8 * 4
    # The module and the inputs are compared; rows to everybody; nothing between the two Linears; sums of parts to the
    # owners of the rows.
    assert log.ops == ("all_gather", "all_gather", "all_gather", "reduce_scatter")
    assert log.events[2].bytes_sent == tuple(0 if rank == ranks.rank else rows for rank in range(world))
    assert log.events[3].bytes_sent == log.events[2].bytes_sent
    with ranks.record() as log:
        out.sum().backward()
    assert log.ops == ("all_gather", "reduce_scatter")
    assert [event.bytes_sent for event in log.events] == [log.events[0].bytes_sent] * 2


@pytest.mark.ranks(2)
def test_results_are_not_read_before_they_are_there(ranks: Ranks) -> None:
    full, sharded = Net(), Net()
    with ranks.delayed():
        handle = shard_module(sharded, plan_for(ranks), src_rank=1)
        shard_parameter(sharded.fc1, "bias", chunk(ranks, 0)).undo()
        assert step_and_compare(ranks, full, sharded) == 8
        handle.undo()
    for (name, one), two in zip(full.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(one, two[1]), name


@pytest.mark.ranks(4)
def test_groups_that_cannot_be_made_are_refused(ranks: Ranks) -> None:
    """Only all ranks of the job make groups together: several axes over a part of them would need more."""
    group = dist.new_group([0, 1, 2])
    if ranks.rank == 3:
        return
    model = nn.Linear(4, 6)
    before = model.weight
    with pytest.raises(PlanError, match="no-process-group"):
        shard_parameter(model, "weight", Layout(MeshSpec({"a": 3, "b": 1}), "a:S(0)"), process_group=group)
    assert model.weight is before
    rows = ChunkShardingSpec(0, [f"rank:{rank}/{ranks.device}" for rank in range(3)])
    shard_parameter(model, "weight", rows, process_group=group)  # the group itself: nothing to make
    assert isinstance(model.weight, DTensor)
