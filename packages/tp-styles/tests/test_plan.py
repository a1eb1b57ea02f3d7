"""Plans are made and explained without a process group, and say everything that is wrong at once."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from tp_styles.plan.model import collectives
from tp_styles.plan.planned import match_plan
from tp_styles.values import NoTransfer, Step, step, transfer


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("a.**", "a", True),
        ("a.**", "ab", False),
        ("**.c", "a.b.c", True),
        ("**.c", "c", True),
        ("**.c", "a.bc", False),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.x.y.c", True),
        ("**", "a.b", True),
        ("**", "", False),
        ("layers.{0,2}.w2", "layers.2.w2", True),
        ("", "", True),
        ("", "a", False),
        ("layers.*.w[12]", "layers.3.w2", True),
        ("layers.*.w[!12]", "layers.3.w2", False),
        ("layers.?.w2", "layers.10.w2", False),
        ("a.b+", "a.b+", True),
        ("h.*.*_proj", "h.0.q_proj", True),
    ],
)
def test_patterns(pattern: str, name: str, wanted: bool) -> None:
    matches, problems = match_plan([name], {pattern: tp.NoParallel()}, strict=False)
    assert ([*matches], problems) == ([name] if wanted else [], [])


def test_an_exact_name_wins_and_globs_have_to_agree() -> None:
    order = ["**", "layers.**", "layers.*.*", "layers.*.w?", "layers.*.w2"]
    for count in range(1, len(order) + 1):
        plan = {pattern: tp.NoParallel() for pattern in order[:count]}
        matches, problems = match_plan(["layers.0.w2"], plan, strict=True)
        assert ([plan[match] for match in matches.values()], problems) == ([tp.NoParallel()], [])
        plan["layers.0.w2"] = tp.NoParallel(sum_gradient=True)
        assert match_plan(["layers.0.w2"], plan, strict=True) == ({"layers.0.w2": "layers.0.w2"}, [])
    rivals = {"layers.0.*": tp.NoParallel(), "layers.*.w2": tp.ColwiseParallel()}
    _, problems = match_plan(["layers.0.w2"], rivals, strict=True)
    assert [problem.code for problem in problems] == ["ambiguous-pattern"]
    model = models.GPT()
    planned = tp.plan_styles(model, {"**.up": tp.ColwiseParallel(), "layers.0.mlp.up": tp.NoParallel()}, 2)
    assert {m.name: type(m.style).__name__ for m in planned.modules} == {
        "layers.0.mlp.up": "NoParallel",
        "layers.1.mlp.up": "ColwiseParallel",
    }


def test_transfers() -> None:
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    steps = {}
    for source in kinds:
        for target in kinds:
            try:
                steps[str(source), str(target)] = str(step(source, target))
            except NoTransfer:
                steps[str(source), str(target)] = "refused"
    assert steps == {
        ("R", "R"): "none",
        ("R", "S(0)"): "slice(0)",
        ("R", "S(1)"): "slice(1)",
        ("R", "P(sum)"): "refused",
        ("S(0)", "R"): "all_gather(0)",
        ("S(0)", "S(0)"): "none",
        ("S(0)", "S(1)"): "all_to_all(0->1)",
        ("S(0)", "P(sum)"): "refused",
        ("S(1)", "R"): "all_gather(1)",
        ("S(1)", "S(0)"): "all_to_all(1->0)",
        ("S(1)", "S(1)"): "none",
        ("S(1)", "P(sum)"): "refused",
        ("P(sum)", "R"): "all_reduce",
        ("P(sum)", "S(0)"): "reduce_scatter(0)",
        ("P(sum)", "S(1)"): "reduce_scatter(1)",
        ("P(sum)", "P(sum)"): "none",
    }
    assert transfer(Shard(1), Replicate(), Partial()).backward == Step("reduce_scatter", 1)
    assert transfer(Replicate(), Replicate(), Partial()).backward == Step("all_reduce")
    with pytest.raises(NoTransfer):
        step(Partial("max"), Replicate())


def test_explain_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = models.GPT(width=64, vocab=100)
    text = tp.explain(model, models.gpt_plan(), tp_size=8)
    assert "weight: [256, 64] -> [32, 64]  dim 0" in text
    assert "all_reduce  256 bytes a token" in text
    assert "weight: [100, 64] -> [13, 64] .. [9, 64]" in text
    assert "replicated: 11 parameters" in text
    assert "problems" not in text
    plan = tp.plan_styles(model, models.gpt_plan(), 8)
    assert plan.problems == ()
    assert plan.explain("layers.0.mlp").startswith("tensor parallel over 8 ranks: 2 modules")
    assert json.loads(plan.to_json())["tp_size"] == 8
    assert plan.digest == tp.plan_styles(model, models.gpt_plan(), 8).digest
    assert plan.digest != tp.plan_styles(model, models.gpt_plan(), 4).digest
    assert pickle.loads(pickle.dumps(plan)).digest == plan.digest
    forward = [one for one in collectives(plan) if one.when == "forward"]
    assert [str(one.step) for one in forward] == ["all_reduce"] * 5 + ["all_gather(2)"]


def test_all_problems_at_once() -> None:
    model = models.GPT(tied=True)
    plan: dict[str, Any] = {
        "embed": tp.RowwiseParallel(),
        "layers.*.attn.w[qkv]": tp.ColwiseParallel(),
        "norm": tp.ColwiseParallel(),
        "layers.0.norm1": tp.NoParallel(),
        "head": tp.ColwiseParallel,
    }
    tp_plan = tp.plan_styles(model, plan, 2)
    codes = {problem.code for problem in tp_plan.problems}
    assert codes == {"unmatched-pattern", "module-kind", "wrong-type", "tied-weights"}
    with pytest.raises(tp.PlanError) as caught:
        tp_plan.raise_problems()
    assert len(caught.value.problems) == 4
    text = str(caught.value)
    assert "embed: replicated" not in text
    assert "layers.*.attn.w[qkv]" in text
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


@pytest.mark.parametrize(
    ("module", "style", "code"),
    [
        (nn.Embedding(8, 8, max_norm=1.0), tp.ColwiseParallel(), "unsupported-option"),
        (nn.Embedding(8, 8, max_norm=1.0), tp.RowwiseParallel(), "unsupported-option"),
        (nn.Embedding(8, 8, sparse=True), tp.ColwiseParallel(), "sparse-gradient"),
        (nn.Embedding(8, 8, scale_grad_by_freq=True), tp.RowwiseParallel(), "unsupported-option"),
        (nn.Embedding(8, 8), tp.RowwiseParallel(input_layouts=Shard(-1)), "sharded-input"),
        (nn.Linear(8, 8), tp.ColwiseParallel(output_layouts=Partial()), "invalid-argument"),
        (nn.Linear(8, 8), tp.FusedColwiseParallel((3, 4)), "invalid-sections"),
        (nn.Linear(8, 8), tp.FusedColwiseParallel(3), "invalid-sections"),
        (nn.Linear(8, 8), tp.FusedColwiseParallel((2, 6), unit=4), "invalid-sections"),
        (nn.Linear(8, 8), tp.FusedColwiseParallel(2, output_layouts=Shard(1)), "invalid-sections"),
        (nn.Linear(8, 8), tp.FusedColwiseParallel(2, use_local_output=False), "invalid-argument"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), tp.ColwiseParallel(), "unknown-name"),
        (
            models.MLP(),
            tp.PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)),
            None,
        ),
        (
            models.MLP(),
            tp.PrepareModuleInput(input_kwarg_layouts={"y": Shard(0)}, desired_input_kwarg_layouts={"y": Replicate()}),
            "unknown-name",
        ),
    ],
)
def test_what_cannot_be_done_is_a_problem(module: nn.Module, style: tp.ParallelStyle, code: str | None) -> None:
    codes = {problem.code for problem in tp.plan_styles(module, style, 2).problems}
    assert codes >= ({code} if code else set())
    assert bool(codes) == bool(code)


class ParamWrapper(nn.Module):
    """peft's module around another one with a low-rank update of a parameter (`target_parameters`)."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = inside, nn.Linear(8, 2), nn.Linear(2, 8)


def test_parameters_with_updates_of_their_own_are_refused_by_name() -> None:
    """Every style on the wrapper and below counts, also a replicated one; without one the rest is planned."""
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "experts": ParamWrapper(nn.Sequential(nn.Linear(8, 8)))})
    styles: dict[str, tp.ParallelStyle] = {
        "experts.base_layer.0": tp.ColwiseParallel(),
        "experts.lora_B": tp.NoParallel(),
        "experts": tp.PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    }
    for name, style in styles.items():
        (problem,) = tp.plan_styles(model, {"up": tp.ColwiseParallel(), name: style}, 2).problems
        assert (problem.code, problem.name) == ("module-not-shardable", "experts")
        assert "target_parameters" in problem.found
    assert not tp.plan_styles(model, {"up": tp.ColwiseParallel()}, 2).problems


def test_what_is_no_style_names_the_right_one() -> None:
    for wrong, hint in ((tp.RowwiseParallel, "RowwiseParallel()"), ("rowwise", "from_hf_tp_plan")):
        (problem,) = tp.plan_styles(models.MLP(), {"down": wrong}, 2).problems  # type: ignore[dict-item]
        assert problem.code == "wrong-type"
        assert hint in problem.hint


def test_overlapping_styles() -> None:
    plan = {"mlp": tp.SequenceParallel(), "mlp.up": tp.ColwiseParallel()}
    tp_plan = tp.plan_styles(models.Block(16, 4, False), plan, 2)
    assert {problem.code for problem in tp_plan.problems} == {"ambiguous-pattern"}


def test_importing_needs_no_torch() -> None:
    code = "import sys, tp_styles; assert 'torch' not in sys.modules; assert 'ColwiseParallel' in dir(tp_styles)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in tp.__all__:
        assert getattr(tp, name) is not None
    with pytest.raises(AttributeError):
        getattr(tp, "not" + "_there")


def test_styles_are_values() -> None:
    style = tp.ColwiseParallel(input_layouts=Shard(1))
    assert eval(repr(style), {**vars(tp), "Shard": Shard, "Replicate": Replicate}) == style
    assert style != tp.ColwiseParallel()
    assert pickle.loads(pickle.dumps(style)) == style
    assert hash(style) == hash(tp.ColwiseParallel(input_layouts=(Shard(1),)))
