"""Conversions: round trips through the targets' own loaders, and refusals by name."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imported_first import before_ranks  # noqa: F401  # ranktest calls it
from ranktest import Ranks
from shard_spec import (
    BlockShard,
    InterleavedShard,
    Layout,
    MeshSpec,
    PlanError,
    Sharder,
    ShardingPlan,
    UnevenShard,
    dcp_state_dict,
)
from shard_spec._shared.sharding_info import Section, ShardingInfo
from shard_spec.convert.dcp import CheckpointShard
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Block(nn.Module):
    """Embedding, a feed-forward pair, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.fc1 = nn.Linear(8, 12)
        self.fc2 = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8, bias=False)
        self.head = nn.Linear(8, 16)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, tokens: Any) -> Any:
        hidden = self.embed(tokens)
        hidden = hidden + self.fc2(torch.relu(self.fc1(hidden)))
        return self.head(self.norm(hidden) * self.scale + self.shift)


def codes(caught: Any) -> Any:
    return [(problem.code, problem.name) for problem in caught.value.problems]


# ---- DTensor --------------------------------------------------------------------------------------------------------


def test_dtensor_placements_of_rules_and_of_tensors() -> None:
    plan = ShardingPlan({"*.weight": "dp:S(-1), tp:S(0)", "a.bias": "tp:S(0)"}, mesh={"dp": 2, "tp": 2})
    assert plan.to_dtensor_placements() == {
        "*.weight": (Shard(-1), Shard(0)),
        "a.bias": (Replicate(), Shard(0)),
    }
    model = nn.ModuleDict({"a": nn.Linear(8, 8)})
    assert plan.to_dtensor_placements(model) == {
        "a.weight": (Shard(1), Shard(0)),
        "a.bias": (Replicate(), Shard(0)),
    }


def test_dtensor_placements_mean_the_same_bytes() -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensor

    mesh = MeshSpec({"dp": 2, "tp": 4})
    compared = 0
    for text in ("S(0), S(0)", "dp:S(0), tp:S(0); order=tp>dp", "R, I(0,[4,4])", "R, B(0,2)", "R, S(1)"):
        layout = Layout(mesh, text)
        for rows in (16, 8):
            model = nn.ModuleDict({"a": nn.Linear(8, rows, bias=False)})
            plan = ShardingPlan({"a.weight": layout}, mesh=mesh)
            if text.startswith("R, I") and rows == 16:
                continue
            (placements,) = plan.to_dtensor_placements(model).values()
            assert Layout(mesh, placements).equivalent_to(layout, (rows, 8))
            for rank in mesh.ranks:
                shape, offsets = dtensor((rows, 8), mesh.shape, list(mesh.coordinate(rank) or ()), placements)
                assert shape == layout.local_shape(rank, (rows, 8))
                assert offsets == layout.boxes(rank, (rows, 8))[0].offsets
                compared += 1
    assert compared == 9 * 8


@pytest.mark.parametrize(
    "value",
    [UnevenShard(0, (3, 5)), BlockShard(0, 3), BlockShard(0, 1, cyclic=True), InterleavedShard(0, (6, 2))],
    ids=str,
)
def test_what_dtensor_cannot_say_is_refused_by_name(value: Any) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8)})
    plan = ShardingPlan({"a.weight": {"tp": value}}, mesh={"tp": 2})
    for arguments in ((model,), ()):
        with pytest.raises(PlanError) as caught:
            plan.to_dtensor_placements(*arguments)
        assert codes(caught) == [("not-expressible", "a.weight")]
    # where it is a plain shard by another name, it is said
    same = ShardingPlan({"a.weight": {"tp": BlockShard(0, 2)}}, mesh={"tp": 2})
    assert same.to_dtensor_placements(model)["a.weight"] == (Shard(0),)


# ---- parallelize_module ---------------------------------------------------------------------------------------------

BLOCK_RULES = {
    "embed.weight": "tp:S(0)",
    "fc1.weight": "tp:S(0)",
    "fc1.bias": "tp:S(0)",
    "fc2.weight": "tp:S(1)",
    "head.{weight,bias}": "tp:S(0)",
}


@pytest.mark.ranks(2)
def test_a_parallelize_plan_round_trips_through_parallelize_module(ranks: Ranks) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    model, reference = Block(), Block()
    reference.load_state_dict(model.state_dict())
    mesh = ranks.mesh((2,), ("tp",))
    plan = ShardingPlan(BLOCK_RULES, {"head": "tp:R"}, mesh=mesh)
    styles = plan.to_parallelize_plan(model)
    assert set(styles) == {"embed", "fc1", "fc2", "head"}
    resolved = plan.resolve(model)
    parallelize_module(model, mesh, styles)
    live = ShardingPlan.from_module(model).resolve(reference)
    assert len(live) == 10
    for name in live:
        assert live[name].equivalent_to(resolved[name], resolved.tensor(name).shape), name
    tokens = torch.arange(6).view(2, 3)
    assert torch.allclose(model(tokens), reference(tokens), atol=1e-6)  # sums in another order


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"fc1.weight": "tp:S(0)"}, "fc1"),  # the bias stays whole: no style does that
        ({"fc2.{weight,bias}": "tp:S(-1)"}, "fc2"),
        ({"norm.weight": "tp:S(0)"}, "norm"),
        ({"fc1.*": "tp:B(0,5)"}, "fc1"),
        ({"fc1.*": "tp:I(0,[6,6])"}, "fc1"),
        ({"fc1.*": "dp:S(0), tp:S(0)"}, "fc1.weight"),
    ],
)
def test_what_no_style_does_is_refused_by_name(rules: Any, name: Any) -> None:
    with pytest.raises(PlanError) as caught:
        ShardingPlan(rules, mesh={"dp": 2, "tp": 2}).to_parallelize_plan(Block(), "tp")
    assert ("not-expressible", name) in codes(caught)


def test_refusals_of_ties_sharders_outputs_and_unclear_axes() -> None:
    class Mine(Sharder):
        def shard(self, module: Any) -> Any:
            return module

    tied = Block()
    tied.head.weight = tied.embed.weight
    with pytest.raises(PlanError, match="of its own"):
        ShardingPlan({"embed.weight": "tp:S(0)"}, mesh={"tp": 2}).to_parallelize_plan(tied)
    with pytest.raises(PlanError, match="Sharder"):
        ShardingPlan({"fc1": Mine()}, mesh={"tp": 2}).to_parallelize_plan(Block())
    with pytest.raises(PlanError, match="output_plan"):
        ShardingPlan({"fc2.weight": "tp:S(1)"}, {"fc2": "S(0)"}, mesh={"tp": 2}).to_parallelize_plan(Block())
    with pytest.raises(PlanError, match="output_plan"):
        ShardingPlan({"fc2.weight": "tp:S(1)"}, {"norm": "R"}, mesh={"tp": 2}).to_parallelize_plan(Block())
    rules = {"fc1.*": "tp:S(0)", "fc2.weight": "dp:S(0)"}
    with pytest.raises(PlanError, match="replicate along dp here"):
        ShardingPlan(rules, mesh={"dp": 2, "tp": 2}).to_parallelize_plan(Block())
    with pytest.raises(PlanError, match="unknown-axis"):
        ShardingPlan(rules, mesh={"dp": 2, "tp": 2}).to_parallelize_plan(Block(), "model")


# ---- DCP ------------------------------------------------------------------------------------------------------------

SHAPES = {"qkv": (16, 6), "uneven": (10, 3), "blocks": (12,), "plain": (8, 4), "whole": (5,)}


def dcp_plan(size: Any) -> Any:
    first = (10 - 3 * (size - 1), *[3] * (size - 1)) if size < 4 else (4, 0, 5, 1)
    rules = {
        "qkv": {"tp": InterleavedShard(0, (8, 4, 4))},
        "uneven": {"tp": UnevenShard(0, first)},
        "blocks": {"tp": BlockShard(0, 2, cyclic=True)},
        "plain": {"tp": Shard(1)},
        "whole": "R",
    }
    return ShardingPlan(rules, mesh={"tp": size})


def locals_of(plan: Any, rank: Any, values: Any) -> Any:
    from shard_spec.plan.resolve import ModelMetadata

    resolved = plan.resolve(ModelMetadata.from_shapes(SHAPES))
    state = {}
    for name, shape in SHAPES.items():
        state[name] = values(name)
        for dim, pieces in enumerate(resolved[name].intervals(rank, shape)):
            index = [i for offset, size in pieces for i in range(offset, offset + size)]
            state[name] = state[name].index_select(dim, torch.tensor(index, dtype=torch.int64))
    return state


def whole_value(name: Any) -> Any:
    return torch.arange(float(torch.Size(SHAPES[name]).numel())).view(SHAPES[name]) + len(name)


@pytest.mark.ranks(2)
def test_fused_and_uneven_weights_save_without_gathering_and_load_at_other_sizes(ranks: Ranks, tmp_path: Path) -> None:
    # DTensor-only stacks cannot: torch issue 140069 (fused QKV) is open since 2024.
    from shard_spec.plan.resolve import ModelMetadata

    metadata = ModelMetadata.from_shapes(SHAPES)
    path = Path(ranks.gather(str(tmp_path))[0]) / "checkpoint"
    plan = dcp_plan(2)
    state = plan.to_dcp(metadata, locals_of(plan, ranks.rank, whole_value), ranks.rank)
    save(state, checkpoint_id=path)
    compared = 0
    for size in (1, 2, 3, 4):
        other = dcp_plan(size)
        for rank in range(size):  # every rank of the other world, here in each process
            local = locals_of(other, rank, lambda name: torch.full(SHAPES[name], -1.0))
            wrapped = other.to_dcp(metadata, local, rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": it is
                load(wrapped, checkpoint_id=path, no_dist=True)
            expected = locals_of(other, rank, whole_value)
            for name, tensor in local.items():
                assert torch.equal(tensor, expected[name]), (size, rank, name)
                compared += 1
    assert compared == 10 * len(SHAPES)


@pytest.mark.ranks(4)
def test_strided_and_fused_shards_of_a_trained_model_load_on_another_mesh(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP over tensor parallelism leaves strided shards; an `_sharding_info` says what a local weight is."""
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, rows) for rows in (8, 10, 7, 1)))  # even, uneven, and a rank without rows
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    for layer in model:
        for name, value in list(layer.named_parameters()):
            shard = distribute_tensor(value.detach(), mesh["tp"], [Shard(0)])
            layer.register_parameter(name, nn.Parameter(shard))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for at, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    strided = [value for value in state["model"].values() if type(value.placements[0]) is not Shard]
    assert len(strided) == len(values)
    fused = torch.arange(48.0).view(8, 6)
    rank = mesh["tp"].get_local_rank()
    info = ShardingInfo(mesh["tp"], (Shard(0),), fused.shape, fused.stride(), (Section(4), Section(4)))
    parts = [fused[at + 2 * rank : at + 2 * rank + 2] for at in (0, 4)]
    local = nn.Parameter(torch.cat(parts))
    local._sharding_info = info  # type: ignore[attr-defined]  # what fused styles write
    state["model"]["fused"] = local
    path = Path(ranks.gather(str(tmp_path))[0]) / "checkpoint"
    save(dcp_state_dict(state), checkpoint_id=path)
    stepped = {name: value - 0.1 * torch.ones_like(value) for name, value in values.items()}
    moments = {name: (number + 1.0) * 0.1 for number, name in enumerate(values)}

    line = ranks.mesh((4,), ("tp",))
    other: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for number, (name, full_value) in enumerate(values.items()):
        empty = torch.full_like(full_value, -7.0)
        dim = full_value.dim() - 1
        other["model"][name] = distribute_tensor(empty, line, [Shard(dim)])
        other["optimizer"]["state"][number] = {"exp_avg": distribute_tensor(empty, line, [Shard(dim)])}
    other["model"]["fused"] = distribute_tensor(torch.zeros(8, 6), line, [Shard(1)])
    load(dcp_state_dict(other), checkpoint_id=path)
    reloaded: dict[str, Any] = {"model": {name: torch.zeros_like(each) for name, each in model.state_dict().items()}}
    load(dcp_state_dict(reloaded), checkpoint_id=path)  # the mesh that wrote it
    compared = 0
    for number, name in enumerate(values):
        full = other["model"][name].full_tensor()
        assert torch.allclose(full, stepped[name], atol=1e-6), name
        assert torch.equal(reloaded["model"][name].to_local(), state["model"][name].to_local()), name
        moment = other["optimizer"]["state"][number]["exp_avg"].full_tensor()
        assert torch.allclose(moment, torch.full_like(moment, moments[name])), name
        compared += full.numel() + moment.numel()
    assert torch.equal(other["model"]["fused"].full_tensor(), fused)
    assert compared == 2 * sum(value.numel() for value in values.values())


def test_a_checkpoint_shard_computes_nothing_and_checks_shapes() -> None:
    layout = Layout(MeshSpec({"tp": 2}), [InterleavedShard(0, 2)])
    shard = CheckpointShard(torch.zeros(4, 3), layout, (8, 3), 1)
    assert shard.shape == (8, 3)
    assert "boxes" in repr(shard)
    with pytest.raises(TypeError):
        shard + 1
    with pytest.raises(TypeError, match="only for"):
        shard.clone()
    with pytest.raises(PlanError, match="shape-mismatch"):
        CheckpointShard(torch.zeros(3, 3), layout, (8, 3), 1)
    plan = dcp_plan(2)
    from shard_spec.plan.resolve import ModelMetadata

    bad = {"qkv": torch.zeros(7, 6), "other": torch.zeros(1), "whole": torch.zeros(4), "note": "text"}
    with pytest.raises(PlanError) as caught:
        plan.to_dcp(ModelMetadata.from_shapes(SHAPES), bad, 0)
    assert codes(caught) == [
        ("shape-mismatch", "qkv"),
        ("unknown-name", "other"),
        ("shape-mismatch", "whole"),
    ]


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def llama(tied: Any = False) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.extra("transformers")
def test_a_hf_tp_plan_round_trips() -> None:
    model = llama()
    styles = dict(model.tp_plan)
    assert styles["model.embed_tokens"] == "embedding_rowwise"
    plan = ShardingPlan.from_hf_tp_plan(styles, model, {"tp": 2})
    resolved = plan.resolve(model)
    assert resolved["model.layers.1.self_attn.q_proj.weight"].sharded_axes == {"tp": -2}
    assert resolved["model.layers.1.mlp.down_proj.weight"].sharded_axes == {"tp": -1}
    prefixed = ShardingPlan.from_hf_tp_plan(model.config.base_model_tp_plan, model, {"tp": 2}, prefix="model.")
    assert plan.to_hf_tp_plan(model) == styles
    assert prefixed.to_hf_tp_plan(model) == {
        key: style for key, style in model.tp_plan.items() if key not in ("lm_head", "model.embed_tokens")
    }
    assert len(plan.plan) == 9  # globs, not one rule for each layer


@pytest.mark.extra("transformers")
@pytest.mark.ranks(2)
def test_a_hf_tp_plan_lies_as_transformers_lays_it(ranks: Ranks) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = llama()
    plan = ShardingPlan.from_hf_tp_plan(model.tp_plan, model, {"tp": 2})
    resolved = plan.resolve(model)
    exact = model._expand_parallel_plan(plan.to_hf_tp_plan(model))
    apply_tensor_parallelism(model, ranks.mesh((2,), ("tp",)), exact)
    live = ShardingPlan.from_module(model)
    num_sharded = 0
    for name, text in live.plan.items():
        layout = Layout(resolved[name].mesh, str(text))
        assert layout.equivalent_to(resolved[name], resolved.tensor(name).shape), name
        num_sharded += not layout.is_replicated
    assert num_sharded == 2 * 7 + 2


@pytest.mark.extra("transformers")
def test_what_a_tp_plan_or_a_plan_cannot_say_is_refused_by_name() -> None:
    model = llama()
    styles = {"model.layers.*.mlp": "moe_tp_experts", "model.norm": "sequence_parallel", "lm_head": "grouped_gemm"}
    with pytest.raises(PlanError) as caught:
        ShardingPlan.from_hf_tp_plan(styles, model, {"tp": 2})
    assert codes(caught) == [("not-expressible", name) for name in styles]
    with pytest.raises(PlanError, match="unmatched-pattern"):
        ShardingPlan.from_hf_tp_plan({"layers.*.mlp.up_proj": "colwise"}, model, {"tp": 2})
    dropped = ShardingPlan.from_hf_tp_plan({"model.norm": "sequence_parallel"}, model, {"tp": 2}, forward="drop")
    assert dropped.resolve(model)["model.norm.weight"].is_replicated
    for rules, name in [
        ({"model.layers.0.mlp.up_proj.weight": "S(0)"}, "model.layers.*.mlp.up_proj"),
        ({"model.norm.weight": "S(0)"}, "model.norm"),
        ({"lm_head.weight": "B(0,24)"}, "lm_head"),
    ]:
        with pytest.raises(PlanError) as caught:
            ShardingPlan(rules, mesh={"tp": 2}).to_hf_tp_plan(model)
        assert codes(caught) == [("not-expressible", name)]
