"""Plans with whole experts from transformers, from `auto_plan`, from shard-spec and on the command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import hf_models
import moe_models as moe
import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from tp_styles.cli import main

FAMILIES = "gpt_oss", "deepseek_v2", "qwen3_moe"
ODD = "switch_transformers", "nllb_moe", "dbrx", "llama4", "jetmoe", "muse_spark"
before_ranks = partial(models.preload, "shard_spec.planners", *hf_models.code_of(*FAMILIES, *ODD))


def experts_of(plan: Mapping[str, Any]) -> list[str]:
    return [name for name, style in plan.items() if isinstance(style, tp.ExpertParallel)]


@pytest.mark.ranks(2)
@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_families_of_transformers_by_their_own_plans(ranks: Ranks) -> None:
    """Biases, shared experts, a norm behind the experts; beside attention by heads on the same axis, two steps each."""
    import expert_models

    mesh, sizes = ranks.mesh((2,), ("tp",)), []
    for family in ("gpt_oss", "deepseek_v2"):
        model: Any = hf_models.build(family)
        own = tp.from_hf_tp_plan(model, model.ep_plan)
        assert len(experts_of(own)) == len(own) == (2 if family == "gpt_oss" else 1)  # its first layer is dense
        assert experts_of(tp.auto_plan(model, tp_size=1, ep_size=2)) == experts_of(own)
        both = tp.auto_plan(model, tp_size=2, ep_size=2)
        assert experts_of(both) == experts_of(own)
        assert len(both) > len(own)
        alone = copy.deepcopy(model)
        handle = tp.apply_plan(model, mesh, both)
        losses = [expert_models.trained(one) for one in (model, alone)]
        torch.testing.assert_close(*map(torch.tensor, losses), atol=1e-6, rtol=0)  # routers compute in float32
        state = tp.full_state_dict(model)
        sizes.append(models.assert_close(state, alone.state_dict(), atol=1e-6))
        assert handle.report().count("mlp.experts (evaluation, with gradients): equal to the original") == len(own)
    assert min(sizes) > 10000


@pytest.mark.ranks(2)
@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_every_implementation_of_experts(ranks: Ranks) -> None:
    """Grouped products take rows of multiples of 16 bytes: whole experts keep their rows on any number of ranks."""
    import expert_models

    mesh, compared = ranks.mesh((2,), ("ep",)), 0
    for folder, name in (("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts")):
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            module, width = expert_models.build_experts(folder, name, implementation)
            module = module.float()
            alone, batch = copy.deepcopy(module), expert_models.routed_batch(module, width, 4, "indices", 2)
            batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
            handle = tp.apply_plan(module, mesh, tp.ExpertParallel())
            ours, wanted = (one(*batch.values()) for one in (module, alone))
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
            for output in (ours, wanted):
                output.square().sum().backward()
            own = moe.full_values(module, mesh, gradients=True)
            expected = {key: expert_models.gradient_of(p) for key, p in alone.named_parameters()}
            compared += models.assert_close(own, expected, atol=1e-3, rtol=1e-3)
            assert "equal to the original" in handle.report()
    assert compared > 50000


@pytest.mark.ranks(2)
@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_numbered_and_odd_classes_of_transformers(ranks: Ranks) -> None:
    import expert_models

    mesh = ranks.mesh((2,), ("ep",))
    outcomes = {
        (folder, tokens): expert_models.check_expert_class(folder, name, mesh, tokens)
        for each in ODD
        for folder, name in expert_models.expert_classes(each)
        for tokens in ("replicated", "sharded")
    }
    refused = {("llama4", "sharded"), ("jetmoe", "sharded")}  # tokens come by expert
    assert len(outcomes) == 12
    for key, outcome in outcomes.items():
        assert outcome == ("refused: module-kind" if key in refused else "right"), key


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_what_has_no_whole_experts() -> None:
    import hf_models

    with pytest.raises(tp.PlanError, match="no experts that are known"):
        tp.auto_plan(hf_models.build("llama"), tp_size=1, ep_size=2)
    model: Any = hf_models.build("qwen3_moe")
    with pytest.raises(tp.PlanError, match="conflicting-arguments"):
        tp.auto_plan(model, tp_size=2, ep_size=4)
    with pytest.raises(tp.PlanError, match='name the module "ep_dispatch_experts"'):
        tp.from_hf_tp_plan(model, {"model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm"})


@pytest.mark.ranks(2)
@pytest.mark.extra("shard-spec")
def test_a_sharding_plan_that_deals_out_experts(ranks: Ranks) -> None:
    from shard_spec import ShardingPlan

    mesh = ranks.mesh((2,), ("ep",))
    model, alone = moe.language_model(4), moe.language_model(4)
    rules = {f"layers.*.moe.experts.{name}": "ep:S(0)" for name in ("gate_up", "gate_up_bias", "down", "down_bias")}
    plan = ShardingPlan(rules, mesh={"ep": 2})
    styles = tp.from_sharding_plan(plan, model, axis="ep")
    assert experts_of(styles) == list(styles) == ["layers.0.moe.experts", "layers.1.moe.experts"]
    tp.apply_sharding_plan(model, mesh, plan)
    for one in (model, alone):
        ids = moe.batches(1, 4)[0]
        moe.loss_of(one(ids), ids).backward()
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    assert models.assert_close(moe.full_values(model, mesh, gradients=True), gradients, atol=1e-12) > 3000


def make_model() -> Any:
    return moe.MoELM(4)


def test_explain_names_experts_and_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    text = tp.explain(moe.MoELM(4), {"layers.*.moe.experts": tp.ExpertParallel()}, 2, num_tokens=8)
    assert "gate_up: [4, 12, 16] -> [2, 12, 16]" in text
    assert text.count("tokens to their experts, for each selected: all_to_all(0)") == 4
    assert main(["explain", "moe_models:MoELM", "tp_models:gpt_plan", "--whole-experts"]) == 2
    assert "auto_plan" in capsys.readouterr().err


def test_modules_that_are_no_experts_are_refused() -> None:
    plan = {"layers.0.attn": tp.ExpertParallel(), "layers.*.moe.experts": tp.ExpertParallel(parameters=("gate_upp",))}
    problems = tp.plan_styles(moe.MoELM(4), plan, 2).problems
    assert [one.code for one in problems] == ["module-kind"] * 2 + ["unknown-name"] * 2
    flat = tp.ExpertParallel(parameters=("w1",), inputs=("x", "ids", "probs"), num_experts=7)
    (problem,) = tp.plan_styles(moe.Flat(5), flat, 2).problems
    assert problem.code == "shape-mismatch"
    for options in ({"tokens": "both"}, {"form": "dense"}):
        with pytest.raises(tp.PlanError, match="invalid-argument"):
            tp.ExpertParallel(**options)  # type: ignore[arg-type]  # refused
