"""LoRA of peft under tensor parallelism: equal to one process, or refused; `nox -s "hosts(peft)"` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tp_styles as tp
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from ranktest import Ranks
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytestmark = [  # peft asks for both
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen3": "all-linear",
    "mistral": ["k_proj", "up_proj"],
    "qwen2": "all-linear",
    "glm4": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "olmo2": ["gate_proj", "up_proj", "down_proj"],
    "gemma": "all-linear",
    # The plan gathers these layers again: fused, or normed as a whole.
    "phi3": "all-linear",
    "glm4 all": "all-linear",
    "olmo2 all": "all-linear",
    "olmoe": ["q_proj", "v_proj"],
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,  # glm4's own is above the vocabulary
}
EXPERTS = {"olmoe": {"num_experts": 4, "num_experts_per_tok": 2}}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    family = family.partition(" ")[0]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES, **EXPERTS.get(family, {})))
    return model if family == "olmoe" else model.double()  # its router takes float32 alone


def adapted(model: Any, targets: Any, **options: Any) -> Any:
    torch.manual_seed(1)  # both A and B drawn: with B = 0, as peft begins, A would have no gradient in the first step
    settings: dict[str, Any] = {"r": 3, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(target_modules=targets, **settings, **options))


def train(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(5):
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        tp.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", list(TARGETS))
def test_five_steps_are_those_of_one_process(ranks: Ranks, family: str) -> None:
    alone, model = (adapted(model_of(family), TARGETS[family]) for _ in range(2))
    inner = model.get_base_model()
    tp.apply_plan(inner, ranks.mesh((2,), ("tp",)), tp.from_hf_tp_plan(inner))
    assert equal_after_training(model, alone) >= 2 * 2  # two layers


@pytest.mark.ranks(4)
@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "o_proj"], ["k_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("planner", ["from_hf_tp_plan", "auto_plan"])
def test_fewer_key_value_heads_than_ranks(ranks: Ranks, targets: Any, planner: str) -> None:
    """The adapter of a copied key-value head is copied with it; heads that do not divide are refused with a reason."""
    alone, model = (adapted(model_of("qwen3"), targets) for _ in range(2))
    inner, mesh = model.get_base_model(), ranks.mesh((4,), ("tp",))
    plan = tp.from_hf_tp_plan(inner) if planner == "from_hf_tp_plan" else tp.auto_plan(inner, tp_size=4)
    handle = tp.apply_plan(inner, mesh, plan)
    assert sum(isinstance(entry.style, tp.GQAParallel) for entry in handle.plan.modules) == 2
    train(model), train(alone)
    adapters, reference = get_peft_model_state_dict(model), get_peft_model_state_dict(alone)
    for name, value in reference.items():
        shard = adapters[name]
        torch.testing.assert_close(shard.full_tensor() if hasattr(shard, "full_tensor") else shard, value)
    assert len(reference) >= 2 * 2
    six = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    other = adapted(AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**six)), targets)
    with pytest.raises(tp.PlanError, match=r"does-not-divide.*num_heads=6.*tp=4"):
        tp.apply_plan(other.get_base_model(), mesh, tp.from_hf_tp_plan(other.get_base_model()))


@pytest.mark.parametrize("kind", ["IA3Config", "OFTConfig", "VeraConfig", "AdaLoraConfig"])
def test_other_adapters_are_refused_by_name(kind: str) -> None:
    import peft

    options: dict[str, Any] = {"total_step": 10} if kind == "AdaLoraConfig" else {}
    options |= {"feedforward_modules": []} if kind == "IA3Config" else {}
    options |= {"oft_block_size": 8, "r": 0} if kind == "OFTConfig" else {}
    model = get_peft_model(model_of("llama"), getattr(peft, kind)(target_modules=["q_proj", "v_proj"], **options))
    inner: Any = model.get_base_model()
    problems = tp.plan_styles(inner, tp.from_hf_tp_plan(inner), 2).problems
    assert {problem.code for problem in problems} == {"lora-mismatch"} and len(problems) == 4
    assert all("this adapter is not supported: peft.tuners." in problem.found for problem in problems), problems


def equal_after_training(model: Any, alone: Any) -> int:
    """Compare losses, adapters and saved modules with one process; return how many of them are shards."""
    double = next(model.parameters()).dtype == torch.float64
    tolerance: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-8} if double else {"rtol": 1e-5, "atol": 1e-5}
    losses = train(alone)
    assert train(model) == pytest.approx(losses, rel=1e-6)  # transformers takes the loss in float32
    assert losses[4] != losses[0]
    adapters = get_peft_model_state_dict(model)
    reference = get_peft_model_state_dict(alone)
    assert adapters.keys() == reference.keys() and len(adapters) > 0
    sharded = 0
    for name, value in adapters.items():
        full = value
        if isinstance(value, DTensor):
            full, sharded = value.full_tensor(), sharded + (value.to_local().shape != value.shape)
        torch.testing.assert_close(full, reference[name], **tolerance)
    return sharded


def refused_layers(inner: Any, mesh: Any, plan: dict[str, Any]) -> list[str]:
    """Apply a plan that is refused, and return the layers that the error names."""
    with pytest.raises(
        tp.PlanError, match=r"module-kind.*name the layers inside.*or leave it out of the plan"
    ) as caught:
        tp.apply_plan(inner, mesh, plan)
    assert {problem.code for problem in caught.value.problems} == {"module-kind"}
    return [problem.name.split(":")[0] for problem in caught.value.problems]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head"], ["down_proj"], ["norm"]], ids=",".join)
def test_modules_to_save(ranks: Ranks, saved: list[str]) -> None:
    """The wrapper holds a copy of the layer: the plan names the copy that trains."""
    mesh = ranks.mesh((2,), ("tp",))
    alone, model = (adapted(model_of("llama"), ["q_proj", "o_proj"], modules_to_save=saved) for _ in range(2))
    inner = model.get_base_model()
    plan = dict(tp.from_hf_tp_plan(inner))
    if saved != ["norm"]:  # which no style is for
        names = refused_layers(inner, mesh, plan)
        assert len(names) >= len(saved)
        plan = {f"{name}.modules_to_save.default" if name in names else name: plan[name] for name in plan}
    tp.apply_plan(inner, mesh, plan)
    assert equal_after_training(model, alone) >= 2 * 2


@pytest.mark.ranks(2)
def test_prefixes_are_refused_and_prompts_right(ranks: Ranks) -> None:
    """Prefix tuning fills a cache with all heads; the refusal names the ways that are right."""
    losses = []
    for sharded, kind in ((False, PromptTuningConfig), (True, PromptTuningConfig), (True, PrefixTuningConfig)):
        inner = model_of("llama")
        torch.manual_seed(2)
        model: Any = get_peft_model(inner, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).double()
        if sharded:
            tp.apply_plan(inner, ranks.mesh((2,), ("tp",)), tp.from_hf_tp_plan(inner))
        if kind is PromptTuningConfig:
            losses.append(train(model))
            continue
        with pytest.raises(tp.PlanError, match=r"check-raises.*prefix tuning of peft.*PromptTuningConfig and LoRA"):
            train(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][4] != losses[0][0]


@pytest.mark.ranks(2)
def test_adapters_after_the_plan_are_refused(ranks: Ranks) -> None:
    """Peft sizes A and B by the shard that it finds: trained without a word, as another model on each rank."""
    model = model_of("llama")
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), tp.from_hf_tp_plan(model))
    with pytest.raises(tp.PlanError, match=r"model-changed.*lora_A.*LoRAParallel"):
        train(adapted(model, TARGETS["llama"]))


def test_a_plan_for_the_wrapper_names_the_model_inside() -> None:
    with pytest.raises(tp.PlanError, match=r"unmatched-pattern.*get_base_model"):
        tp.from_hf_tp_plan(adapted(model_of("llama"), TARGETS["llama"]))


@pytest.mark.filterwarnings("ignore:auto_plan shards:UserWarning")
def test_updates_of_experts_parameters_are_refused_by_name() -> None:
    """`target_parameters` on experts: every source of plans; without the experts' styles the rest is planned."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    inner = adapted(model_of("olmoe"), ["q_proj"], target_parameters=targets).get_base_model()
    for styles in (tp.auto_plan(inner), tp.auto_plan(inner, tp_size=2, ep_size=2), tp.from_hf_tp_plan(inner)):
        problems = tp.plan_styles(inner, styles, 2).problems
        assert [problem.name for problem in problems] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        assert all("target_parameters" in problem.found for problem in problems)
        rest = {name: style for name, style in styles.items() if "experts" not in name}
        assert not tp.plan_styles(inner, rest, 2).problems
