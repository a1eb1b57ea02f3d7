"""Quantised checkpoints on the command line: stored bytes, no gradients, and a refusal where bytes are unknown."""

import json
from pathlib import Path
from typing import Any

import pytest
from shard_spec import FullyShardPlanner, ShardingPlan
from shard_spec.cli import main
from torch import nn

MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 160, "head_dim": 32}
MOE |= {"intermediate_size": 320, "moe_intermediate_size": 96, "num_hidden_layers": 2, "num_experts": 4}
MOE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_experts_per_tok": 2}
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
FP8 |= {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}
OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
         "model.embed_tokens", "lm_head"]}  # fmt: skip


def config(folder: Path, settings: dict[str, Any], **quantization: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(settings | ({"quantization_config": quantization} if quantization else {})))
    return str(path)


def report(capsys: Any, *arguments: str) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    output = capsys.readouterr()
    assert status == 0, output.err
    document: dict[str, Any] = json.loads(output.out)
    return document


@pytest.mark.extra("transformers")
def test_gpt_oss_counts_the_bytes_of_its_checkpoint(tmp_path: Path, capsys: Any) -> None:
    """The index of openai/gpt-oss-20b says total_size 13761264768."""
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_local_experts": 32}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
    path = config(tmp_path, OSS | sizes, **MXFP4)
    memory = report(capsys, "plan", path, "--mesh", "dp=1", "--optimizer", "none")["memory"]
    assert memory["parts"]["parameters"] == [13_761_264_768]
    assert "quantised weights count as stored, 4.25 bits" in memory["notes"][0]
    plain = report(capsys, "plan", path, "--mesh", "dp=1", "--optimizer", "none", "--dequantize")["memory"]
    assert plain["parts"]["parameters"] == [2 * 20_914_757_184]
    assert plain["parts"]["gradients"] == [2 * 20_914_757_184]
    # Experts have neither gradients nor state: router, attention, tables and biases alone.
    assert 0 < memory["parts"]["gradients"][0] < 0.2 * plain["parts"]["gradients"][0]


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("block", [[64, 64], None])
def test_float8_counts_what_transformers_modules_hold(tmp_path: Path, capsys: Any, block: list[int] | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    settings = FP8 | {"weight_block_size": block}
    memory = report(capsys, "plan", config(tmp_path, MOE, **settings), "--mesh", "dp=1")["memory"]
    names = {key: value for key, value in MOE.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **names))
    wanted = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=settings["modules_to_not_convert"])
    replace_with_fp8_linear(model, settings["modules_to_not_convert"], wanted, pre_quantized=True)
    packed = [each for each in model.parameters() if each.dtype == torch.float8_e4m3fn]
    assert len(packed) == 2 * (4 + 2)
    held = sum(each.nbytes for each in model.parameters())
    if block is None:  # one scale for each of gate and up, of which the count has one for both
        held -= 2 * 4 * 4
    assert memory["parts"]["parameters"] == [held]
    trained = [p for n, p in model.named_parameters() if p.dtype != torch.float8_e4m3fn and not n.endswith("scale_inv")]
    assert memory["parts"]["gradients"] == [sum(each.nbytes for each in trained)]


@pytest.mark.extra("transformers")
def test_packed_weights_travel_packed_and_are_sharded(tmp_path: Path, capsys: Any) -> None:
    from shard_spec.cli.sources import load_model

    path = config(tmp_path, MOE, **FP8)
    document = report(capsys, "plan", path, "--mesh", "fsdp=2", "--batch", "2x16", "--dtype", "bfloat16")
    plain = report(capsys, "plan", path, "--mesh", "fsdp=2", "--batch", "2x16", "--dtype", "bfloat16", "--dequantize")
    sent, full = (each["communication"]["by_axis"]["fsdp"]["parameters"] for each in (document, plain))
    assert 0.5 * full < sent < 0.75 * full
    assert any("dequantise" in note for note in document["memory"]["notes"])
    assert document["memory"]["parts"]["activations"][0] > 0
    model = load_model(path)
    assert isinstance(model, nn.Module)
    whole = ShardingPlan({}, mesh={"fsdp": 2}).memory(model).on(0)["parameters"]
    halves = FullyShardPlanner({"fsdp": 2}, "fsdp").build_plan(model).memory(model)
    assert whole <= sum(halves.on(rank)["parameters"] for rank in (0, 1)) <= whole + 2 * 20


@pytest.mark.extra("transformers")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "the method 'gptq', whose bytes are unknown"),
        ({"bits": 4}, "the method None"),
        (FP8 | {"weight_block_size": [0, 64]}, "not two numbers"),
        (FP8 | {"weight_block_size": "64"}, "not two numbers"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "no list of names"),
        (FP8 | {"modules_to_not_convert": ["model", "lm_head"]}, "matches no weight"),
    ],
)
def test_unknown_bytes_are_refused_with_the_way_on(
    tmp_path: Path, capsys: Any, settings: dict[str, Any], message: str
) -> None:
    path = config(tmp_path, MOE, **settings)
    assert main(["plan", path, "--mesh", "dp=2"]) == 2
    error = capsys.readouterr().err
    assert message in error
    plain = report(capsys, "plan", path, "--mesh", "dp=2", "--dequantize")
    assert (
        plain["memory"]["parts"] == report(capsys, "plan", config(tmp_path, MOE), "--mesh", "dp=2")["memory"]["parts"]
    )


@pytest.mark.extra("safetensors")
def test_packed_tensors_of_a_file_have_no_gradients(tmp_path: Path, capsys: Any) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"a.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "a.weight_scale_inv": torch.zeros(1, 1)}
    tensors |= {"b.weight": torch.zeros(8, 4), "b.logit_scale": torch.zeros(1)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    (tmp_path / "plan.json").write_text(ShardingPlan({}, mesh={"dp": 1}).to_json())
    memory = report(capsys, "check", str(tmp_path / "model.safetensors"), str(tmp_path / "plan.json"))["memory"]
    assert memory["parts"]["parameters"] == [16 + 4 + 128 + 4]
    assert memory["parts"]["gradients"] == [128 + 4]
