"""A sharding plan's layouts as styles: they train as the whole module does, or there is an error that says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

AdamW = torch.optim.AdamW
# float64; AdamW divides by the root of squares, which makes more of the ranks' other order of addition.
ADAM = 1e-8


@pytest.mark.extra("shard-spec")
def test_layouts_as_styles() -> None:
    from shard_spec import InterleavedShard, MeshSpec, ShardingPlan

    mesh = MeshSpec({"dp": 2, "tp": 2})
    model = models.GPT(tied=True)
    rules: dict[str, Any] = {
        "**.[qkv].*": "tp:S(0)",
        "layers.0.mlp.up.weight": {"dp": Shard(1), "tp": Shard(0)},
        "layers.0.mlp.up.bias": "tp:S(0)",
        "**.proj.weight": "tp:S(1)",
        "layers.0.mlp.down.weight": "tp:S(1)",
        "embed.weight": "tp:S(0)",
    }
    styles = tp.from_sharding_plan(ShardingPlan(rules, mesh=mesh), model)
    assert styles["embed"] == tp.RowwiseParallel()
    assert styles["head"] == tp.ColwiseParallel(output_layouts=Replicate())
    assert styles["layers.0.attn.q"] == tp.ColwiseParallel()
    assert styles["layers.0.attn.proj"] == tp.RowwiseParallel()
    assert len(styles) == 2 + 2 * 5 + 2
    assert type(styles["layers.1.attn"]).__name__ == "BlockParallel"
    assert tp.plan_styles(model, styles, 2).problems == ()
    (problem,) = tp.plan_styles(copy.deepcopy(model), {"layers.0.attn": styles["layers.0.attn"]}, 4).problems
    assert problem.code == "mesh-mismatch"  # it was planned for two ranks
    plan = ShardingPlan({**rules, "layers.1.mlp.up.*": "tp:S(0)"}, mesh=mesh)  # nobody takes a shard there
    with pytest.raises(tp.PlanError, match=r"plan-not-executable\] layers.1.mlp.up.*bias: dim 0, weight: dim 0"):
        tp.from_sharding_plan(plan, model)
    with pytest.raises(tp.PlanError, match=r"plan-not-executable\] layers.0.mlp.up"):
        tp.from_sharding_plan(plan, model, axis="dp")
    with pytest.raises(tp.PlanError, match="plan-not-executable"):
        tp.from_sharding_plan(ShardingPlan({"*": InterleavedShard(0, 3)}, mesh={"tp": 2}), nn.Linear(4, 6))
    assert tp.from_sharding_plan(ShardingPlan({}, mesh=mesh), model) == {}


@pytest.mark.extra("shard-spec")
def test_what_has_no_style() -> None:
    """Every setting of a plan is carried out or refused, all of them in one error."""
    from shard_spec import ShardingPlan, UnevenShard

    model = models.GPT(tied=True)

    def codes(rules: dict[str, Any], **options: Any) -> list[str]:
        with pytest.raises(tp.PlanError) as caught:
            tp.from_sharding_plan(ShardingPlan(rules, mesh="dp=2, tp=2", **options), model)
        return sorted(problem.code for problem in caught.value.problems)

    assert (
        codes({"norm.*": "tp:S(0)", "**.up.weight": "tp:S(0)", "**.down.*": "tp:S(0)"}) == ["plan-not-executable"] * 5
    )
    assert codes({"head.weight": {"tp": UnevenShard(0, (10, 7))}}) == ["layout-mismatch"] * 2
    assert set(codes({"**.up.*": "dp:S(0), tp:S(0)"})) == {"invalid-layout"}  # dp's slices are cut by tp: not tp's rows
    assert codes({}, output_plan={"head": "tp:R"}, return_local_tensor=["head"]) == [
        "invalid-argument",
        "invalid-argument",
    ]
    with pytest.raises(tp.PlanError, match="unknown-axis"):
        tp.from_sharding_plan(ShardingPlan({}, mesh="tp=2"), model, axis="ep")


class Between(models.MLP):
    """Something between the layers that looks at all channels: cut by names alone, it trains wrongly."""

    def __init__(self, what: str) -> None:
        super().__init__(8, 16)
        self.what = what
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        match self.what:
            case "norm":
                h = F.normalize(h, dim=-1)
            case "reshape":
                h = h.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
            case "past":  # an activation gets in beside the columns: its gradient would be partial
                h = h * x.mean(-1, keepdim=True)
            case "leak":
                return self.down(h) + h.mean(-1, keepdim=True)  # type: ignore[no-any-return]
            case "twice":
                return self.down(h * self.scale) + self.up(x * self.scale).sum()  # type: ignore[no-any-return]
        return self.down(h)  # type: ignore[no-any-return]


class WrongHeads(models.Attention):
    """Its view splits into as many heads as it always had, under a name nobody knows: half heads on two ranks."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.pieces = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], self.pieces, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        result: torch.Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


@pytest.mark.ranks(2)
@pytest.mark.extra("shard-spec")
@pytest.mark.parametrize("what", ["norm", "reshape", "past", "leak", "twice", "heads"])
def test_blocks_that_cannot_be_cut(ranks: Ranks, what: str) -> None:
    """Column and row layouts around something that mixes channels: refused by the plan, or at the first call."""
    from shard_spec import ShardingPlan

    mesh = ranks.mesh((2,), ("tp",))
    model: nn.Module = models.seeded(lambda: nn.Sequential(WrongHeads() if what == "heads" else Between(what)))
    rules = {"**.up.*": "S(0)", "**.down.weight": "S(1)"}
    if what == "heads":
        rules = {"**.[qkv].*": "S(0)", "**.proj.weight": "S(1)"}
    plan = ShardingPlan(rules, mesh={"tp": 2})
    x = torch.randn(2, 5, 16 if what == "heads" else 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def call() -> None:
        tp.apply_plan(model, mesh, tp.from_sharding_plan(plan, model))
        model(x)

    with pytest.raises(tp.PlanError) as caught:
        call()
    codes = {problem.code for problem in caught.value.problems}
    assert codes <= {"slices-mix", "plan-not-executable", "check-mismatch", "check-raises"}
    good = {"0.up": tp.ColwiseParallel(), "0.down": tp.RowwiseParallel()}
    if what != "heads":
        assert tp.from_sharding_plan(plan, nn.Sequential(Between("nothing"))).items() >= good.items()


@pytest.mark.extra("shard-spec")
def test_plans_of_other_axes() -> None:
    """A plan that cuts weights for a data-parallel axis is no tensor-parallel plan, whatever the axis is called."""
    from shard_spec.optimal import OptimalPlanner, Workload
    from shard_spec.planners import FullyShardPlanner, MegatronPlanner, compose

    model = models.Grouped()
    mesh = {"dp": 2, "tp": 2}
    both = compose(MegatronPlanner(mesh), FullyShardPlanner(mesh, "dp")).build_plan(model)
    assert tp.from_sharding_plan(both, model) == tp.from_sharding_plan(MegatronPlanner(mesh).build_plan(model), model)
    with pytest.raises(tp.PlanError, match="invalid-layout"):
        tp.from_sharding_plan(both, model, axis="dp")
    with pytest.raises(tp.PlanError, match="data-parallel"):
        tp.from_sharding_plan(FullyShardPlanner({"tp": 2}, "tp").build_plan(model), model)
    large = OptimalPlanner(mesh=mesh, workload=Workload(batch=64, sequence=4096), memory_limit=600_000_000).build_plan(
        model
    )
    for axis in mesh:  # it divides the batch over both, at these sizes: ranks see other activations
        with pytest.raises(tp.PlanError, match=r"layout-mismatch|plan-not-executable"):
            tp.from_sharding_plan(large, model, axis=axis)


@pytest.mark.extra("shard-spec")
def test_remarks_of_a_planner_are_carried_out() -> None:
    """Each parameter that it calls `partial-gradient` has its gradient summed."""
    from shard_spec.planners import MegatronPlanner

    model = models.Grouped()
    plan = MegatronPlanner({"tp": 2}).build_plan(model)
    assert {note.code for note in plan.notes} == {"partial-gradient"}
    styles = tp.from_sharding_plan(plan, model)
    for name in ("layers.0.attn.q_norm", "layers.1.attn.k_norm", "layers.0.mlp.act"):
        assert styles[name] == tp.NoParallel(sum_gradient=True)


class SharedDropout(nn.Module):
    """One dropout on shards and, after the sum, on full values, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(self.drop(torch.relu(self.up(x)))))
        return out


@pytest.mark.ranks(2)
@pytest.mark.extra("shard-spec")
def test_a_dropout_that_full_values_pass_too(ranks: Ranks) -> None:
    """Its style would let ranks draw other numbers for the full values as well: they would drift apart."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: nn.Sequential(nn.Linear(16, 16), SharedDropout(), SharedDropout()))
    plan = tp.auto_plan(model, tp_size=2)
    assert "1.up" in plan and "1.drop" not in plan
    tp.apply_plan(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        y = model(torch.ones(3, 16))
        y.square().mean().backward()
        assert len(set(ranks.gather(y.double().sum().item()))) == 1
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(ranks.gather(model.get_parameter("0.weight").double().sum().item()))) == 1


# ---------------------------------------------------------------------------------------------- training


def train(ranks: Ranks, model: nn.Module, plan: Any, atol: float = ADAM, **options: Any) -> dict[str, tp.ParallelStyle]:
    """Five steps of AdamW, and forward and backward, against the model alone."""
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    styles = tp.from_sharding_plan(plan, model, **options)
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, 17, (2, 6), generator=generator) for _ in range(5)]
    compared = models.compare_training(
        model,
        lambda m: tp.apply_plan(m, mesh, styles),
        batches,
        models.next_token_loss,
        mesh,
        atol=atol,
        make=AdamW,
        lr=0.01,
    )
    assert compared > 2000
    return styles


@pytest.mark.extra("shard-spec")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("fused", "tied"), [(False, True), (True, False)])
def test_a_planners_plan(ranks: Ranks, fused: bool, tied: bool) -> None:
    """MegatronPlanner's plan of a model it has never seen."""
    from shard_spec.planners import MegatronPlanner

    model = models.roughen(models.seeded(lambda: models.GPT(vocab=18, fused=fused, tied=tied)).double())
    styles = train(ranks, model, MegatronPlanner({"tp": 2}).build_plan(model))
    assert len(styles) == 2 + 2 * (5 if fused else 7)


@pytest.mark.extra("shard-spec")
@pytest.mark.ranks(2, 4)
def test_grouped_queries_with_norms(ranks: Ranks) -> None:
    """Norms of heads, learned activation, tied ends; with fewer key-value heads than ranks k and v stay whole."""
    from shard_spec.planners import MegatronPlanner

    keys = 2  # one for each rank, or for two
    size = ranks.world_size
    model = models.roughen(models.seeded(lambda: models.Grouped(keys=keys)).double())
    plan = MegatronPlanner({"tp": size}, kv_replicate=True).build_plan(model)
    styles = train(ranks, model, plan)
    few = keys < size
    assert {type(styles[f"layers.{i}.attn.k"]).__name__ for i in (0, 1)} == {
        "ColwiseKVReplicated" if few else "ColwiseParallel"
    }
    assert ("kv-replicated" in {note.code for note in plan.notes}) == few
    key = model.get_parameter("layers.0.attn.k.weight")
    assert key.placements == ((Replicate() if few else Shard(0)),)  # type: ignore[attr-defined]  # as the plan says


@pytest.mark.extra("shard-spec")
@pytest.mark.ranks(2)
def test_an_optimal_plan_trains_right_or_raises(ranks: Ranks) -> None:
    """Whatever OptimalPlanner chose for the axis: a small batch makes it tensor parallel, a large one does not."""
    from shard_spec.optimal import OptimalPlanner, Workload

    outcomes = []
    for batch, sequence, limit in ((1, 64, None), (1, 4096, None), (64, 4096, None), (64, 64, 40_000)):
        model = models.roughen(models.seeded(models.Grouped).double())
        planner = partial(OptimalPlanner, mesh={"tp": 2}, memory_limit=limit)
        try:
            plan = planner(workload=Workload(batch=batch, sequence=sequence)).build_plan(model)
        except ValueError:
            continue  # does not fit the memory
        try:
            train(ranks, model, plan)
            outcomes.append("right")
        except tp.PlanError:
            outcomes.append("refused")
    assert set(outcomes) == {"right", "refused"}, outcomes


before_ranks = partial(models.preload, "shard_spec.optimal", *hf_models.code_of("qwen3", "gpt2"))


def llama(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        small: dict[str, Any] = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "gpt2":
            config = AutoConfig.for_model(
                kind,
                n_embd=16,
                n_head=4,
                n_layer=1,
                n_positions=16,
                **small,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
            )
        else:
            sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32}
            config = AutoConfig.for_model(kind, **sizes, **heads, **small, tie_word_embeddings=kind == "qwen3")
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
        return models.roughen(model)

    return make


class Logits(nn.Module):
    """A transformers model that gives its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


@pytest.mark.extra("shard-spec", "transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2)
def test_models_of_transformers(ranks: Ranks) -> None:
    """Qwen3 (norms of heads, tied) and GPT-2 (fused, transposed weights); 1 key-value head over 2 ranks."""
    from shard_spec.planners import MegatronPlanner

    for kind in ("qwen3", "gpt2"):
        model = Logits(models.seeded(llama(kind)))
        plan = MegatronPlanner({"tp": ranks.world_size}, kv_replicate=True).build_plan(model)
        styles = train(ranks, model, plan, atol=1e-6)  # its norms compute in float32
        assert len(styles) >= 6
