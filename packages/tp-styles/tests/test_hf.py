"""Hugging Face's plans, on tiny random models of several families; the benchmark runs all of `hf_models.FAMILIES`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Replicate
from tp_styles._shared.patterns import Pattern
from tp_styles.sources.names import OLDER, TODAY, todays_names

MARKS = "<!-- families: begin -->\n", "<!-- families: end -->"
SAMPLE = ["gemma2", "phi3", "qwen2_moe", "granitemoe", "deepseek_v2", "stablelm"]
OTHERS = "llama", "mixtral", "inkling", "mamba", "mamba2", "rwkv"
ENCODERS = "t5", "beit", "bert", "roberta", "vit", "clip", "bart", "whisper"
before_ranks = partial(models.preload, "shard_spec.planners", *hf_models.code_of(*SAMPLE, *OTHERS, *ENCODERS))


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_families(ranks: Ranks) -> None:
    """Logits, gradients and generation by the model's own plan, and what it leaves whole; Stablelm has no plan."""
    mesh = ranks.mesh((2,), ("tp",))
    for family in SAMPLE:
        steps = 5 if family in ("granitemoe", "stablelm") else 0
        assert hf_models.check_by(family, mesh, "auto_plan", steps)["share"] >= 0.95
    _from_a_configuration()


def _from_a_configuration() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**hf_models.SMALL)
    with torch.device("meta"):
        styles = tp.from_hf_tp_plan(LlamaForCausalLM(config))
    with pytest.raises(tp.PlanError, match=r"wrong-type.*from_config"):
        tp.from_hf_tp_plan(config)  # type: ignore[arg-type,unused-ignore]  # untyped without transformers
    assert styles["model.layers.0.self_attn"] == tp.GQAParallel(num_heads=4, num_kv_heads=2, kv_replicate=True)
    assert styles["model.embed_tokens"] == tp.RowwiseParallel()


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_methods_that_take_full_models(ranks: Ranks, tmp_path: Path) -> None:
    """`resize_token_embeddings` and `save_pretrained` are refused with the call to use, which is right."""
    from transformers import AutoModelForCausalLM

    mesh, ids = ranks.mesh((2,), ("tp",)), torch.arange(2, 26).view(2, 12)
    for family in ("llama", "phi3"):  # phi3's fused weights are no DTensors
        model = hf_models.build(family)
        alone: Any = copy.deepcopy(model)
        handle = tp.apply_plan(model, mesh, tp.auto_plan(model))
        one: Any = model
        for target in (one, one.model):
            with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*state_dict=tp_styles.full_state_dict"):
                target.save_pretrained(tmp_path)
            with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*resize before apply_plan"):
                target.resize_token_embeddings(64)
        folder = ranks.gather(str(tmp_path / family))[0]  # transformers writes the configuration on rank 0 alone
        one.save_pretrained(folder, state_dict=tp.full_state_dict(one), is_main_process=ranks.rank == 0)
        ranks.gather("written")
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
        assert all(torch.equal(saved[name], value) for name, value in alone.state_dict().items())
        handle.undo()
        for each in (one, alone):
            torch.manual_seed(2)
            each.resize_token_embeddings(64, mean_resizing=False)
        tp.apply_plan(one, mesh, tp.auto_plan(one))
        torch.testing.assert_close(one(input_ids=ids).logits, alone(input_ids=ids).logits, atol=1e-9, rtol=0)


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_attention_weights_of_some_heads_are_refused(ranks: Ranks) -> None:
    """In the first call and in a later one: each rank has those of its own heads."""
    model: Any = hf_models.build("llama")
    model.set_attn_implementation("eager")
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), tp.from_hf_tp_plan(model))
    ids = torch.arange(2, 26).view(2, 12)
    for options in ({"output_attentions": True}, {"use_cache": False}, {"output_attentions": True}):
        if options == {"use_cache": False}:
            model(ids, **options)
            assert "equal to the original" in handle.report()
            continue
        with pytest.raises(tp.PlanError, match=r"shard-leaves.*attentions.*undo"):
            model(ids, **options)


STATE_SPACES: dict[str, tuple[dict[str, Any], str, str]] = {
    "mamba": ({"state_size": 4, "time_step_rank": 3}, "backbone.embeddings", "lm_head"),
    "mamba2": (
        {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        "backbone.embeddings",
        "lm_head",
    ),
    "rwkv": ({"rescale_every": 1, "context_length": 32}, "rwkv.embeddings", "head"),
}
"""Type -> sizes, names of embedding and head. RWKV divides the weights of its second layer in evaluation."""


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, 4, timeout=300)
@pytest.mark.parametrize("kind", STATE_SPACES)
def test_state_spaces_by_the_plans_of_the_page(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """Five steps, generation with a cache and a checkpoint are those of one process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    page = Path(__file__, "../../../../docs/howto/mamba-rwkv.md").resolve().read_text()
    blocks = [text.partition("```")[0] for text in page.split("```python")[1:]]
    namespace: dict[str, Any] = {}
    exec(blocks[list(STATE_SPACES).index(kind)], namespace)
    more, embedding, head = STATE_SPACES[kind]
    plan = {**namespace["plan"], embedding: tp.RowwiseParallel(), head: tp.ColwiseParallel(output_layouts=Replicate())}
    config = AutoConfig.for_model(kind, vocab_size=32, hidden_size=16, num_hidden_layers=2, **more)
    model: Any = models.seeded(lambda: AutoModelForCausalLM.from_config(config))
    alone: Any = copy.deepcopy(model)
    fresh: Any = copy.deepcopy(model)
    handle = tp.apply_plan(model, ranks.mesh((ranks.world_size,), ("tp",)), plan)
    assert sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters()) < 0.6 * alone.num_parameters()
    batches = [torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(step)) for step in range(5)]
    losses: list[list[float]] = [[], []]
    for one, values in zip((model, alone), losses, strict=True):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=False)
        for ids in batches:
            loss = one(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "equal to the original" in handle.report()
    save(model.state_dict(), checkpoint_id=ranks.gather(str(tmp_path))[0])
    state = fresh.state_dict()
    load(state, checkpoint_id=ranks.gather(str(tmp_path))[0])
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=2e-4, rtol=1e-3)
    generated = [m.eval().generate(batches[0][:, :4], max_new_tokens=8, do_sample=False) for m in (model, alone)]
    assert torch.equal(*generated)


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_how_much_auto_plan_shards() -> None:
    """Below a half it warns, at nothing it raises; a plan that mixes heads gives way to the planner's blocks (doge)."""
    with pytest.warns(UserWarning, match=r"auto_plan shards \d+\.\d% of the parameters of JetMoeForCausalLM; largest"):
        tp.auto_plan(hf_models.small("jetmoe"))
    with pytest.raises(tp.PlanError, match=r"unmatched-pattern.*no block that is known"):
        tp.auto_plan(nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)))
    # Layers of a block that nobody knows, unless the block has parameters of its own.
    styles = tp.auto_plan(hf_models.small("recurrent_gemma"))
    gathered = {name for name, style in styles.items() if style == tp.ColwiseParallel(output_layouts=Replicate())}
    assert any(name.endswith("temporal_block.linear_x") for name in gathered)
    with pytest.warns(UserWarning, match="auto_plan shards"):
        assert not any("mixer" in name for name in tp.auto_plan(hf_models.small("mamba")))
    model = hf_models.small("doge")
    styles = tp.auto_plan(model)
    assert not any("self_attn" in name for name in styles)  # its `A` acts on all heads
    assert any(name.endswith("down_proj") for name in styles)
    assert any("self_attn" in name for name in tp.from_hf_tp_plan(model))
    styles = tp.auto_plan(hf_models.small("zamba2"))
    inner = [style for name, style in styles.items() if name.endswith(("gate_up_proj", "adapter_list.0.1"))]
    assert len(inner) == 18  # its adapters give all channels, so that the layer beside them does
    assert all(style.output_layouts == (Replicate(),) for style in inner)  # type: ignore[attr-defined]


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_plan_without_the_norms_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients would stay unsummed (sarvam_moe): the planner's blocks sum them."""
    model: Any = hf_models.small("qwen3")
    plan = {name: style for name, style in model.tp_plan.items() if "norm" not in name}
    assert len(plan) < len(model.tp_plan)
    monkeypatch.setattr(type(model), "tp_plan", plan)
    styles = tp.auto_plan(model)
    norms = [style for name, style in styles.items() if name.endswith(("q_norm", "k_norm"))]
    assert norms == [tp.NoParallel(sum_gradient=True)] * 4


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_a_plan_that_shards_a_fused_weight_otherwise(ranks: Ranks) -> None:
    """Inkling's own plan gives a rank the gate alone; its second input's gradient is a partial sum, too."""
    row = hf_models.check_type("inkling_text", ranks.mesh((2,), ("tp",)))
    assert row["outcome"] == "right"
    assert row["share"] > 0.95


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_shards_that_grouped_products_do_not_take(ranks: Ranks) -> None:
    """Four columns of bfloat16 are 8 bytes: refused with the call to use, which is right; of float32 they are 16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    mesh, ids = ranks.mesh((2,), ("tp",)), torch.arange(2, 26).view(2, 12)
    sizes = {**hf_models.SMALL, **hf_models.EXPERTS, "intermediate_size": 8, "num_hidden_layers": 1}
    for dtype in (torch.bfloat16, torch.float32):
        config = AutoConfig.for_model("mixtral", **sizes)
        model: Any = models.seeded(lambda c=config: AutoModelForCausalLM.from_config(c)).to(dtype)  # type: ignore[misc]
        alone = copy.deepcopy(model)
        assert model.config._experts_implementation == "grouped_mm"
        styles = tp.auto_plan(model)
        if dtype == torch.bfloat16:
            with pytest.raises(tp.PlanError, match=r"does-not-divide.*down_proj.*set_experts_implementation"):
                tp.apply_plan(model, mesh, styles)
            model.set_experts_implementation("eager")
            assert tp.plan_styles(model, styles, 2).problems == ()
        handle = tp.apply_plan(model, mesh, styles)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(model(ids).logits, alone(ids).logits, atol=tolerance, rtol=tolerance)
        assert "check of MixtralForCausalLM (training, with gradients): equal to the original" in handle.report()


def test_names_of_styles() -> None:
    assert todays_names({"a": "colwise_rep", "b": "rowwise"}) == {"a": "colwise_gather_output", "b": "rowwise"}
    assert set(OLDER.values()) <= set(TODAY)
    assert len(TODAY) == 17
    with pytest.raises(tp.PlanError) as caught:
        todays_names({"a": "colwis", "b": "x", "c": "rowwise"})
    assert len(caught.value.problems) == 2
    with pytest.raises(tp.PlanError, match="missing-argument"):
        tp.from_hf_tp_plan(nn.Linear(2, 2))


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_every_plan_of_transformers_by_name() -> None:
    """Each style name of each plan has a meaning, and each pattern is one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = {CONFIG_MAPPING[key] for key in CONFIG_MAPPING}
    plans = [plan for kind in kinds if (plan := getattr(kind, "base_model_tp_plan", None))]
    assert len(plans) >= 132
    names = 0
    for plan in plans:
        assert set(todays_names(plan).values()) <= set(TODAY)
        names += sum(Pattern(key).is_exact or Pattern(key).matches(key.replace("*", "0")) for key in plan)
    assert names == sum(map(len, plans))


# Sub-configurations, without a causal model of their own or with defaults from which transformers' code builds none.
UNBUILT = {
    "cohere_compass_text",
    "deepseek_ocr2_text",
    "diffusion_gemma_text",
    "lfm2_moe",
    "qwen3_omni_moe_talker_text",
    "t5_gemma_module",
    "t5gemma2_decoder",
    "t5gemma2_text",
}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_every_model_with_a_plan_is_planned() -> None:
    """Each configuration with a plan, as a model on the meta device: its plan is accepted for two ranks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = {key: CONFIG_MAPPING[key] for key in CONFIG_MAPPING}
    kinds = {key: kind for key, kind in kinds.items() if getattr(kind, "base_model_tp_plan", None)}
    planned, refused, unbuilt = 0, {}, set()
    for key, kind in kinds.items():
        model = hf_models.on_meta(key, kind)
        if model is None:
            unbuilt.add(key)
            continue
        plan = tp.plan_styles(model, tp.from_hf_tp_plan(model), 2)
        divided = any(not spec.split.is_replicated for module in plan.modules for _, spec in module.spec.parameters)
        if plan.problems or not divided:
            refused[key] = [str(problem) for problem in plan.problems]
        planned += not plan.problems and divided
    # Of the defaults of one, 1407 columns in each expert, torch's grouped product takes none, sharded or not.
    assert refused.keys() <= {"deepseek_v2"}
    assert all("[does-not-divide]" in problem for problem in refused.get("deepseek_v2", ()))
    assert unbuilt <= UNBUILT
    assert planned + len(refused) == len(kinds) - len(unbuilt) >= 132, (planned, len(kinds))


def test_auto_plan_of_torchs_transformer() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    plan = tp.auto_plan(model)
    assert sorted(plan) == ["decoder.layers.0", "encoder.layers.0"]
    assert tp.plan_styles(model, plan, 2).problems == ()


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_encoders(ranks: Ranks) -> None:
    """Encoders, encoder-decoders and vision: biases that layers share, heads with tied biases; all are right."""
    import transformers

    mesh = ranks.mesh((2,), ("tp",))
    for _, make, inputs in hf_models.encoders():
        model = models.seeded(make).eval()
        alone = copy.deepcopy(model)
        styles = tp.auto_plan(model, tp_size=2)
        assert any(isinstance(style, tp.RowwiseParallel) for style in styles.values())
        handle = tp.apply_plan(model, mesh, styles)
        torch.testing.assert_close(model(**inputs)[0], alone(**inputs)[0], atol=1e-4, rtol=0)
        name = type(model).__name__  # gradients, too
        assert f"check of {name} (evaluation, with gradients): equal to the original" in handle.report()
    torch.manual_seed(ranks.rank)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**hf_models.ENCODER)).eval()
    tp.apply_plan(model, mesh, tp.auto_plan(model, tp_size=2))
    with pytest.raises(tp.PlanError, match=r"replicas-differ.*position_embeddings"):
        model(input_ids=torch.arange(2, 18).view(2, 8))


@pytest.mark.extra("transformers", "shard-spec")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_page_of_families() -> None:
    """What `auto_plan` shards of each family on two ranks, and what it leaves in full: as the page shows it."""
    page = Path(__file__).parents[3] / "docs" / "families.md"
    lines = ["| family | plan | sharded | in full on every rank |", "|---|---|---|---|"]
    shares = []
    decoders: list[tuple[str, Callable[[], nn.Module]]] = [
        (f"decoder: {family}", partial(hf_models.build, family)) for family in hf_models.FAMILIES
    ]
    for name, make in [*decoders, *((name, make) for name, make, _ in hf_models.encoders())]:
        model = make()
        plan = tp.plan_styles(model, tp.auto_plan(model, tp_size=2), 2)
        assert not plan.problems, (name, plan.problems)
        share, replicated = hf_models.divided(model, plan)
        shares.append(share)
        source = "its own" if getattr(model, "tp_plan", None) else "by blocks"
        text = ", ".join(f"`{one}`" for one in replicated)
        lines.append(f"| {name} | {source} | {share:.0%} | {text} |")
    assert len(shares) >= 49
    assert min(shares) > 0.3
    text = page.read_text()
    before, rest = text.split(MARKS[0])
    expected = before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + rest.split(MARKS[1])[1]
    if os.environ.get("UPDATE_README"):
        page.write_text(expected)
    assert text == expected or os.environ.get("UPDATE_README"), "run this test with UPDATE_README=1"
