"""Sharded nn.Embedding against the unsharded module on the concatenated batch; the forward of a bag is refused."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from rank_orders import chunk
from ranktest import Ranks, fake_cuda
from shard_spec import shard_module, shard_parameter
from shard_spec._shared.problems import PlanError
from shard_spec.legacy.hooks import look_up
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, ShardMetadata
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

# On 4 ranks each option meets one spec and each spec every third option; on 2 ranks, and here, all meet all.
ALL = bool(os.environ.get("SHARD_SPEC_ALL"))
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}  # other order of summation


def specs(ranks: Ranks, rows: int, columns: int) -> list[ShardingSpec]:
    """Rows, columns, and on 4 ranks a grid."""
    devices = [f"rank:{rank}/{ranks.device}" for rank in range(ranks.world_size)]
    listed: list[ShardingSpec] = [ChunkShardingSpec(dim, devices) for dim in (0, 1)]
    if ranks.world_size == 4:
        intervals = (
            [(0, -(-rows // 2)), (-(-rows // 2), rows // 2)],
            [(0, -(-columns // 2)), (-(-columns // 2), columns // 2)],
        )
        boxes = [((r, c), (h, w)) for r, h in intervals[0] for c, w in intervals[1]]
        shards = [ShardMetadata(*box, device) for device, box in zip(devices, boxes, strict=True)]
        listed.append(EnumerableShardingSpec(shards))
    return listed


def met(ranks: Ranks, options: list[Any], number: int) -> list[Any]:
    """The options that spec ``number`` is tried with."""
    return options if ALL or ranks.world_size == 2 else options[number % 3 :: 3]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(
    ranks: Ranks, full: nn.Module, spec: ShardingSpec, batches: list[tuple[Any, ...]], joined: tuple[Any, ...]
) -> int:
    """Forward, backward and the weight after it, twice; ``batches`` by rank, ``joined`` for the unsharded module."""
    full, sharded = copy.deepcopy(full), copy.deepcopy(full)
    shard_parameter(sharded, "weight", spec)
    for _ in range(2):
        expected, actual = full(*joined), sharded(*batches[ranks.rank])
        rows = ranks.gather(actual.shape[0])
        start = sum(rows[: ranks.rank])
        torch.testing.assert_close(actual, expected[start : start + actual.shape[0]].detach(), **CLOSE)
        assert sum(rows) == expected.shape[0]
        if expected.requires_grad:
            expected.square().sum().backward()
            actual.square().sum().backward()
            torch.testing.assert_close(whole(sharded.weight.grad), full.weight.grad, **CLOSE)
        torch.testing.assert_close(whole(sharded.weight), full.weight, **CLOSE)
    return 2


@pytest.mark.ranks(2, 4)
def test_embeddings(ranks: Ranks) -> None:
    torch.manual_seed(0)
    compared = 0
    options: list[dict[str, Any]] = [
        {},
        {"padding_idx": 3},
        {"padding_idx": -1},
    ]
    for rows, columns in ((9, 5), (2, 3)):
        world = ranks.world_size
        ids = list(torch.randint(0, rows, (2 * world - 1, 4), generator=torch.Generator().manual_seed(0)).chunk(world))
        for number, spec in enumerate(specs(ranks, rows, columns)):
            for option in met(ranks, options, number):
                full = nn.Embedding(
                    rows, columns, dtype=torch.float64, **{"padding_idx": None, **option} if rows > 3 else {}
                )
                compared += check(ranks, full, spec, [(each,) for each in ids], (torch.cat(ids),))
    # One dim, int32, and a rank without rows.
    count = ranks.world_size
    flat = [torch.arange(chunk(count - 1, count, at), dtype=torch.int32) % 9 for at in range(count)]
    for spec in specs(ranks, 9, 5):
        compared += check(ranks, nn.Embedding(9, 5).double(), spec, [(each,) for each in flat], (torch.cat(flat),))
    # Integer tables.
    table = nn.Embedding(9, 5, _weight=torch.arange(45, dtype=torch.int8).view(9, 5), _freeze=True)
    for spec in specs(ranks, 9, 5):
        compared += check(ranks, table, spec, [(each,) for each in flat], (torch.cat(flat),))
    assert compared == 2 * sum(2 * len(met(ranks, options, at)) + 2 for at in range(len(specs(ranks, 9, 5))))


@pytest.mark.ranks(2)
def test_the_forward_of_a_bag_with_a_sharded_table_is_refused(ranks: Ranks) -> None:
    """The table may be sharded, for a module around it that looks ids up itself; its own forward sends nothing."""
    torch.manual_seed(0)
    ids = torch.arange(6).view(2, 3)
    for mode in ("sum", "mean", "max"):
        for spec in specs(ranks, 9, 5):
            full = nn.EmbeddingBag(9, 5, mode=mode)
            single, module = copy.deepcopy(full), nn.Sequential(copy.deepcopy(full))
            handles = [
                shard_parameter(single, "weight", spec),
                shard_module(module, ShardingPlan({"0.weight": spec})),
            ]
            for bag in (single, module):
                refused = pytest.raises(PlanError, match=r"module-not-shardable.*nn\.EmbeddingBag.*nn\.Embedding")
                with ranks.record(allow_empty=True) as log, refused:
                    bag(ids if ranks.rank else ids[:1])
                assert log.count("all_gather") == len(log.events)  # modules are compared, and nothing is sent
            assert torch.equal(whole(single.weight), full.weight)
            for handle in handles:
                handle.undo()
            assert torch.equal(module(ids), full(ids))


@pytest.mark.ranks(2)
def test_what_a_lookup_moves(ranks: Ranks) -> None:
    """Each rank sends its ids, and for each row the columns it has; where the backend has no all_to_all, to all."""
    model = nn.Embedding(8, 6)
    shard_parameter(model, "weight", specs(ranks, 8, 6)[1])
    ids = torch.arange(4) + ranks.rank
    with ranks.record() as log:
        out = model(ids)
    # Modules and inputs are compared; then the ids, and the rows.
    assert log.ops == ("all_gather",) * 4, log.events
    assert [sum(event.bytes_sent) for event in log.events] == [64, 64, 4 * 8, 8 * 3 * 4]
    with ranks.record() as log:
        out.sum().backward()
    assert log.ops == ("all_gather",)
    assert log.bytes_sent() == 8 * 3 * 4


@pytest.mark.ranks(2)
def test_wrong_ids_raise_on_every_rank(ranks: Ranks) -> None:
    """A masked lookup gives zeros for an id that no rank has; nn.Embedding raises."""
    model = nn.Sequential(nn.Embedding(9, 4))
    spec = specs(ranks, 9, 4)[0]
    shard_module(model, ShardingPlan({"0.weight": spec}))
    for wrong in (9, -1):
        ids = torch.tensor([[1, wrong if ranks.rank == 1 else 2]])
        with pytest.raises(IndexError, match="9 rows"):
            model[0](ids)
    cases: list[tuple[int, tuple[Any, ...], str]] = [
        (0, (torch.tensor([[1, 2]]) if ranks.rank else torch.tensor([[1, 2, 3]]),), "ranks-disagree"),
        (0, (torch.tensor([1, 2]) if ranks.rank else torch.tensor([1, 2], dtype=torch.int32),), "ranks-disagree"),
        (0, (torch.tensor([1.0, 2.0]),), "int64 or int32"),
        (0, (torch.tensor(1),), "rows in dim 0"),
    ]
    for at, arguments, text in cases:
        with pytest.raises(PlanError, match=text) as error:
            model[at](*arguments)
        assert len(set(ranks.gather(str(error.value)))) == 1
    with pytest.raises(PlanError, match="grad mode"), torch.set_grad_enabled(ranks.rank == 0):
        model[0](torch.tensor([1]))
    with pytest.raises(PlanError, match="autocast"), torch.autocast(ranks.device.type, enabled=ranks.rank == 0):
        model[0](torch.tensor([1]))
    assert model[0](torch.tensor([1, 2])).shape == (2, 4)


@pytest.mark.ranks(2)
def test_tables_whose_options_need_all_ids_are_refused(ranks: Ranks) -> None:
    """Each rank would scale the rows, or the gradients, of its own ids alone: the replicas drifted apart silently."""
    options: list[dict[str, Any]] = [{"max_norm": 1.0}, {"scale_grad_by_freq": True}]
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for option in options:
            for rules in ({"1.weight": "tp:S(0)"}, {"1.weight": "tp:S(0)", "0.weight": "tp:R"}):
                net = nn.Sequential(kind(6, 4, **option), nn.Linear(4, 4))
                with pytest.raises(PlanError, match=rf"unsupported-option\] 0\.weight: .* with {next(iter(option))} "):
                    shard_module(net, ShardingPlan(rules, mesh={"tp": 2}))
            with pytest.raises(PlanError, match=rf"unsupported-option\] 0\.weight: .*\({next(iter(option))}="):
                shard_module(nn.Sequential(kind(6, 4, **option)), ShardingPlan({"0.weight": "S(0)"}, mesh={"tp": 2}))


def test_lookups_in_shards_sum_to_a_lookup() -> None:
    table, ids = torch.randn(9, 3), torch.randint(0, 9, (4, 2))
    for sizes in ([9], [5, 4], [3, 3, 3, 0], [0, 1, 8]):
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        shards = [
            look_up(ids, table[start : start + size], start, None) for start, size in zip(starts, sizes, strict=True)
        ]
        assert torch.equal(torch.stack(shards).sum(0), F.embedding(ids, table))


def test_nothing_is_read_back_from_the_device() -> None:
    """On an accelerator a lookup issues work and never waits for it."""
    with fake_cuda(rank=1, world_size=2) as device:
        table, ids = torch.randn(5, 3, device=device), torch.randint(0, 9, (6, 2), device=device)
        values = look_up(ids, table, 4, 2)
        assert (values.shape, values.device) == ((6, 2, 3), device)
        assert look_up(ids, table[:0], 9, None).device == device
