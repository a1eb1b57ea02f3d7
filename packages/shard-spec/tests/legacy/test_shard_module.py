"""Sharded modules train as the unsharded module does on the concatenated batch: 5 steps, in float64, on real ranks."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from imported_first import before_ranks  # noqa: F401  # ranktest calls it
from rank_orders import chunk, needs_orders
from ranktest import Ranks
from shard_spec import shard_module, shard_parameter
from shard_spec._shared.problems import PlanError
from shard_spec.sharding_plan import ShardingPlan
from shard_spec.specs import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 5
ALL = bool(os.environ.get("SHARD_SPEC_ALL"))  # every case on every number of ranks
# Sums over columns and ranks are formed in another order than in one process.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def devices(ranks: Ranks, order: list[int] | None = None) -> list[str]:
    return [f"rank:{rank}/{ranks.device}" for rank in (order or range(ranks.world_size))]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def train_and_compare(
    ranks: Ranks,
    model: nn.Module,
    plan: ShardingPlan,
    batch: Callable[[int, int], torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    members: list[int] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **kwargs: Any,
) -> nn.Module:
    """Shard a copy of ``model``, train both, compare outputs, losses and every parameter at every step.

    ``batch(step, rank)`` is what rank ``rank`` of the group passes. Returns the sharded module.
    """
    members = members or list(range(ranks.world_size))
    me = members.index(ranks.rank)
    reference, sharded = model, copy.deepcopy(model)
    if me != kwargs.get("src_rank", 0):
        with torch.no_grad():
            for tensor in [*sharded.parameters(), *sharded.buffers()]:
                tensor.zero_()  # only the source's values count
    handle = shard_module(sharded, plan, process_group=group, **kwargs)
    trained = [p for p in reference.parameters() if p.requires_grad]
    ours = [p for p in sharded.parameters() if p.requires_grad]
    assert len(trained) == len(ours) > 0
    one, two = optimizer(trained, lr=0.05), optimizer(ours, lr=0.05)
    compared = 0
    for step in range(STEPS):
        inputs = [batch(step, at) for at in range(len(members))]
        start = sum(each.shape[0] for each in inputs[:me])
        expected = reference(torch.cat(inputs))
        actual = sharded(inputs[me])
        mine = expected[start : start + inputs[me].shape[0]]
        torch.testing.assert_close(actual, mine.detach(), **CLOSE)
        row = expected.shape[1:]
        weights = torch.linspace(-1, 1, row.numel(), dtype=mine.dtype).view(row)
        (expected.square() * weights).sum().backward()
        (actual.square() * weights).sum().backward()
        for (name, full), piece in zip(reference.named_parameters(), sharded.parameters(), strict=True):
            assert (full.grad is None) == (piece.grad is None), name
            if full.grad is not None and piece.grad is not None:
                torch.testing.assert_close(whole(piece.grad), full.grad, **CLOSE, msg=lambda m: f"{name}: {m}")  # noqa: B023
        one.step(), two.step()
        one.zero_grad(), two.zero_grad()
        for (name, full), piece in zip(reference.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(whole(piece), full.detach(), **CLOSE, msg=lambda m: f"{name}: {m}")  # noqa: B023
            compared += 1
    assert compared == STEPS * len(list(model.parameters()))
    assert handle.plan is plan
    return sharded


class MLP(nn.Module):
    def __init__(self, features: int = 6, hidden: int = 9, out: int = 5, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden, bias=bias)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(hidden, out, bias=bias)
        self.norm = nn.LayerNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.fc2(self.gelu(self.fc1(x))))
        return normed


def rows_of(features: int, rows: Callable[[int], int] = lambda rank: 3) -> Callable[[int, int], torch.Tensor]:
    def batch(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(rows(rank), features, generator=generator, dtype=torch.float64)

    return batch


@pytest.mark.ranks(2, 4)
def test_column_then_row_with_output_plan_and_local_rows(ranks: Ranks) -> None:
    """The seed's own example: torch 2.13 raises on it, linear on a ShardedTensor has no implementation any more."""
    torch.manual_seed(0)
    plan = ShardingPlan(
        {
            "fc1.weight": ChunkShardingSpec(0, devices(ranks)),
            "fc1.bias": ChunkShardingSpec(0, devices(ranks)),
            "fc2.weight": ChunkShardingSpec(1, devices(ranks)),
        },
        output_plan={"fc2": ChunkShardingSpec(0, devices(ranks))},
        return_local_tensor=["fc2"],
    )
    train_and_compare(ranks, MLP().double(), plan, rows_of(6))


@pytest.mark.ranks(2, 4)
def test_every_way_of_sharding_two_linears(ranks: Ranks) -> None:
    """Rows, columns, torch's specs, no bias, biases sharded alone, uneven rows of the batch."""
    world = ranks.world_size
    cases: list[tuple[dict[str, Any], dict[str, Any] | None, list[str], bool]] = [
        ({"fc1.weight": 0, "fc2.weight": 1}, {"fc2": 0}, ["fc2"], True),
        ({"fc1.weight": 0, "fc2.weight": 1}, None, ["fc2"], True),
        ({"fc1.weight": -1, "fc2.weight": -2}, {"fc1": -2, "fc2": 0}, ["fc1", "fc2"], True),
        ({"fc1.weight": 1, "fc2.weight": 0}, None, ["fc1", "fc2"], False),
        ({"fc1.bias": 0, "fc2.bias": 0}, None, [], True),
        ({"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": 0}, {"fc1": 1}, ["fc2"], True),
        ({"fc1.weight": 1}, {"fc1": 0}, ["fc1"], True),
    ]
    for number, (dims, outputs, local, bias) in enumerate(cases):
        if world > 2 and number not in (0, 2, 3, 5) and not ALL:
            continue
        torch.manual_seed(number)
        spec = {dim: ChunkShardingSpec(dim, devices(ranks)) for dim in range(-2, 2)}
        plan = ShardingPlan(
            {name: spec[dim] for name, dim in dims.items()},
            None if outputs is None else {name: spec[dim] for name, dim in outputs.items()},
            local,
        )
        uneven = number % 2 == 1
        batch = rows_of(6, (lambda rank: chunk(2 * world - 1, world, rank)) if uneven else (lambda rank: 2))
        train_and_compare(ranks, MLP(bias=bias).double(), plan, batch, src_rank=number % world)


@needs_orders
@pytest.mark.ranks(4)
def test_groups_in_reversed_order_and_grids(ranks: Ranks) -> None:
    members = [3, 1]
    group = dist.new_group(members, sort_ranks=False)
    if ranks.rank in members:
        torch.manual_seed(3)
        spec = {dim: ChunkShardingSpec(dim, devices(ranks, members)) for dim in (0, 1)}
        plan = ShardingPlan({"fc1.weight": spec[0], "fc2.weight": spec[1]}, {"fc2": spec[0]}, ["fc2"])
        train_and_compare(ranks, MLP().double(), plan, rows_of(6, lambda at: 3 - at), group=group, members=members)
    # A 2 x 2 grid of the 9 x 6 weight, its 9 rows cut 5 + 4.
    cells = [(0, 0, 5, 3), (0, 3, 5, 3), (5, 0, 4, 3), (5, 3, 4, 3)]
    shards = [ShardMetadata([r, c], [h, w], f"rank:{at}/{ranks.device}") for at, (r, c, h, w) in enumerate(cells)]
    plan = ShardingPlan({"fc1.weight": EnumerableShardingSpec(shards)}, None, ["fc1"])
    torch.manual_seed(4)
    train_and_compare(ranks, MLP().double(), plan, rows_of(6, lambda at: chunk(3, 4, at)))
    # Two axes on one dim, the later one first: plan.apply has strided shards for it.
    rule = "dp:S(0), tp:S(0); order=tp>dp"
    with pytest.raises(PlanError, match=r"not-expressible.*in mesh order"):
        shard_module(MLP(), ShardingPlan({"fc1.*": rule}, mesh={"dp": 2, "tp": 2}))


class Tied(nn.Module):
    """An embedding tied to the head, a frozen layer, an int8 parameter, and a bool and an int64 buffer."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.fc = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.emb.weight
        self.table = nn.Parameter(torch.arange(18, dtype=torch.int8).view(9, 2), requires_grad=False)
        self.register_buffer("mask", torch.arange(9) % 2 == 0)
        self.register_buffer("codes", torch.arange(9), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.frozen(torch.tanh(self.fc(self.emb(ids)))))
        return logits


def ids_of(rows: Callable[[int], int], length: int = 4, num: int = 9) -> Callable[[int, int], torch.Tensor]:
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randint(0, num, (rows(rank), length), generator=torch.Generator().manual_seed(7 * step + rank))

    return batch


@pytest.mark.ranks(2, 4)
def test_tied_frozen_integer_and_buffers(ranks: Ranks) -> None:
    """torch: the tie is cut, frozen parameters become trainable, int8 parameters and buffers fail."""

    def rows(rank: int) -> int:
        return chunk(2 * ranks.world_size - 1, ranks.world_size, rank)

    for dim in (0, 1) if ALL or ranks.world_size == 2 else (1,):
        torch.manual_seed(2 + dim)
        spec = {at: ChunkShardingSpec(at, devices(ranks)) for at in (0, 1)}
        plan = ShardingPlan(
            {
                "head.weight": spec[dim],
                "frozen.weight": spec[0],
                "table": spec[0],
                "mask": spec[0],
                "codes": spec[0],
            },
            {"frozen": spec[0]},
            ["frozen", "head"],
        )
        model = Tied().double()
        model.table.data = model.table.data.to(torch.int8)
        sharded = train_and_compare(ranks, model, plan, ids_of(rows))
        assert isinstance(sharded, Tied)
        assert sharded.emb.weight is sharded.head.weight
        assert not sharded.frozen.weight.requires_grad
        assert not sharded.frozen.bias.requires_grad
        for name in ("table", "mask", "codes"):
            value, expected = getattr(sharded, name), getattr(model, name)
            assert isinstance(value, DTensor), name
            assert value.dtype == expected.dtype
            assert torch.equal(whole(value), expected), name
        assert "codes" not in sharded.state_dict()
        assert set(sharded.state_dict()) == set(model.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_half_precision_and_autocast(ranks: Ranks, dtype: torch.dtype | None) -> None:
    """Two halves of a sum are rounded once more than the sum: outputs and gradients within 2 % of the largest."""
    torch.manual_seed(0)
    param_dtype = dtype or torch.float32
    model = MLP().to(param_dtype)
    sharded = copy.deepcopy(model)
    spec = {dim: ChunkShardingSpec(dim, devices(ranks)) for dim in (0, 1)}
    plan = ShardingPlan({"fc1.weight": spec[0], "fc2.weight": spec[1]}, None, ["fc2"])
    shard_module(sharded, plan)
    batches = [rows_of(6)(0, rank).to(param_dtype) for rank in range(2)]
    weights = torch.linspace(-1, 1, 5)
    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=dtype is None):
        expected, actual = model(torch.cat(batches)), sharded(batches[ranks.rank])
    assert actual.dtype == expected.dtype
    losses = [(out.float().square() * weights).sum() for out in (expected, actual)]
    for loss in losses:
        loss.backward()
    compared = [(actual.detach(), expected[3 * ranks.rank :][:3].detach())]
    for mine, full in zip(sharded.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert full.grad is not None
        assert mine.grad.dtype == full.grad.dtype == param_dtype
        compared.append((whole(mine.grad), full.grad))
    assert len(compared) == 7
    for value, reference in compared:
        assert (value - reference).abs().max() <= 0.02 * reference.abs().max()


@pytest.mark.extra("transformers")
@pytest.mark.ranks(2)
def test_a_llama_with_every_matrix_sharded(ranks: Ranks) -> None:
    """Tied table and head, grouped heads, layers recomputed from the third step on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 33, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False, attn_implementation="eager")
    full = LlamaForCausalLM(config).double()
    sharded = copy.deepcopy(full)
    linears = [name for name, each in full.named_modules() if isinstance(each, nn.Linear)]
    rules = {f"{name}.weight": f"tp:S({at % 2})" for at, name in enumerate(linears) if name != "lm_head"}
    plan = ShardingPlan({**rules, "model.embed_tokens.weight": "tp:S(0)"}, None, linears, mesh={"tp": 2})
    shard_module(sharded, plan)
    assert sum(isinstance(p, DTensor) for p in sharded.parameters()) == 15
    pairs = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False) for model in (full, sharded)]
    compared = 0
    for step in range(STEPS):
        for model in (full, sharded) if step == 2 else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers renames it
                model.gradient_checkpointing_enable()
        ids = torch.randint(0, 33, (3, 7), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(2)[ranks.rank]
        expected, actual = full(input_ids=ids).logits, sharded(input_ids=mine).logits
        torch.testing.assert_close(actual, expected.chunk(2)[ranks.rank].detach(), **CLOSE)
        for out, optimizer in zip((expected, actual), pairs, strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
        for (name, one), two in zip(full.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(whole(two.grad), one.grad, **CLOSE, msg=name)
            torch.testing.assert_close(whole(two), one.detach(), **CLOSE, msg=name)
            compared += 1
    assert compared == STEPS * 20


@pytest.mark.ranks(2)
def test_a_wrong_argument_of_shard_parameter_on_one_rank_is_every_ranks_error(ranks: Ranks) -> None:
    """Names that no mapping takes as a key, and specs that are none: nobody waits, and nothing changes."""
    model = nn.Linear(4, 4)
    before = dict(model.named_parameters())
    good: tuple[Any, Any] = "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    wrong: list[tuple[Any, Any]] = [(["weight"], good[1]), (3, good[1]), ("a.b", good[1]), ("weight", "rows"), ("w", 3)]
    for name, spec in wrong:
        with pytest.raises(PlanError) as caught:
            shard_parameter(model, *((name, spec) if ranks.rank == 1 else good))
        assert len(set(ranks.gather(str(caught.value)))) == 1
        assert not {problem.code for problem in caught.value.problems}.isdisjoint({"invalid-argument", "wrong-type"})
    assert dict(model.named_parameters()) == before
    shard_parameter(model, *good)
    assert isinstance(model.weight, DTensor)
