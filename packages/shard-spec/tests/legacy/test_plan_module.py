"""Mistakes and hangs of torch's shard_module are right here, or raise on every rank before anything moves.

"Before anything moves" is asserted: the module keeps its tensors (the same objects, bit for bit) and hooks, and the
recorder saw nothing but the all_gathers in which the ranks compare notes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shard_spec import shard_module, shard_parameter
from shard_spec._shared.problems import PlanError
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, Sharder, ShardingSpec, ShardMetadata
from torch import nn
from torch.distributed._shard.sharder import Sharder as TorchSharder
from torch.distributed._shard.sharding_plan.api import ShardingPlan as TorchPlan
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec as TorchChunk
from torch.distributed.tensor import DTensor


def chunk(ranks: Ranks, dim: int = 0, order: list[int] | None = None) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{ranks.device}" for rank in order or range(ranks.world_size)])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(9, 4)
        self.emb2 = nn.Embedding(9, 4)
        self.fc = nn.Linear(4, 9)
        self.norm = nn.LayerNorm(9)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(9, 9), nn.ReLU())])
        self.register_buffer("scale", torch.ones(9))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.fc(self.emb(ids) + self.emb2(ids)))
        return self.blocks[0](hidden) * self.scale  # type: ignore[no-any-return]  # Any from a ModuleList


def state(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "values": {name: None if tensor.is_meta else tensor.detach().clone() for name, tensor in tensors.items()},
        "modules": {name: id(each) for name, each in module.named_modules()},
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__) for m in module.modules()
        ],
        "flags": {name: tensor.requires_grad for name, tensor in tensors.items()},
    }


def assert_untouched(module: nn.Module, before: dict[str, Any]) -> None:
    after = state(module)
    for name in ("objects", "modules", "hooks", "flags"):
        assert after[name] == before[name], name
    assert len(before["values"]) > 0
    for name, value in before["values"].items():
        assert value is None or torch.equal(value, after["values"][name]), name


def refused(ranks: Ranks, module: nn.Module, call: Callable[[], object], *codes: str) -> str:
    """``call`` raises the same PlanError with exactly these codes on every rank, fast, and moves nothing."""
    before = state(module)
    started = time.monotonic()
    with ranks.record() as log, pytest.raises(PlanError) as error:
        call()
    assert time.monotonic() - started < 20
    assert set(log.ops) == {"all_gather"}
    assert {problem.code for problem in error.value.problems} == set(codes)
    assert_untouched(module, before)
    messages = ranks.gather(str(error.value))
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.ranks(2)
def test_faults_of_specs_and_names(ranks: Ranks) -> None:
    net = Net()
    spec = chunk(ranks)

    def shard(plan: dict[str, Any], *args: Any, **kwargs: Any) -> Callable[[], object]:
        return lambda: shard_module(net, ShardingPlan(plan, *args), **kwargs)

    # torch: AssertionError without a word, on some ranks, after the others went into scatter.
    refused(ranks, net, shard({"fc.weight": chunk(ranks, 0, [0])}), "rank-outside-mesh")
    refused(ranks, net, shard({"fc.weight": chunk(ranks, 0, [0, 0])}), "invalid-layout")
    refused(ranks, net, shard({"fc.weight": chunk(ranks, 0, [0, 1, 2])}), "rank-outside-mesh")
    refused(ranks, net, shard({"fc.weight": ChunkShardingSpec(0, ["cpu", "cpu"])}), "invalid-layout")
    # torch: stops at the first entry, with the ones before it sharded.
    text = refused(
        ranks,
        net,
        shard({"emb.weight": spec, "fc.weight": chunk(ranks, 2), "nothing.weight": spec, "norm.weight": spec}),
        "dim-out-of-range",
        "unmatched-pattern",
        "module-not-shardable",
    )
    assert "tp-styles" in text
    assert text.count("[") >= 3
    # torch: a plain TypeError in the middle of the call; a literal KeyError for the root.
    refused(ranks, net, shard({"fc.weight": object()}), "wrong-type")
    refused(ranks, net, lambda: shard_module(net, None), "wrong-type")
    refused(ranks, net, shard({"fc.weight": spec}, None, None, src_rank=2), "invalid-argument")
    refused(ranks, net, shard({"fc.weight": spec}, {"nowhere": spec}, ["emb3"]), "unknown-name")
    refused(ranks, net, shard({"fc.weight": spec}, {"fc": chunk(ranks, 0, [0, 0])}), "invalid-layout")
    # The order of the group.
    both = {"fc.weight": spec, "emb.weight": chunk(ranks, 0, [1, 0])}
    refused(ranks, net, shard(both), "mesh-mismatch")
    refused(ranks, net, shard({"fc.weight": spec}, {"fc": chunk(ranks, 0, [1, 0])}), "mesh-mismatch")
    refused(ranks, net, shard({"fc.weight": chunk(ranks, 0, [1, 0])}), "mesh-mismatch")
    # Devices.
    wrong = ChunkShardingSpec(0, ["rank:0/cuda:7", "rank:1/cuda:7"])
    refused(ranks, net, shard({"fc.weight": wrong}), "device-mismatch")
    mixed = {"fc.weight": wrong, "emb.weight": spec}
    refused(ranks, net, shard(mixed), "device-mismatch")


@pytest.mark.ranks(2)
def test_faults_of_layouts_and_modules(ranks: Ranks) -> None:
    net = Net()
    spec = chunk(ranks)

    def one(name: str, value: Any) -> Callable[[], object]:
        return lambda: shard_module(net, ShardingPlan({name: value}))

    # torch: EnumerableShardingSpec.shard is not implemented. Ours applies what a DTensor can say.
    device = ranks.device
    uneven = [ShardMetadata([0, 0], [2, 4], f"rank:0/{device}"), ShardMetadata([2, 0], [7, 4], f"rank:1/{device}")]
    refused(ranks, net, one("fc.weight", EnumerableShardingSpec(uneven)), "not-expressible")
    mesh = MeshSpec({"tp": 2})
    refused(ranks, net, one("fc.weight", Layout(mesh, "I(0,[6,3])")), "not-expressible")
    refused(ranks, net, one("fc.weight", Layout(mesh, "B(0,4)")), "not-expressible")
    refused(ranks, net, one("fc.weight", Layout(mesh, "P")), "partial-value")
    # Modules whose forward has no sharded version, told before anything moves.
    for name in ("norm.weight", "scale"):
        assert "tp-styles" in refused(ranks, net, one(name, spec), "module-not-shardable")
    attention = nn.MultiheadAttention(4, 2)
    for name in ("in_proj_weight", "out_proj.weight"):
        plan = ShardingPlan({name: spec})
        refused(ranks, attention, lambda p=plan: shard_module(attention, p), "module-not-shardable")  # type: ignore[misc]  # mypy cannot type the default
    for parametrized in (
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ):
        for name in ("bias", "parametrizations.weight.original*"):
            plan = ShardingPlan({name: spec})
            refused(ranks, parametrized, lambda m=parametrized, p=plan: shard_module(m, p), "module-not-shardable")  # type: ignore[misc]  # as above
    sparse = nn.Embedding(9, 4, sparse=True)
    refused(ranks, sparse, lambda: shard_parameter(sparse, "weight", spec), "unsupported-option")
    imaginary = nn.Linear(4, 9, dtype=torch.complex64)
    refused(ranks, imaginary, lambda: shard_module(imaginary, ShardingPlan({"weight": spec})), "unsupported-tensor")
    unplanned = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9))
    refused(ranks, unplanned, lambda: shard_module(unplanned, ShardingPlan({"1.weight": spec})), "sparse-gradient")
    # What a replacement would lose.
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    refused(ranks, net, one("fc.weight", spec), "unsupported-tensor")
    net.fc.weight.grad = None
    hook = net.fc.weight.register_hook(lambda grad: grad)
    refused(ranks, net, one("fc.weight", spec), "unsupported-tensor")
    hook.remove()
    handle = shard_module(net, ShardingPlan({"fc.weight": spec}))
    refused(ranks, net, one("fc.weight", spec), "already-applied")
    handle.undo()


@pytest.mark.ranks(4)
def test_ranks_that_disagree_all_raise(ranks: Ranks) -> None:
    """torch: an error on one rank leaves the others in scatter until the group's timeout."""
    net, spec = Net(), chunk(ranks)
    odd = ranks.rank == 2

    def differing(name: str, value: Any, **kwargs: Any) -> Callable[[], object]:
        return lambda: shard_module(net, ShardingPlan({name: value}), **kwargs)

    refused(ranks, net, differing("fc.weight", chunk(ranks, 1) if odd else spec), "ranks-disagree")
    text = refused(ranks, net, differing("fc.weight", spec, src_rank=int(odd)), "ranks-disagree")
    assert "ranks 0, 1, 3: source: rank 0" in text
    text = refused(ranks, net, differing("fc.weights" if odd else "fc.weight", spec), "unmatched-pattern")
    assert "on rank 2" in text
    refused(ranks, net, lambda: shard_module(net, 3 if odd else ShardingPlan({"fc.weight": spec})), "wrong-type")
    # -1 and 1 are one dim of a matrix: no disagreement.
    handle = shard_module(net, ShardingPlan({"emb.weight": chunk(ranks, -1 if odd else 1)}))
    assert isinstance(net.emb.weight, DTensor)
    handle.undo()
    net.fc.double() if odd else None
    refused(ranks, net, differing("fc.weight", spec), "ranks-disagree")
    net.fc.float()
    net.fc.weight.requires_grad_(not odd)
    refused(ranks, net, differing("fc.weight", spec), "ranks-disagree")

    class Failing(ShardingSpec):
        def build_metadata(self, tensor_sizes: Any, tensor_properties: object = None) -> Any:
            if dist.get_rank() == 1:
                raise RuntimeError("out of luck")
            return spec.build_metadata(tensor_sizes)

    net.fc.weight.requires_grad_()
    text = refused(ranks, net, differing("fc.weight", Failing()), "rank-failed")
    assert "on rank 1: RuntimeError: out of luck" in text


@pytest.mark.ranks(2)
def test_meta_tensors(ranks: Ranks) -> None:
    """torch: fails inside gloo."""
    plan = ShardingPlan({"fc.weight": chunk(ranks), "emb.weight": chunk(ranks, 1)})
    with torch.device("meta"):
        empty = Net()
    refused(ranks, empty, lambda: shard_module(empty, plan), *["no-data"])
    net = Net() if ranks.rank == 1 else empty
    handle = shard_module(net, plan, src_rank=1)
    full = Net()
    assert torch.equal(whole(net.fc.weight), full.fc.weight)
    assert torch.equal(whole(net.emb.weight), full.emb.weight)
    for name, value in full.state_dict().items():
        if name not in plan.plan:
            assert torch.equal(net.state_dict()[name], value), name
    assert all(p.requires_grad for p in net.parameters())
    handle.undo()
    assert not any(p.is_meta or isinstance(p, DTensor) for p in net.parameters())
    assert torch.equal(net.fc.weight, full.fc.weight)


# ---- Sharders -----------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]  # Any from a module


class Doubling(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return Doubled(module)


class TorchDoubling(TorchSharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return Doubled(module)


class Breaking(Sharder):
    """Transaction the module, then fails on one rank."""

    def shard(self, module: nn.Module) -> nn.Module:
        for child in module.modules():
            if isinstance(child, nn.Linear):
                child.weight = nn.Parameter(torch.zeros(1))
                child.__dict__["extra"] = 3
        if dist.get_rank() == 1:
            raise RuntimeError("cannot shard this")
        return module


@pytest.mark.ranks(2)
def test_a_sharders_module_takes_its_place(ranks: Ranks) -> None:
    """torch: sets a literal attribute `mod_name` on the parent, and the old module stays."""
    for sharder in (Doubling(), TorchDoubling()):
        net = Net()
        ids = torch.arange(4)
        expected = net.norm(net.fc(net.emb(ids) + net.emb2(ids)))
        expected = 2 * net.blocks[0](expected)
        plan = ShardingPlan({"blocks.0": sharder, "fc.weight": chunk(ranks)}, None, ["fc"])
        with pytest.warns(UserWarning, match=r"gradients of inner\.0\.weight, inner\.0\.bias in blocks\.0"):
            handle = shard_module(net, plan)
        assert isinstance(net.blocks[0], Doubled)
        assert not hasattr(net.blocks, "mod_name")
        torch.testing.assert_close(net(ids), expected)
        before = state(net)
        with pytest.raises(PlanError, match="sharder-nesting"):
            handle.undo()
        assert_untouched(net, before)


@pytest.mark.ranks(2)
def test_conflicts_go_by_fqn_not_by_prefix(ranks: Ranks) -> None:
    """torch: "emb" is reported to conflict with "emb2.weight", because one text begins with the other."""
    net, spec = Net(), chunk(ranks)
    with pytest.warns(UserWarning, match=r"gradients of inner\.weight in emb "):
        shard_module(net, ShardingPlan({"emb": Doubling(), "emb2.weight": spec}))
    assert isinstance(net.emb, Doubled)
    assert isinstance(net.emb2.weight, DTensor)
    fresh = Net()

    def shard(plan: dict[str, Any], *args: Any) -> Callable[[], object]:
        return lambda: shard_module(fresh, ShardingPlan(plan, *args))

    refused(ranks, fresh, shard({"emb": Doubling(), "emb.weight": spec}), "ambiguous-pattern")
    refused(ranks, fresh, shard({"": Doubling()}), "sharder-nesting")
    refused(ranks, fresh, shard({"blocks": Doubling(), "blocks.0": Doubling()}), "sharder-nesting")
    refused(ranks, fresh, shard({"blocks": Doubling()}, None, ["blocks.0"]), "sharder-nesting")


@pytest.mark.ranks(2)
def test_a_sharder_that_fails_on_one_rank(ranks: Ranks) -> None:
    net = Net()
    before = state(net)
    plan = ShardingPlan({"blocks.0": Breaking(), "fc.weight": chunk(ranks), "emb": Doubling()})
    with pytest.raises(PlanError) as error:
        shard_module(net, plan)
    assert "on rank 1: RuntimeError: cannot shard this" in str(error.value)
    assert_untouched(net, before)
    assert not hasattr(net.blocks[0][0], "extra")  # type: ignore[index]  # a Sequential


class Nesting(Sharder):
    """Shards the module itself, and fails on rank 1 before or after that."""

    def __init__(self, when: str) -> None:
        self.when = when

    def shard(self, module: nn.Module) -> nn.Module:
        fails = dist.get_rank() == 1
        if fails and self.when == "before":
            raise RuntimeError("out of luck")
        plan = ShardingPlan({"0.weight": "tp:S(0)"}, None, ["0"], mesh={"tp": dist.get_world_size()})
        shard_module(module, plan)
        if fails and self.when == "after":
            raise RuntimeError("out of luck")
        return module


@pytest.mark.ranks(4)
def test_a_sharder_that_fails_beside_a_shard_module_of_its_own(ranks: Ranks) -> None:
    """Its peers wait in the inner call's comparison, or have that call's gradient hooks and stale marks."""
    mesh = ranks.mesh((4,), ("tp",))
    for when in ("before", "after"):
        plan = ShardingPlan({"blocks.0": Nesting(when), "fc.weight": "tp:S(0)"}, mesh={"tp": 4})
        for shard in (shard_module, lambda net, plan: plan.apply(net, mesh)):
            net = Net()
            mine = net.blocks[0][0].bias.register_hook(lambda grad: grad)  # type: ignore[index]  # a Sequential
            net.blocks[0].register_buffer("count", torch.zeros(2, dtype=torch.int64))
            before = state(net)
            with pytest.raises(PlanError, match="RuntimeError: out of luck"):
                shard(net, plan)
            assert_untouched(net, before)
            mine.remove()
            assert not any(parameter._backward_hooks for parameter in net.parameters())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.arange(4)).sum().backward()
            optimizer.step()
    net, full = Net(), Net()
    shard_module(net, ShardingPlan({"blocks.0": Nesting("never")}, None, ["fc"], mesh={"tp": 4}))
    ids = torch.arange(4) + ranks.rank
    assert isinstance(net.blocks[0][0].weight, DTensor)  # type: ignore[index]  # a Sequential
    torch.testing.assert_close(net(ids), full(ids))


# ---- single parameters --------------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.ranks(4)
def test_any_dtype_any_shape_bytes_exactly(ranks: Ranks) -> None:
    """torch: int8 fails at requires_grad; buffers are refused; chunks are padded on the wire."""
    dtypes = [torch.int8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
    compared = 0
    for number, dtype in enumerate([*dtypes, torch.int64, torch.float64]):
        shapes = [((9, 3), 0), ((3, 9), -1), ((2, 3), 0), ((0, 3), 0), ((5,), 0), ((4, 3, 2), 1)]
        for shape, dim in shapes[number % 2 :: 2]:  # each shape with 4 or 5 dtypes
            src = number % 4
            own, full = (torch.randint(0, 2, shape, generator=seeded(at)).to(dtype) for at in (ranks.rank, src))
            spec = chunk(ranks, dim)
            holder = nn.Module()
            holder.register_buffer("value", own.t().contiguous().t() if own.dim() == 2 else own)
            handle = shard_parameter(holder, "value", spec, src_rank=src)
            value = holder.value
            assert isinstance(value, DTensor)
            assert value.shape == full.shape
            assert value.dtype == dtype
            (box,) = spec.boxes(shape)[ranks.rank]
            local = value.to_local()
            assert local.shape == box.sizes
            assert torch.equal(local.contiguous().view(torch.uint8), full[box.slices()].contiguous().view(torch.uint8))
            handle.undo()
            assert not isinstance(holder.value, DTensor)
            compared += 1
    assert compared == 27
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.randn(9, 3))
    shard_parameter(holder, "weight", chunk(ranks))  # makes its groups once
    holder.weight = nn.Parameter(torch.randn(9, 3))
    with ranks.record() as log:
        shard_parameter(holder, "weight", chunk(ranks), src_rank=1)
    moved = [event for event in log.events if event.op != "all_gather"]
    assert [event.op for event in moved] == ["all_to_all"]
    # 9 rows of 3 floats on 4 ranks are 3, 3, 3, 0; rank 1 sends what is not its own.
    assert moved[0].bytes_sent == ((36, 0, 36, 0) if ranks.rank == 1 else (0, 0, 0, 0))


@pytest.mark.ranks(2)
def test_shard_parameter(ranks: Ranks) -> None:
    net, spec = Net(), chunk(ranks)
    ids = torch.arange(3)
    expected = net.fc(net.emb(ids))
    with torch.no_grad():
        if ranks.rank == 1:
            net.fc.weight.zero_()
    first = shard_parameter(net.fc, "weight", TorchChunk(0, [f"rank:0/{ranks.device}", f"rank:1/{ranks.device}"]))
    second = shard_parameter(net.fc, "bias", spec)
    out = net.fc(net.emb(ids))
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), torch.cat([expected, expected]).detach())
    with pytest.raises(PlanError, match="model-changed"):
        first.undo()
    second.undo()
    first.undo()
    torch.testing.assert_close(net.fc(net.emb(ids)), expected)
    assert "forward" not in net.fc.__dict__
    # torch: AttributeError, ValueError; and the tie to another module is undone without a word.
    refused(ranks, net, lambda: shard_parameter(net, "nothing", spec), "unmatched-pattern")
    refused(ranks, net, lambda: shard_parameter(net, "fc.weight", spec), "invalid-argument")
    refused(ranks, net, lambda: shard_parameter(net.fc, "weight", Doubling()), "wrong-type", "unknown-name")
    net.emb2.weight = net.emb.weight
    shard_parameter(net.emb, "weight", spec)
    with pytest.raises(PlanError, match=r"parameter-replaced\] weight.* shard a module that holds all ties"):
        torch.optim.SGD(net.parameters(), lr=0.1).zero_grad()
    fresh = Net()
    references = [weakref.ref(parameter) for parameter in fresh.fc.parameters()]
    shard_module(fresh, ShardingPlan({"fc.*": spec}))
    assert [each() for each in references] == [None, None]  # nothing keeps the whole tensors


@pytest.mark.ranks(2)
def test_torch_plans_and_specs_are_taken(ranks: Ranks) -> None:
    net = Net()
    devices = [f"rank:{rank}/{ranks.device}" for rank in range(2)]
    plan = TorchPlan(
        {"fc.weight": TorchChunk(0, devices), "emb.weight": TorchChunk(1, list(devices))},
        {"fc": TorchChunk(0, list(devices))},
        ["fc"],
    )
    ids = torch.arange(4)
    expected = net(ids)
    handle = shard_module(net, plan)
    assert handle.plan is plan
    torch.testing.assert_close(net(ids), expected)
    handle.undo()
    torch.testing.assert_close(net(ids), expected)
