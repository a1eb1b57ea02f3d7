"""transformers' DistributedConfig: layouts as its own meshes put them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shard_spec import PlanError, ShardingPlan
from torch import nn

pytestmark = pytest.mark.extra("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MixtralConfig": {"num_local_experts": 8},
    "Qwen3MoeConfig": {"num_experts": 8, "moe_intermediate_size": 16},
    "GptOssConfig": {"num_local_experts": 8},
}
SIZES: list[dict[str, Any]] = [
    {"tp_size": 4},
    {"fsdp_size": 4},
    {"fsdp_size": 2, "tp_size": 2},
    {"dp_replicate_size": 2, "fsdp_size": 2, "tp_size": 2},
    {"tp_size": 4, "ep_size": 4},
    {"tp_size": 2, "ep_size": 2, "tp_plan": {"lm_head": "replicate"}},
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 4, "tp_size": 2, "ep_size": 4},
    {"dp_replicate_size": 2, "fsdp_size": 4, "tp_size": 2, "ep_size": 8},
    {"fsdp_size": 4, "tp_size": 2, "tp_plan": {"model.embed_tokens": "replicate", "lm_head": "rowwise"}},
]


def model(family: str) -> nn.Module:
    import transformers

    config = getattr(transformers, family)(**SMALL, **FAMILIES[family])
    with torch.device("meta"):
        net: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return net


def boxes_of_transformers(config: Any, plans: Any, name: str, values: torch.Tensor, rank: int) -> Any:
    """The shard that transformers' own steps leave: tp or ep on its mesh, then fully_shard on dim 0 of the other."""
    tp_plan, ep_plan, _ = plans
    owner = name.rpartition(".")[0]
    experts = ep_plan.get(name) == "grouped_gemm"
    inner = config.ep_size if experts else config.tp_size
    outer = config.efsdp_size if experts else config.fsdp_size
    dims = {"colwise": -2, "colwise_gather_output": -2, "rowwise": -1, "embedding_rowwise": 0}
    style = "experts" if experts else tp_plan.get(name, tp_plan.get(owner, "replicate"))
    dim: int | None = 0 if experts else dims.get(style)
    if values.dim() == 1 and dim is not None:
        dim = None if style == "rowwise" else 0
    if style == "packed_colwise":
        halves = values.chunk(2, -2)
        values = torch.cat([half.chunk(inner, -2)[rank % inner] for half in halves], -2)
    elif dim is not None:
        values = values.chunk(inner, dim)[rank % inner]
    return values.chunk(outer, 0)[rank // inner % outer] if outer > 1 else values


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_are_those_of_transformers(family: str) -> None:
    from transformers.distributed import DistributedConfig

    compared, net = 0, model(family)
    for sizes in SIZES:
        if family == "LlamaConfig" and "ep_size" in sizes:
            continue
        config, theirs = DistributedConfig(**sizes), model(family)
        plans: Any = theirs._resolve_parallel_plans(config)  # type: ignore[operator]  # a method of transformers' models
        plan = ShardingPlan.from_distributed_config(config, net)
        assert plan.validate(net) == ()
        layouts = plan.resolve(net)
        world = config.dp_replicate_size * config.fsdp_size * config.tp_size
        for name, parameter in net.named_parameters():
            shape = tuple(parameter.shape)
            full = torch.arange(parameter.numel()).view(shape)
            for rank in range(world):
                boxes = layouts[name].boxes(rank, shape)
                actual = torch.cat([full[box.slices()].flatten() for box in boxes]).sort().values
                expected = boxes_of_transformers(config, plans, name, full, rank).flatten().sort().values
                assert torch.equal(actual, expected), (sizes, name, rank)
                compared += 1
        assert ShardingPlan.from_json(plan.to_json()) == plan
    assert compared > 400


def test_what_a_config_cannot_say_is_refused_by_name() -> None:
    llama = model("LlamaConfig")
    with pytest.raises(PlanError, match=r"\[not-expressible\] pp_size: 2 stages"):
        ShardingPlan.from_distributed_config({"pp_size": 2}, llama)
    with pytest.raises(PlanError, match="unmatched-pattern"):
        ShardingPlan.from_distributed_config({"tp_size": 2, "tp_plan": {"layers.*.nothing": "colwise"}}, llama)


def test_expert_context_and_pipeline_axes() -> None:
    """Experts stay where they are; dense weights are reduced along expert and context axes; stages are left out."""
    mesh = {"pp": 2, "dp": 2, "cp": 2, "ep": 4, "tp": 2}
    experts = {"model.layers.*.mlp.experts.*": "ep:S(0)", "model.layers.*.self_attn.{q,k,v}_proj.weight": "tp:S(0)"}
    plan = ShardingPlan({**experts, "model.layers.*.self_attn.o_proj.weight": "tp:S(1)"}, mesh=mesh)
    net = model("MixtralConfig")
    assert plan.validate(net, world_size=64) == ()
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert "along ep: dim 0 is sharded over 4 ranks" in plan.explain("model.layers.0.mlp.experts.down_proj", net)
    full_memory, memory = ShardingPlan({}, mesh=mesh).memory(net), plan.memory(net)
    expert_bytes = sum(p.numel() * 4 for name, p in net.named_parameters() if "experts" in name)
    attention_bytes = sum(p.numel() * 4 for name, p in net.named_parameters() if "_proj.weight" in name)
    saved = full_memory.on(0)["parameters"] - memory.on(0)["parameters"]
    assert saved == expert_bytes * 3 // 4 + attention_bytes // 2
    moved = plan.communication(net, (16, 8))
    reduced = [each for each in moved.transfers if each.what == "gradients"]
    gradients = {axis: sum(each.full_bytes for each in reduced if each.axis == axis) for axis in ("dp", "cp", "ep")}
    assert gradients["dp"] == gradients["cp"] == memory.on(0)["parameters"]
    assert gradients["ep"] == gradients["dp"] - expert_bytes // 4  # experts stay
    assert {t.axis for t in moved.transfers if t.what == "activations"} == {"tp", "ep", "cp"}
    assert moved.count(axis="pp") == 0
    text = str(moved)
    for remark in ("tokens travel to experts and back", "pp: every stage counts as planned"):
        assert remark in text
