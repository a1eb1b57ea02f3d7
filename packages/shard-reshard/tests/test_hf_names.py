"""Folders of transformers 5 in the hub's names, onto sharded models and back, with transformers as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Pair, Part, PlanError, hf_key_map, load_safetensors, reshard_state_dict, save_safetensors
from stored_files import write
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytestmark = [pytest.mark.extra("transformers", "safetensors")]

_SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip
_ROUTED: dict[str, Any] = {"num_experts": 12, "num_experts_per_tok": 2}  # expert 10 comes after expert 9


def _config(kind: str) -> Any:
    import transformers as t

    routed = _SIZES | {"num_key_value_heads": 2}
    if kind == "mixtral":
        return t.MixtralConfig(**routed, num_local_experts=12)
    if kind == "qwen3_moe":
        return t.Qwen3MoeConfig(**routed, **_ROUTED, head_dim=8, moe_intermediate_size=8)
    if kind == "olmoe":
        return t.OlmoeConfig(**routed, **_ROUTED)
    if kind == "gpt_oss":
        return t.GptOssConfig(**routed, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    groups = {"n_routed_experts": 12, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return t.DeepseekV3Config(**routed, **latent, **groups, moe_intermediate_size=8, first_k_dense_replace=1)


def _models(kind: str) -> tuple[Any, Any]:
    """Return a model of transformers with values, and the same on meta with its rotary buffers."""
    import transformers as t

    t.logging.set_verbosity_error()
    torch.manual_seed(0)
    reference = t.AutoModelForCausalLM.from_config(_config(kind)).eval()
    with torch.device("meta"):
        model = t.AutoModelForCausalLM.from_config(_config(kind)).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return reference, model


def _shard(model: nn.Module, mesh: Any) -> None:
    """Shard stacked experts by expert, and other matrices by rows where these divide."""
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            if value.ndim > 1 and value.shape[0] % mesh.size() == 0:
                sharded = distribute_tensor(value, mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=False))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_folders_of_experts_and_back(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    folder = Path(ranks.gather(str(tmp_path))[0])
    reference, model = _models(kind)
    if ranks.rank == 0:
        reference.save_pretrained(folder / "hub")
    ranks.gather(None)
    _shard(model, ranks.mesh((2,), ("ep",)))
    load_safetensors(folder / "hub", out=model, key_map=hf_key_map(model))
    compared = 0
    for name, value in reference.state_dict().items():
        loaded = model.state_dict()[name]
        full = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
        assert torch.equal(full, value), name
        compared += isinstance(loaded, DTensor)
    assert compared > 8
    save_safetensors(model, folder / "saved", key_map=hf_key_map(model, saving=True))
    stored, wanted = (load_file(folder / name / "model.safetensors") for name in ("saved", "hub"))
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], value) for name, value in wanted.items())


@pytest.mark.ranks(2)
def test_scaled_experts_of_a_folder_into_a_plain_model(ranks: Ranks, tmp_path: Path) -> None:
    """DeepSeek's own form: float8 experts with a scale for each block, in the hub's names."""
    folder = Path(ranks.gather(str(tmp_path))[0])
    reference, model = _models("deepseek_v3")
    key_map = hf_key_map(reference, saving=True)
    hub = dict(reshard_state_dict(reference, "2: R", key_map=key_map))
    wanted = {name: value.clone() for name, value in hub.items()}
    for name in list(hub):
        if ".experts." in name:
            numbers = hub[name].view(-1, 8, hub[name].shape[1] // 8, 8)
            scale = numbers.abs().amax((1, 3)) / 448
            hub[f"{name}_scale_inv"] = scale
            hub[name] = (numbers / scale[:, None, :, None]).view(hub[name].shape).to(torch.float8_e4m3fn)
            values = hub[name].float().view(numbers.shape) * scale[:, None, :, None]
            wanted[name] = values.view(hub[name].shape)
    if ranks.rank == 0:
        write(folder / "f.safetensors", hub)
    ranks.gather(None)
    _shard(model, ranks.mesh((2,), ("ep",)))
    pair = Pair("*.weight", "*.weight_scale_inv", (8, 8), dequantize=True)
    load_safetensors(folder, out=model, key_map=hf_key_map(model), pairs=pair)
    back = reshard_state_dict(model, "2: R", key_map=hf_key_map(model, saving=True))
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], value) for name, value in wanted.items())


@pytest.mark.ranks(2)
def test_one_cause_is_one_problem(ranks: Ranks, tmp_path: Path) -> None:
    """A folder with one tensor an expert, without the key map: once a line for each of 36,000 tensors."""
    folder = Path(ranks.gather(str(tmp_path))[0])
    reference, model = _models("mixtral")
    if ranks.rank == 0:
        reference.save_pretrained(folder / "hub")
    ranks.gather(None)
    with pytest.raises(PlanError, match=r"experts\.\*\.w\*\.weight: 72 of these.*hf_key_map\(model\)") as caught:
        load_safetensors(folder / "hub", out=model)
    assert len(str(caught.value).splitlines()) <= 10


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)


@pytest.mark.ranks(2)
def test_folders_that_hold_more_or_less(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    full = torch.arange(12.0).view(3, 4)
    stored = {"layer.weight": full, "rotary.inv_freq": torch.ones(2), "mtp.weight": torch.ones(2)}
    if ranks.rank == 0:
        for name in ("more", "stale", "variants", "bin"):
            (folder / name).mkdir()
        write(folder / "more" / "model.safetensors", stored)
        write(folder / "stale" / "model.safetensors", {"layer.weight": full})
        weights = {"layer.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "stale" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        for variant in ("model", "model.fp16"):
            (folder / "variants" / f"{variant}.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        (folder / "bin" / "pytorch_model.bin").write_bytes(b"")
    ranks.gather(None)
    model = _Half()
    for allowed in ((), "*.inv_freq", ["layer.*"]):
        with pytest.raises(PlanError, match=r"missing-argument\] mtp\.weight.*unexpected='ignore'"):
            load_safetensors(folder / "more", out=model, unexpected=allowed)
    for allowed in ("ignore", ["*.inv_freq", "mtp.*"]):
        loaded = load_safetensors(folder / "more", out=model, unexpected=allowed)
        assert list(loaded) == ["layer.weight"]
        assert sum(ranks.gather(loaded.read_bytes)) == full.nbytes  # the rest is not read
        assert torch.equal(model.layer.weight, full)
    everywhere = load_safetensors(folder / "more", "2: R", out=_Half(), unexpected="ignore")
    assert list(everywhere) == ["layer.weight"]
    assert len(load_safetensors(folder / "more", "2: R", unexpected="ignore")) == 3  # asked for, without a model
    calls = {
        "stale": r"names 2 of 2 files that are not there: model-00001-of-00002.*as model\.safetensors, in a list",
        "variants": r"2 variants of the weights: model\.fp16\.safetensors\.index\.json, model\.safetensors\.index",
        "bin": r"it has pytorch_model\.bin -> convert it once: .*save_pretrained",
    }
    for name, match in calls.items():
        with pytest.raises(PlanError, match=match) as caught:
            load_safetensors(folder / name, out=model)
        assert len(set(ranks.gather(str(caught.value)))) == 1


@pytest.mark.ranks(2)
def test_gemma_3_is_told_how_its_scale_is_set(ranks: Ranks, tmp_path: Path) -> None:
    import transformers as t

    folder = Path(ranks.gather(str(tmp_path))[0])
    config = t.Gemma3TextConfig(**_SIZES, num_key_value_heads=2, head_dim=8)
    with torch.device("meta"):
        model = t.AutoModelForCausalLM.from_config(config).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if ranks.rank == 0:
        t.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    ranks.gather(None)
    hint = r"model\.model\.embed_tokens\.embed_scale = torch\.tensor\(config\.hidden_size \*\* 0\.5\)"
    with pytest.raises(PlanError, match=hint):
        load_safetensors(folder, out=model)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)  # what the hint says
    load_safetensors(folder, out=model)


@pytest.mark.ranks(2)
def test_stacked_experts_are_taken_apart(ranks: Ranks) -> None:
    """Each expert's halves come out of one sharded tensor of three dims; two dims are cut at once."""
    mesh, full = ranks.mesh((2,), ("ep",)), torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(0))
    for dim in range(3):
        state = {"gate_up": distribute_tensor(full, mesh, [Shard(dim)])}
        parts = [
            Part(f"{at}.{half}", dim=1, source_start=6 * half, size=6, unstack=at) for at in range(4) for half in (0, 1)
        ]
        moved = reshard_state_dict(state, "2: S(1)", key_map={"gate_up": parts})
        assert len(moved) == 8
        for at in range(4):
            for half in (0, 1):
                rows = full[at, 6 * half : 6 * half + 6].chunk(2, 1)[ranks.rank]
                assert torch.equal(moved[f"{at}.{half}"], rows)
        assert moved.plan.wire_bytes == moved.plan.lower_bound
        back = {f"{at}.{half}": Part("gate_up", stack=at, start=6 * half) for at in range(4) for half in (0, 1)}
        layouts = dict.fromkeys(back, "2: S(1)")
        options: Any = {"src_layouts": layouts, "shapes": dict.fromkeys(back, (6, 16)), "key_map": back}
        again = reshard_state_dict(moved, "2: R", **options)
        assert torch.equal(again["gate_up"], full)
    outs = {f"{at}.w": torch.zeros(12, 16) for at in range(4)}
    whole = {"gate_up": [Part(f"{at}.w", unstack=at) for at in range(4)]}
    reshard_state_dict(state, out=outs, key_map=whole)
    assert all(torch.equal(outs[f"{at}.w"], full[at]) for at in range(4))
    for code, keys in (
        (r"shape-mismatch.*unstack=", {"gate_up": [Part(f"{at}.w", source_start=at, size=1) for at in range(4)]}),
        ("box-out-of-range", {"gate_up": Part("0.w", unstack=4)}),
        ("conflicting-arguments", {"gate_up": Part("0.w", unstack=0, stack=0)}),
        ("conflicting-arguments", {"gate_up": Part("0.w", unstack=0, size=1)}),
    ):
        with pytest.raises(PlanError, match=code):
            reshard_state_dict(state, "2: R", out=outs, key_map=keys, strict=False)


@pytest.mark.ranks(2)
def test_a_folder_that_lacks_an_expert_moves_no_other_up(ranks: Ranks, tmp_path: Path) -> None:
    import transformers as t
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    folder = Path(ranks.gather(str(tmp_path))[0])
    model = t.AutoModelForCausalLM.from_config(_config("qwen3_moe"))
    save_safetensors(model, folder / "full", key_map=hf_key_map(model, saving=True))
    full = load_safetensors(folder / "full", "2: R")
    if ranks.rank == 0:
        write(folder / "m.safetensors", {n: v for n, v in full.items() if ".experts.5." not in n})
    ranks.gather(None)
    with pytest.raises(PlanError, match=r"stacked from 11 tensors.*not counted from 0"):
        load_safetensors(folder / "m.safetensors", "2: R", key_map=hf_key_map(model))
    # Square experts look alike before and after dims are exchanged: transformers takes them as they are.
    name, listed = "layers.0.mlp.experts.gate_up_proj", get_checkpoint_conversion_mapping("qwen3_vl_moe")
    for shape, found in (((2, 8, 8), "the shape before and after dims 1 and 2"), ((2, 4, 8), "")):
        held = {name: torch.empty(shape)}
        square = SimpleNamespace(_weight_conversions=listed, state_dict=lambda held=held: held, base_model_prefix="")
        if found:
            with pytest.raises(PlanError, match=found):
                hf_key_map(square)({name: shape})
        else:
            assert hf_key_map(square)({name: shape}) == {name: [Part(name)]}
            assert hf_key_map(square)({name: (2, 8, 4)}) == {name: [Part(name, dims=(0, 2, 1))]}
