"""A mistake on one rank raises on all of them, within seconds, with the rank and its error.

Before, each of these left the other ranks in a collective until the group's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_spec import PlanError, apply_plan, shard_module, shard_parameter
from shard_spec.layout.mesh import MeshSpec
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ChunkShardingSpec
from torch import nn
from torch.distributed.tensor import DTensor

RULES = {"0.weight": "tp:S(0)", "0.bias": "tp:S(0)", "2.weight": "tp:S(1)", "3.weight": "tp:S(1)"}
LOCAL = ["2", "3"]
PLAN = ShardingPlan(RULES, None, LOCAL, mesh={"tp": 2})


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def told(ranks: Ranks, call: Callable[[], object], code: str, *words: str) -> None:
    """``call`` raises the same error on every rank, soon, and it has this code and these words."""
    started = time.monotonic()
    with pytest.raises(PlanError) as caught:
        call()
    assert time.monotonic() - started < 10  # the group waits 30 s
    texts = ranks.gather(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert code in {problem.code for problem in caught.value.problems}, texts[0]
    assert all(word in texts[0] for word in words), texts[0]


@pytest.mark.ranks(2)
def test_calls_that_one_rank_gets_wrong(ranks: Ranks) -> None:
    odd, mesh = ranks.rank == 1, ranks.mesh((2,), ("tp",))
    spec = ChunkShardingSpec(0, [f"rank:{rank}/{ranks.device}" for rank in range(2)])
    net = network()
    before = list(net.parameters())
    told(ranks, lambda: shard_parameter(net[0], 3 if odd else "weight", spec), "invalid-argument", "on rank 1")  # type: ignore[arg-type]  # that is the fault
    told(ranks, lambda: shard_parameter(net[0], "weight", None if odd else spec), "wrong-type", "on rank 1")
    told(ranks, lambda: shard_parameter(3 if odd else net[0], "weight", spec), "wrong-type", "on rank 1")  # type: ignore[arg-type]  # as above
    group = mesh.get_group()
    told(ranks, lambda: apply_plan(net, None if odd else mesh, PLAN, group=group), "wrong-type", "on rank 1")  # type: ignore[arg-type]  # as above
    told(ranks, lambda: shard_module(net, ShardingPlan(RULES, mesh={"tp": 1 + odd})), "rank-outside-mesh")
    table = nn.Embedding(8, 4, padding_idx=1 if odd else None)
    told(ranks, lambda: shard_parameter(table, "weight", spec), "ranks-disagree", "padding_idx=1")

    def failing(name: str, tensor: torch.Tensor) -> None:
        tensor.zero_()
        if odd and name == "2.weight":
            raise RuntimeError("no such file")

    with torch.device("meta"):
        empty = network()
    layout = ShardingPlan(RULES, mesh={"tp": 2})
    told(
        ranks,
        lambda: layout.apply(empty, mesh, source="meta", init=failing),
        "rank-failed",
        "on rank 1",
        "no such file",
    )
    assert all(p.is_meta for p in empty.parameters())
    assert all(p is q for p, q in zip(before, net.parameters(), strict=True))


@pytest.mark.ranks(4)
def test_meshes_of_another_shape_on_one_rank(ranks: Ranks) -> None:
    shape = (4, 1) if ranks.rank == 3 else (2, 2)
    plan = ShardingPlan({"0.weight": "a:S(0), b:S(0)"}, mesh=MeshSpec({"a": shape[0], "b": shape[1]}))
    told(ranks, lambda: shard_module(network(), plan), "ranks-disagree", "rank 3", "4 x 1")
    out = ShardingPlan({}, {"0": "a:S(0), b:S(0)"}, mesh=MeshSpec({"a": shape[0], "b": shape[1]}))
    told(ranks, lambda: shard_module(network(), out), "ranks-disagree", "rank 3", "4 x 1")


def freeze(net: Any) -> None:
    net[2].weight.requires_grad_(False)


def freeze_whole(net: Any) -> None:
    net[4].requires_grad_(False)


def change_dtype(net: Any) -> None:
    net[3].double()


def replace_weight(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.zeros(8, 6))


def replace_bias(net: Any) -> None:
    net[0].bias = nn.Parameter(torch.zeros(8))


def replace_module(net: Any) -> None:
    net[4] = nn.Linear(4, 4)


def append(net: Any) -> None:
    net.append(nn.Linear(4, 4))


def take_away(net: Any) -> None:
    del net[4]


FAULTS: dict[Callable[[Any], None], tuple[str, ...]] = {
    freeze: ("ranks-disagree", "rank 1: 2.weight: float32, a shard, frozen"),
    freeze_whole: ("ranks-disagree", "4.weight: float32, whole, frozen"),
    change_dtype: ("ranks-disagree", "3.weight: float64"),
    replace_weight: ("not-sharded", "0.weight", "on rank 1"),
    replace_bias: ("not-sharded", "0.bias", "on rank 1"),
    replace_module: ("ranks-disagree", "rank 1: 4.weight", "new, with values"),
    append: ("ranks-disagree", "rank 1: 5.weight", "rank 0: nothing"),
    take_away: ("ranks-disagree", "rank 1: nothing"),
}


@pytest.mark.ranks(2)
def test_modules_that_one_rank_changes_after_the_call(ranks: Ranks) -> None:
    x = torch.randn(3, 6)
    net = network()
    shard_module(net, PLAN)
    with ranks.record() as log:
        net(x).sum().backward()
    # 64 bytes to compare the modules, and for each of two batches of rows that enter.
    assert sum(event.dtype == torch.uint8 for event in log.events) == 3
    for change, words in FAULTS.items():
        net = network()
        shard_module(net, PLAN)
        net(x)
        if ranks.rank == 1:
            change(net)
        for _ in range(2 if change is replace_module else 1):  # and again, until it is put right
            told(ranks, lambda n=net: n(x), *words)  # type: ignore[misc]  # mypy cannot type the default


@pytest.mark.ranks(2)
def test_inputs_that_one_rank_gets_wrong(ranks: Ranks) -> None:
    odd = ranks.rank == 1
    tables = {"0.weight": "tp:S(0)"}
    ids = torch.arange(3)
    net, table = network(), nn.Sequential(nn.Embedding(8, 4))
    for module, rules in ((net, RULES), (table, tables)):
        shard_module(module, ShardingPlan(rules, None, LOCAL if module is net else None, mesh={"tp": 2}))
    x, none = torch.randn(3, 6), torch.empty(3, 6, device="meta")
    for wrong, words in ((None, "NoneType"), ([1.0], "list"), (none, "an input on meta"), (x[0], "local batch")):
        told(ranks, lambda w=wrong: net(w if odd else x), "invalid-argument", "on rank 1: ", words)  # type: ignore[misc]  # mypy cannot type the default
    told(ranks, lambda: net(x.double() if odd else x), "ranks-disagree", "float64")
    told(ranks, lambda: table("a" if odd else ids), "invalid-argument", "type str")
    told(ranks, lambda: table(x if odd else ids), "invalid-argument", "float32")
    assert net(x).shape == (3, 4)


@pytest.mark.ranks(2)
def test_undo_where_one_rank_has_other_gradients_or_dtypes(ranks: Ranks) -> None:
    net, x = network(), torch.randn(3, 6)
    handle = shard_module(net, PLAN)
    net(x).sum().backward()
    if ranks.rank == 1:
        net[0].weight.grad = None
    told(ranks, handle.undo, "ranks-disagree", "undo 0.weight: float32, no gradient")
    net.zero_grad()
    if ranks.rank == 1:
        net.half()
    told(ranks, handle.undo, "ranks-disagree", "float16")
    net.float()
    assert isinstance(net[0].weight, DTensor)
    handle.undo()
    told(ranks, handle.undo, "already-applied")
    assert not any(isinstance(p, DTensor) for p in net.parameters())


@pytest.mark.ranks(2)
def test_newcomers_with_other_values_are_refused_until_they_are_alike(ranks: Ranks) -> None:
    net, x = network(), torch.randn(3, 6)
    handle = shard_module(net, PLAN)
    torch.manual_seed(ranks.rank)
    net.append(nn.Linear(4, 4))
    for _ in range(2):
        told(ranks, lambda: net(x), "ranks-disagree", "5.weight", "new, with values")
    shard_module(net[5], ShardingPlan({}))  # rank 0's values
    with ranks.record() as log:
        net(x).sum().backward()
    assert sum(event.dtype == torch.uint8 for event in log.events) == 4  # net[5] is the root of a call of its own
    assert len({float(grad.sum()) for grad in ranks.gather(net[5].weight.grad)}) == 1
    # Where no sharded module is asked too.
    model = nn.Sequential(nn.Linear(4, 4))
    shard_module(model, ShardingPlan({}))
    torch.manual_seed(ranks.rank)
    model.append(nn.BatchNorm1d(4))
    model.append(nn.Linear(4, 4))
    told(ranks, lambda: model(x[:, :4]), "ranks-disagree", "2.weight", "new, with values")
    with torch.no_grad():
        for each in model[2].parameters():
            each.fill_(0.5)
    model(x[:, :4]).sum().backward()
    with ranks.record() as log:
        model(x[:, :4])
    assert [event.dtype for event in log.events] == [torch.uint8]
    handle.undo()
    assert len(net) == 6
    assert not any(isinstance(p, DTensor) for p in net.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", ["scatter", "local"])
def test_one_element_may_have_any_stride(ranks: Ranks, source: Any) -> None:
    """Torch calls it contiguous, and yet refuses to view it as bytes; the source alone would have raised."""
    net = network()
    net.register_buffer("one", torch.arange(12.0).view(3, 4).t()[1:2, 1:2])
    assert net.one.is_contiguous() and torch.equal(net.one, torch.tensor([[5.0]]))
    ShardingPlan({"0.weight": "tp:S(0)"}, mesh={"tp": 2}).apply(net, ranks.mesh((2,), ("tp",)), source=source)
    assert net.one.full_tensor().tolist() == [[5.0]] and isinstance(net[0].weight, DTensor)
