"""OptimalPlanner: the model's costs by hand, its plans against hand-written ones, memory, and what does not fit."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import RECIPES, assignment, price
from shard_spec import MeshSpec, PlanError
from shard_spec.estimate.communication import AlphaBetaCostModel, Link, Topology
from shard_spec.estimate.memory import Memory
from shard_spec.optimal import OptimalPlanner, Workload
from shard_spec.optimal.model import moving
from torch import Tensor, nn

MACHINE = Topology(10**9, 8, 100e9, 10e9, 1e-6, 1e13, name="test")


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    def __init__(
        self, width: int = 64, num_heads: int = 8, num_layers: int = 4, vocab: int = 128, tied: bool = False
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight


def meta(**options: Any) -> GPT:
    with torch.device("meta"):
        return GPT(**options)


def planner(mesh: dict[str, int], workload: Workload, **options: Any) -> OptimalPlanner:
    return OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), MACHINE, mesh=mesh, workload=workload, **options)


# ---- the model's costs ----


def test_moving_costs_what_its_collectives_cost() -> None:
    model, link = AlphaBetaCostModel(1.0, 1.0), Link(4, 10.0, 1.0)
    pairs = {
        ("b", "b"): 0.0,
        ("r", "s"): 0.0,
        ("p", "r"): model.all_reduce(400, link),
        ("p", "s"): model.reduce_scatter(400, link),
        ("s", "r"): model.all_gather(400, link),
        ("h", "s"): model.all_to_all(100, link),
    }
    for (before, after), seconds in pairs.items():
        assert moving(before, after, 400, [link], model) == seconds
    # Along two axes the second sees what the first left: a quarter after cutting, all of it after gathering.
    assert moving(("r", "p"), ("b", "r"), 400, [link, link], model) == model.all_reduce(100, link)
    assert moving(("b", "p"), ("r", "r"), 400, [link, link], model) == model.all_gather(400, link) + model.all_reduce(
        400, link
    )


def test_megatron_costs_two_all_reduces_a_block() -> None:
    workload = Workload(batch=2, sequence=32, recompute=False)
    model = meta(num_layers=3)
    machine = replace(MACHINE, flops=1e30)  # communication alone
    cost = price(
        OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), machine, mesh={"tp": 8}, workload=workload),
        model,
        {"tp": "megatron"},
    )
    link = machine.link({"tp": 8}, "tp")
    one = AlphaBetaCostModel(1.0, 1.0).all_reduce(2 * 32 * 64 * 2, link)
    blocks = 3 * 2 * 2  # layers, blocks, forward and backward
    assert cost.seconds == pytest.approx((blocks + 2) * one, rel=1e-6)  # and embedding forward, head backward
    sequence = OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), machine, mesh={"tp": 8}, workload=workload)
    split_cost = price(sequence, model, {"tp": "megatron+sequence"})
    assert split_cost.seconds == pytest.approx(cost.seconds, rel=1e-6)  # an all-reduce in two halves
    assert split_cost.memory_bytes < cost.memory_bytes


def test_data_parallel_costs_its_gradients_and_fsdp_three_halves() -> None:
    workload = Workload(batch=8, sequence=32)
    machine = replace(MACHINE, flops=1e30, latency=0.0)
    plan = OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), machine, mesh={"dp": 8}, workload=workload)
    model = meta()
    weights = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name and "mlp.2.bias" not in name)
    link = machine.link({"dp": 8}, "dp")
    data, fsdp = price(plan, model, {"dp": "data"}), price(plan, model, {"dp": "fsdp"})
    assert data.seconds == pytest.approx(AlphaBetaCostModel(1.0, 1.0).all_reduce(weights * 2, link), rel=1e-6)
    assert fsdp.seconds == pytest.approx(1.5 * data.seconds, rel=1e-6)
    assert data.memory_bytes - fsdp.memory_bytes == pytest.approx(weights * 16 * 7 / 8, abs=100)
    half = replace(plan.workload, overlap=0.5)
    assert price(
        OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), machine, mesh={"dp": 8}, workload=half), model, {"dp": "data"}
    ).seconds == pytest.approx(data.seconds / 2, rel=1e-6)


def test_compute_is_six_operations_per_weight_and_token_and_eight_when_recomputed() -> None:
    machine = Topology(10**12, 8, 1e30, 1e30, 0.0, 1e12)
    model = meta(num_layers=2)
    weights = 2 * 12 * 64 * 64
    head = 64 * 128
    for recompute, passes in ((False, 6), (True, 8)):
        workload = Workload(batch=8, sequence=32, recompute=recompute, causal=False)
        cost = price(
            OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), machine, mesh={"dp": 8}, workload=workload),
            model,
            {"dp": "data"},
        )
        tokens, scores = 256 / 8, 2 * 4 * 32 * 64 * passes / 2
        assert cost.seconds * 1e12 == pytest.approx(tokens * (weights * passes + head * 6 + scores), rel=1e-3)


def test_fsdp_over_two_axes_gathers_over_the_slow_one_what_the_fast_one_leaves() -> None:
    machine = replace(MACHINE, flops=1e30, latency=0.0)
    plans = OptimalPlanner(AlphaBetaCostModel(1.0, 1.0), machine, mesh={"dp": 4, "tp": 8}, workload=Workload(32, 32))
    model = meta()
    weights = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name and "mlp.2.bias" not in name)
    seconds = 0.0
    for axis, num_bytes in (("dp", weights * 2 / 8), ("tp", weights * 2)):
        link = machine.link({"dp": 4, "tp": 8}, axis)
        seconds += 3 * AlphaBetaCostModel(1.0, 1.0).all_gather(num_bytes, link)
    assert price(plans, model, {"dp": "fsdp", "tp": "fsdp"}).seconds == pytest.approx(seconds, rel=1e-6)


# ---- its plans ----


def test_certificate_proves_and_beats_every_hand_written_plan() -> None:
    model = meta()
    for mesh in ({"dp": 4, "tp": 2}, {"dp": 16, "tp": 8}):
        for batch, sequence in ((16, 64), (256, 64), (16, 1024)):
            plans = planner(mesh, Workload(batch, sequence))
            plan = plans.build_plan(model)
            assert plan.certificate is not None
            assert plan.certificate.gap == 0
            assert plan.validate(model) == ()
            step, compared = plans.model(model), 0
            for dp in RECIPES:
                for tp in RECIPES:
                    try:
                        by_hand = assignment(step, {"dp": dp, "tp": tp})
                    except ValueError:
                        continue  # sizes do not divide
                    assert plan.certificate.objective <= step.problem.evaluate(by_hand)
                    compared += 1
            assert compared >= 4


def test_the_same_plan_every_time_and_for_a_pickled_planner() -> None:
    plans = planner({"dp": 4, "tp": 2}, Workload(16, 64), memory_limit=1_300_000)
    first, second = plans.build_plan(meta()), pickle.loads(pickle.dumps(plans)).build_plan(meta())
    assert first == second
    assert first.certificate == second.certificate
    assert pickle.loads(pickle.dumps(first)).certificate == first.certificate


def test_few_tokens_are_cut_by_columns_many_by_batch() -> None:
    few = planner({"tp": 8}, Workload(1, 64)).build_plan(meta(width=512))
    assert str(few.plan["blocks.*.mlp.0.weight"]) == "tp:S(0)"
    assert str(few.plan["blocks.*.mlp.2.weight"]) == "tp:S(1)"
    assert str(few.plan["blocks.*.attn.qkv.weight"]) == "tp:I(0,[512,512,512])"
    many = planner({"tp": 8}, Workload(4096, 1024), memory_limit=10**15).build_plan(meta(width=64))
    assert many.certificate is not None
    assert all("batch" in way for name, way in many.certificate.choices if "blocks" in name)
    assert "blocks.*.mlp.0.weight" not in many.plan


def needed(plans: OptimalPlanner, model: nn.Module) -> int:
    """The limit that the refusal of a smaller one names."""
    with pytest.raises(PlanError) as error:
        plans.build_plan(model)
    return int(error.value.problems[0].hint.rpartition("memory_limit=")[2])


@functools.cache
def llama() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 12, "vocab_size": 32064}
    config = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=32, **sizes)
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config).bfloat16()
    return model


@functools.cache
def least_bytes(axes: tuple[tuple[str, int], ...]) -> int:
    """The least limit of `llama`, of which every headroom is a multiple."""
    return needed(planner(dict(axes), Workload(16, 4096), memory_limit=1), llama())


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("axes", [{"fsdp": 16}, {"dp": 4, "tp": 4}, {"zero": 2, "x": 8}, {"tp": 8}])
def test_the_certificate_counts_what_memory_counts(axes: dict[str, int]) -> None:
    """Llama with blocks of 70B's proportions: gathered layers, the loss and AdamW's step are in both."""
    model, workload = llama(), Workload(16, 4096)
    counted: dict[str, Memory] = {}  # by digest: a wider limit may leave the plan as it is
    for headroom in (1.0, 1.2, 2.0, 50.0):
        limit = int(least_bytes(tuple(axes.items())) * headroom)
        plan = planner(axes, workload, memory_limit=limit).build_plan(model)
        assert plan.certificate is not None
        assert plan.certificate.memory_bytes is not None
        assert plan.certificate.memory_bytes <= limit
        assert set(plan.axis_roles) == set(axes)
        if plan.digest not in counted:
            # Logits stay sharded only if a model axis shards the head.
            head = plan.resolve(model)["lm_head.weight"].sharded_axes
            loss = "vocab-parallel" if any(plan.axis_roles[axis] == "model" for axis in head) else "causal-lm"
            step: dict[str, Any] = {"loss": loss, "optimizer": "mixed-adamw", "checkpointing": True}
            counted[plan.digest] = plan.memory(model, (16, 4096), **step)
        memory = counted[plan.digest]
        assert plan.certificate.memory_bytes == pytest.approx(memory.max_bytes, rel=0.05), (headroom, memory)
        assert [each for each in memory.assumptions if "outputs of forward" not in each] == []


def test_memory_is_that_of_the_plan() -> None:
    """Static bytes in the certificate are what the plan itself counts, but for norms and biases."""
    model = meta(vocab=1024)
    least = needed(planner({"dp": 4, "tp": 2}, Workload(8, 16), memory_limit=1), model)
    for limit in (least, least * 5 // 4, least * 3):
        plans = planner({"dp": 4, "tp": 2}, Workload(8, 16), memory_limit=limit)
        plan = plans.build_plan(model)
        step = replace(plans.model(model), roles=tuple(plan.axis_roles.values()))
        assert plan.certificate is not None
        assert plan.certificate.memory_bytes is not None
        chosen = dict(plan.certificate.choices)
        activations = 0
        for operation, choices, kept in zip(step.operations, step.choices, step.problem.memory, strict=True):
            named = [
                ", ".join(f"{axis}={way.name}" for axis, way in zip(("dp", "tp"), ways, strict=True))
                for ways in choices
            ]
            at = named.index(chosen[operation.name])
            activations += int(kept[at]) - step._bytes(replace(operation, width_out=0), choices[at])
        static = plan.certificate.memory_bytes - plan.certificate.transient_bytes - activations
        counted = plan.memory(model, optimizer="adamw").max_bytes
        small = sum(p.numel() * 16 for name, p in model.named_parameters() if p.dim() == 1)
        assert 0 <= counted - static <= small
        assert plan.certificate.memory_bytes <= limit


def test_a_limit_is_kept_and_costs_time() -> None:
    model = meta(num_layers=12)
    free = planner({"dp": 8}, Workload(64, 64), memory_limit=10**12).build_plan(model).certificate
    assert free is not None
    assert free.memory_bytes is not None
    limit = (free.memory_bytes + needed(planner({"dp": 8}, Workload(64, 64), memory_limit=1), model)) // 2
    tight = planner({"dp": 8}, Workload(64, 64), memory_limit=limit).build_plan(model).certificate
    assert tight is not None
    assert tight.memory_bytes is not None
    assert tight.memory_bytes <= limit
    assert tight.objective > free.objective
    assert tight.lower_bound >= free.objective
    assert tight.gap <= 0.05  # the bound leaves out gathered layers, which the limit counts
    assert str(tight).endswith(f"; {tight.memory_bytes / 2**20:.2f} MiB of {limit / 2**20:.2f} MiB")


def test_tied_weights_are_kept_once_and_alike() -> None:
    tied, untied = meta(tied=True, vocab=4096), meta(vocab=4096)
    plans = planner({"dp": 2, "tp": 4}, Workload(8, 64))
    plan = plans.build_plan(tied)
    assert plan.validate(tied) == ()
    difference = price(plans, untied, {"dp": "data", "tp": "megatron"}).memory_bytes
    difference -= price(plans, tied, {"dp": "data", "tp": "megatron"}).memory_bytes
    assert difference == 4096 * 64 * 16 // 4


def test_columns_over_two_axes() -> None:
    """Sections get shorter with each axis that cuts them."""
    plan = planner({"a": 2, "b": 4}, Workload(1, 64)).build_plan(meta(width=512))
    layout = plan.resolve(meta(width=512))["blocks.0.attn.qkv.weight"]
    assert str(layout) == "a:I(0,[512,512,512]), b:I(0,[256,256,256])"
    assert [box.offsets[0] for box in layout.boxes(5, (1536, 512))] == [320, 832, 1344]
    assert [box.sizes[0] for box in layout.boxes(5, (1536, 512))] == [64, 64, 64]


def test_heads_limit_what_is_cut() -> None:
    model = meta(num_heads=2, width=512)
    plan = planner({"tp": 8}, Workload(1, 8)).build_plan(model)
    assert plan.certificate is not None
    ways = dict(plan.certificate.choices)
    assert ways["blocks.0.mlp in"] == "tp=column"
    assert "blocks.0.attn scores" not in ways  # two heads on eight ranks: that attention stays in one piece
    assert "blocks.*.attn.qkv.weight" not in plan.plan or "S(0)" in str(plan.plan["blocks.*.attn.qkv.weight"])


class Expensive(AlphaBetaCostModel):
    """A user's model: all-reduce is very slow here."""

    def all_reduce(self, num_bytes: float, link: Link) -> float:
        return 1000 * super().all_reduce(num_bytes, link)


def test_a_users_cost_model_decides() -> None:
    workload = Workload(16, 64)
    usual = planner({"dp": 8}, workload).build_plan(meta()).certificate
    slow = (
        OptimalPlanner(Expensive(1.0, 1.0), MACHINE, mesh={"dp": 8}, workload=workload).build_plan(meta()).certificate
    )
    assert usual is not None
    assert slow is not None
    assert any(way == "dp=batch" for name, way in usual.choices if name.endswith((" in", " out")))
    assert not any(way == "dp=batch" for name, way in slow.choices if name.endswith((" in", " out")))


# ---- what cannot be ----


def test_what_does_not_fit_says_by_how_much_where_and_what_would() -> None:
    plans = planner({"dp": 2, "tp": 2}, Workload(16, 64, recompute=False), memory_limit=1_300_000)
    with pytest.raises(PlanError) as error:
        plans.build_plan(meta(vocab=512))
    (problem,) = error.value.problems
    assert problem.code == "does-not-fit"
    assert "on each rank" in problem.found
    assert "over the limit of 1.24 MiB" in problem.found
    assert planner({"dp": 2, "tp": 2}, plans.workload, memory_limit=10**9).build_plan(meta(vocab=512)).certificate
    limit = int(problem.hint.rpartition("memory_limit=")[2])
    assert planner({"dp": 2, "tp": 2}, plans.workload, memory_limit=limit).build_plan(meta(vocab=512)).certificate
    with pytest.raises(PlanError):
        planner({"dp": 2, "tp": 2}, plans.workload, memory_limit=limit - 1).build_plan(meta(vocab=512))


def test_models_that_are_no_transformers_are_refused() -> None:
    with pytest.raises(PlanError, match="nothing-to-optimize"):
        planner({"dp": 2}, Workload(2, 2)).build_plan(nn.Linear(4, 4))


def test_wrong_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="batch=0"):
        Workload(0, 1)
    with pytest.raises(ValueError, match="overlap=2"):
        Workload(1, 1, overlap=2)
    assert math.isfinite(price(planner({"dp": 2}, Workload(2, 2)), meta(), {"dp": "data"}).seconds)


def test_ranks_out_of_order_make_a_slow_axis() -> None:
    near = OptimalPlanner(topology=MACHINE, mesh=MeshSpec({"dp": 2, "tp": 8}), workload=Workload(2, 4096))
    scattered = [rank for pair in range(8) for rank in (pair, pair + 8)]
    far = OptimalPlanner(topology=MACHINE, mesh=MeshSpec({"dp": 2, "tp": 8}, scattered), workload=Workload(2, 4096))
    recipe = {"dp": "data", "tp": "megatron"}
    assert price(near, meta(), recipe).seconds < price(far, meta(), recipe).seconds
