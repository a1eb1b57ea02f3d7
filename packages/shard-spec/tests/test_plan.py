"""Plans: resolving, memory, communication, words, differences and files."""

import copy
import json
import pickle
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from shard_spec import (
    ChunkShardingSpec,
    Layout,
    MeshSpec,
    OptimizerState,
    PlanError,
    Sharder,
    ShardingPlan,
    ShardingSpec,
    topology_preset,
)
from shard_spec.plan.resolve import ModelMetadata, TensorMetadata
from torch import nn

RULES = {
    "embed.weight": "tp:S(0)",
    "layers.*.attn.{wq,wk,wv}.weight": "tp:S(0)",
    "layers.*.attn.wo.weight": "tp:S(1)",
    "**.*norm.weight": "R, R",
}
MESH = {"dp": 2, "tp": 2}


class Block(nn.Module):
    def __init__(self, dim: Any) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(dim, bias=False)
        self.attn = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in ("wq", "wk", "wv", "wo")})


class Model(nn.Module):
    """Embedding, two blocks, a norm, a tied head, a buffer, a frozen scale and an integer parameter."""

    def __init__(self, vocab: Any = 32, dim: Any = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.codes = nn.Parameter(torch.zeros(6, dtype=torch.int8), requires_grad=False)
        self.register_buffer("table", torch.zeros(16, dtype=torch.float32))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))


@pytest.fixture
def model() -> Any:
    return Model()


# ---- resolving ------------------------------------------------------------------------------------------------------


def test_the_seeds_form_of_a_plan() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    output = ChunkShardingSpec(-1, ["rank:0/cpu", "rank:1/cpu"])
    rules = {"embed.weight": spec}
    plan = ShardingPlan(rules, {"embed": output}, ["embed"])
    rules.clear()  # the caller's mapping is copied
    assert plan.plan == {"embed.weight": spec}
    assert plan.output_plan == {"embed": output}
    assert plan.return_local_tensor == ("embed",)
    assert ShardingPlan({}).output_plan is None
    assert ShardingPlan({}).return_local_tensor is None
    resolved = plan.resolve(Model())
    assert resolved["embed.weight"].local_shape(1, (32, 8)) == (16, 8)
    assert {tuple(layout.mesh.ranks) for layout in resolved.values()} == {(0, 1)}  # also of tensors without a rule


def test_an_exact_name_beats_globs(model: Any) -> None:
    rules = {**RULES, "layers.1.attn.wq.weight": "dp:S(0)", "layers.*.attn.w?.weight": "tp:S(0)"}
    rules["layers.*.attn.wo.weight"] = "tp:S(0)"
    resolved = ShardingPlan(rules, mesh=MESH).resolve(model)
    assert resolved.rule_of["layers.1.attn.wq.weight"] == "layers.1.attn.wq.weight"
    assert resolved.rule_of["layers.0.attn.wq.weight"] == "layers.*.attn.{wq,wk,wv}.weight"
    assert resolved.rule_of["scale"] == ""
    assert str(resolved["layers.1.attn.wq.weight"]) == "dp:S(0), tp:R"
    assert str(resolved["layers.0.attn.wo.weight"]) == "dp:R, tp:S(0)"
    reordered = ShardingPlan(dict(reversed(rules.items())), mesh=MESH).resolve(model)
    assert dict(reordered) == dict(resolved)


def test_globs_that_differ_are_a_problem(model: Any) -> None:
    plan = ShardingPlan({"layers.0.**": "tp:S(0)", "**.wq.weight": "R, R"}, mesh=MESH)
    problems = plan.validate(model)
    assert [(p.code, p.name) for p in problems if p.code == "ambiguous-pattern"] == [
        ("ambiguous-pattern", "layers.0.attn.wq.weight")
    ]
    assert "layers.0.**" in problems[0].found
    assert "**.wq.weight" in problems[0].found
    assert ShardingPlan({"layers.0.**": "R, R", "**.wq.weight": "dp:R"}, mesh=MESH).validate(model) == ()


def test_tied_parameters_are_one_tensor(model: Any) -> None:
    resolved = ShardingPlan({"head.weight": "tp:S(0)"}, mesh=MESH).resolve(model)
    assert resolved.tied == (("embed.weight", "head.weight"),)
    assert resolved["embed.weight"] == resolved["head.weight"] == Layout(MeshSpec(MESH), "tp:S(0)")
    both = ShardingPlan({"head.weight": "tp:S(0)", "embed.weight": "tp:S(-2)"}, mesh=MESH)
    assert both.validate(model) == ()  # the same bytes, said twice
    (problem,) = ShardingPlan({"head.weight": "tp:S(0)", "embed.weight": "tp:S(1)"}, mesh=MESH).validate(model)
    assert problem.code == "tied-weights"


def test_globs_are_about_parameters_and_spelled_out_names_also_about_buffers(model: Any) -> None:
    resolved = ShardingPlan({"**": "tp:S(0)"}, mesh=MESH).resolve(model)
    assert resolved["scale"].sharded_axes == {"tp": 0}
    assert resolved["table"].is_replicated
    assert resolved["step"].is_replicated
    resolved = ShardingPlan({"table": "tp:S(0)"}, mesh=MESH).resolve(model)
    assert resolved["table"].sharded_axes == {"tp": 0}
    assert set(resolved.buffers) == {"table", "step"}
    assert set(resolved.parameters) == {name for name, _ in model.named_parameters()}


def test_strict_plans_name_every_parameter(model: Any) -> None:
    problems = ShardingPlan(RULES, mesh=MESH, strict=True).validate(model)
    assert [(p.code, p.name) for p in problems] == [
        ("unmatched-pattern", "scale"),
        ("unmatched-pattern", "codes"),
    ]
    assert ShardingPlan(RULES, mesh=MESH).validate(model) == ()


def test_values_may_be_anything_that_says_a_layout(model: Any) -> None:
    from shard_spec import Replicate, Shard

    mesh = MeshSpec(MESH)
    forms: list[Any] = ["dp:R, tp:S(0)", "R, S(0)", [Replicate(), Shard(0)], {"tp": Shard(0)}, {"tp": "S(0)"}]
    forms.append(Layout(mesh, "tp:S(0)"))
    layouts = {ShardingPlan({"embed.weight": form}, mesh=mesh).resolve(model)["embed.weight"] for form in forms}
    assert len(layouts) == 1
    one_axis = ShardingPlan({"embed.weight": Shard(0)}, mesh={"tp": 4}).resolve(model)
    assert one_axis["embed.weight"].sharded_axes == {"tp": 0}
    plans = [ShardingPlan({"embed.weight": form}, mesh=mesh) for form in forms]
    assert all(plan == plans[0] and plan.digest == plans[0].digest for plan in plans)


def test_a_sharders_module_is_its_own(model: Any) -> None:
    class Mine(Sharder):
        def shard(self, module: Any) -> Any:
            return module

    plan = ShardingPlan({"layers.0": Mine(), "**.wq.weight": "tp:S(0)"}, mesh=MESH)
    resolved = plan.resolve(model)
    assert "layers.0.attn.wq.weight" not in resolved
    assert resolved["layers.1.attn.wq.weight"].sharded_axes == {"tp": 0}
    assert plan.memory(model).uncounted == ("layers.0",)
    assert "Sharder" in plan.explain("layers.0.attn.wq.weight", model)


def test_a_name_that_only_begins_like_a_sharders_module_is_no_conflict() -> None:
    # torch reports "emb" as conflicting with "emb2.weight": it compares text, not segments.
    class Mine(Sharder):
        def shard(self, module: Any) -> Any:
            return module

    net = nn.ModuleDict({"emb": nn.Embedding(4, 4), "emb2": nn.Embedding(4, 4)})
    assert ShardingPlan({"emb": Mine(), "emb2.weight": "tp:S(0)"}, mesh={"tp": 2}).validate(net) == ()


def test_a_plan_is_immutable_pickles_and_can_be_pasted(model: Any) -> None:
    plan = ShardingPlan(RULES, {"head": "R, R"}, ["head"], mesh=MESH, strict=True)
    unpickled = pickle.loads(pickle.dumps(plan))
    assert unpickled == plan
    assert unpickled.digest == plan.digest
    assert eval(repr(plan), {"ShardingPlan": ShardingPlan, "MeshSpec": MeshSpec}) == plan
    loose: Any = plan
    make: Any = ShardingPlan
    with pytest.raises(AttributeError):
        loose.strict = False
    with pytest.raises(TypeError):
        loose.plan["x"] = 1
    with pytest.raises(TypeError):
        hash(plan)
    wrongs: Any = ((None,), ({}, [1]), ({}, None, "fc"))
    for wrong in wrongs:
        with pytest.raises(TypeError):
            make(*wrong)


def test_plans_compose() -> None:
    first = ShardingPlan({"a": "S(0)", "b": "R"}, mesh={"tp": 2})
    second = ShardingPlan({"b": "S(1)"}, return_local_tensor=["c"])
    assert dict((first | second).plan) == {"a": "S(0)", "b": "S(1)"}
    assert (first | second).mesh == MeshSpec({"tp": 2})
    assert (first | second).return_local_tensor == ("c",)


# ---- memory ---------------------------------------------------------------------------------------------------------


def live_bytes(module: Any, optimizer: Any) -> Any:
    """Bytes of every tensor that training keeps, tied ones once."""
    tensors = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in [*tensors.values(), *grads, *states])


OPTIMIZERS = [
    ("sgd", lambda ps: torch.optim.SGD(ps, 0.1)),
    ("momentum", lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    ("adam", lambda ps: torch.optim.Adam(ps, 0.1)),
    ("adamw", lambda ps: torch.optim.AdamW(ps, 0.1)),
    ("amsgrad", lambda ps: torch.optim.AdamW(ps, 0.1, amsgrad=True)),
    ("adagrad", lambda ps: torch.optim.Adagrad(ps, 0.1)),
    ("rmsprop", lambda ps: torch.optim.RMSprop(ps, 0.1)),
    ("adamax", lambda ps: torch.optim.Adamax(ps, 0.1)),
    ("adadelta", lambda ps: torch.optim.Adadelta(ps, 0.1)),
]


@pytest.mark.parametrize(("name", "make"), OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_equals_the_live_bytes_of_a_real_step(model: Any, name: Any, make: Any, dtype: Any) -> None:
    model.to(getattr(torch, dtype))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    plan = ShardingPlan({}, mesh={"x": 1})
    assert plan.memory(model, optimizer=name).total(0) == live_bytes(model, optimizer)
    assert plan.memory(Model(), optimizer=name, dtype=dtype).total(0) == live_bytes(model, optimizer)


def test_memory_counts_parts_ranks_frozen_and_integer_parameters() -> None:
    memory = ShardingPlan({**RULES, "table": "tp:S(0)"}, mesh={"dp": 1, "tp": 3}).memory(Model(), optimizer="adamw")
    # embedding 32 rows over 3: 11, 11, 10; wq/wk/wv rows and wo columns of 8 over 3: 3, 3, 2; 16 of the table: 6, 6, 4
    trained = [11 * 8 + 2 * 4 * 3 * 8 + 3 * 8, 11 * 8 + 2 * 4 * 3 * 8 + 3 * 8, 10 * 8 + 2 * 4 * 2 * 8 + 3 * 8]
    frozen = 8 * 4 + 6
    assert memory.parts["parameters"] == tuple(4 * n + frozen for n in trained)
    assert memory.parts["gradients"] == tuple(4 * n for n in trained)
    num_trained = 1 + 8 + 3  # embedding, eight linears, three norms
    assert memory.parts["optimizer"] == tuple(8 * n + 4 * num_trained for n in trained)
    assert memory.parts["buffers"] == (6 * 4 + 8, 6 * 4 + 8, 4 * 4 + 8)
    assert memory.worst_rank == 0
    assert memory.max_bytes == memory.total(0) > memory.total(2)
    assert memory.largest(2, 1)[0][0] == "embed.weight"


def test_memory_of_mixed_precision() -> None:
    metadata = ModelMetadata.from_shapes({"w": (100,)}, dtype="bfloat16")
    plan = ShardingPlan({"w": "S(0)"}, mesh={"dp": 4})
    parts = plan.memory(metadata, optimizer="mixed-adamw", grads="float32").on(0)
    assert parts == {"parameters": 50, "buffers": 0, "gradients": 100, "optimizer": 204, "master": 100}
    assert plan.memory(metadata, optimizer=None, grads=False).on(3)["gradients"] == 0
    slim = OptimizerState("8-bit", slots=2, dtype="uint8")
    assert plan.memory(metadata, optimizer=slim).on(0)["optimizer"] == 50
    for optimizer, dtype in (("lion9000", None), ("adamw", "float99"), ("adamw", "int8")):
        with pytest.raises(PlanError):
            plan.memory(metadata, optimizer=optimizer, dtype=dtype)
    with pytest.raises(PlanError, match="unsupported-dtype"):
        plan.communication(metadata, dtype="int8")


# ---- communication --------------------------------------------------------------------------------------------------


def test_communication_of_fully_sharded_and_replicated_data_parallel() -> None:
    metadata = ModelMetadata.from_shapes({"a": (8, 4), "b": (6,)})
    sharded = ShardingPlan({"**": "S(0)"}, mesh={"fsdp": 4}).communication(metadata)
    # The root is one unit, gathered once. b: 6 over 4 is 2, 2, 2, 0, padded to 8 elements, 32 bytes beside a's 128.
    assert {(t.name, t.op, t.full_bytes, t.count) for t in sharded.transfers} == {
        ("", "all_gather", 160, 1),
        ("", "reduce_scatter", 160, 1),
    }
    assert sharded.sent_bytes == 2 * (128 + 32) * 3 / 4
    replicated = ShardingPlan({}, mesh={"dp": 4}).communication(metadata)
    assert [(t.name, t.op, t.full_bytes) for t in replicated.transfers] == [("", "all_reduce", 152)]
    assert replicated.by_axis() == {"dp": {"gradients": 2 * (128 + 24) * 3 / 4}}


class Running(Model):
    """The model with a forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        layer: Any
        for layer in self.layers:
            h, attn = layer.attn_norm(x), layer.attn
            x = x + attn["wo"](attn["wq"](h) * attn["wk"](h) * attn["wv"](h))
        out: torch.Tensor = self.norm(x)
        return out


def test_communication_of_tensor_parallel_blocks() -> None:
    plan, model = ShardingPlan({**RULES, "embed.weight": "tp:S(0)"}, mesh=MESH), Running()
    estimate = plan.communication(model, batch=(4, 8), topology=topology_preset("h100-sxm"))
    forward_and_backward = [t for t in estimate.transfers if t.axis == "tp"]
    # per block one reduction after wo and one before q, k, v; one after the embedding; local batch is 16 tokens of 8
    assert [t.name.removesuffix(".weight") for t in forward_and_backward] == [
        "embed",
        "layers.0.attn.wo",
        "layers.1.attn.wo",
        "layers.1.attn.wv",  # the backward of the last use is the first
        "layers.0.attn.wv",
    ]
    assert {t.full_bytes for t in forward_and_backward} == {16 * 8 * 4}
    assert estimate.seconds is not None
    assert estimate.seconds["tp"] > 0
    with pytest.raises(PlanError, match=r"\[unverified\] batch: names and shapes alone -> pass the nn.Module"):
        plan.communication(plan.resolve(model).metadata, batch=(4, 8))
    assert json.loads(estimate.to_json())["format"] == "shard-spec/communication"


def test_a_sharded_head_gathers_its_logits() -> None:
    net = nn.Sequential()
    net.add_module("embed", nn.Embedding(32, 8))
    net.add_module("head", nn.Linear(8, 32, bias=False))
    estimate = ShardingPlan({"**.weight": "S(0)"}, mesh={"tp": 2}).communication(net, batch=(1, 10), loss=None)
    assert [(t.name, t.op, t.full_bytes) for t in estimate.transfers] == [
        ("embed.weight", "all_reduce", 10 * 8 * 4),
        ("head.weight", "all_gather", 10 * 32 * 4),
        ("head.weight", "all_reduce", 10 * 8 * 4),
    ]


# ---- words ----------------------------------------------------------------------------------------------------------


def test_explain_says_which_rule_and_what_lies_where(model: Any) -> None:
    plan = ShardingPlan({**RULES, "layers.1.attn.wo.weight": "tp:S(1)"}, mesh=MESH)
    text = plan.explain("layers.1.attn.wo.weight", model)
    assert "rule 'layers.1.attn.wo.weight' decides; 'layers.*.attn.wo.weight' match too" in text
    assert "rank 1: local shape [8, 4], holds [0:8, 4:8]" in text
    assert "tied: embed.weight = head.weight" in plan.explain("head.weight", model)
    assert "no rule mentions it" in plan.explain("scale", model)
    assert "layers.*.attn.wq.weight" in plan.explain(module=model)
    assert "layers.*.attn.wo.weight" in plan.explain()
    assert "replicated" in plan.explain("other.name")
    assert "matched by" in plan.explain("layers.0.attn.wo.weight")
    with pytest.raises(PlanError, match="unknown-name"):
        plan.explain("no.such.name", model)


def test_diff_by_rule_and_by_tensor(model: Any) -> None:
    plan = ShardingPlan(RULES, mesh=MESH)
    other = ShardingPlan({**RULES, "scale": "R, R", "embed.weight": "tp:S(1)"}, mesh=MESH, strict=True)
    diff = plan.diff(ShardingPlan(other.plan, mesh=MESH), model)
    assert [(c.name, c.before, c.after) for c in diff.rules] == [
        ("embed.weight", "dp:R, tp:S(0)", "dp:R, tp:S(1)"),
        ("scale", None, "dp:R, tp:R"),
    ]
    assert [c.name for c in diff.tensors or ()] == ["embed.weight"]  # scale lies as before
    assert diff
    assert not plan.diff(ShardingPlan({**RULES, "scale": "R, R"}, mesh=MESH), model)
    assert str(plan.diff(plan)) == "no difference"
    assert [c.name for c in plan.diff(other).settings] == ["strict"]
    assert json.loads(diff.to_json())["version"] == 1


# ---- files ----------------------------------------------------------------------------------------------------------


def test_json_is_byte_stable(model: Any) -> None:
    plans = [
        ShardingPlan(RULES, {"head": "R, R"}, ["head"], mesh=MESH, strict=True),
        ShardingPlan({"a": "S(0)", 'odd "name" ü': "R"}, mesh=MeshSpec({"x": 2}, ranks=[3, 1])),
        ShardingPlan({"a": Layout(MeshSpec({"y": 3}), "U(0,[1,2,3])")}),
        ShardingPlan({}),
    ]
    for plan in plans:
        text = plan.to_json()
        assert ShardingPlan.from_json(text) == plan
        assert ShardingPlan.from_json(text).to_json() == text
        assert ShardingPlan.from_json(text.encode()).digest == plan.digest
    shuffled = ShardingPlan(dict(reversed(RULES.items())), mesh=MESH)
    assert shuffled.to_json() == ShardingPlan(RULES, mesh=MESH).to_json()


def test_a_spec_has_no_file_form_but_its_layout_has(model: Any) -> None:
    plan = ShardingPlan({"embed.weight": ChunkShardingSpec(-1, ["rank:1/cpu", "rank:0/cuda:0"])})
    with pytest.raises(PlanError, match="from_layouts"):
        plan.to_json()
    layouts = ShardingPlan.from_layouts(plan.resolve(model))
    assert ShardingPlan.from_json(layouts.to_json()) == layouts


def test_a_document_written_by_hand(model: Any) -> None:
    plan = ShardingPlan(RULES, {"head": "R, R"}, mesh=MeshSpec(MESH))
    assert ShardingPlan.from_dict(json.loads(plan.to_json())) == plan
    by_hand = {
        "format": "shard-spec/plan",
        "version": 1,
        "mesh": {"axes": {"dp": 2, "tp": 2}},
        "rules": {"embed.weight": "tp:S(0)", "**.*norm.weight": "R, R"},
    }
    assert ShardingPlan.from_dict(by_hand).resolve(model)["embed.weight"].sharded_axes == {"tp": 0}
    wrong: list[Any] = [{**by_hand, "rules": {3: "R"}}, {**by_hand, "mesh": {"axes": {"dp": "2"}}}, [], {}]
    for document in wrong:
        with pytest.raises(PlanError):
            ShardingPlan.from_dict(document)


def good_document() -> Any:
    return json.loads(ShardingPlan({"a": "S(0)"}, mesh={"tp": 2}).to_json())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d.update(version=2), "invalid-plan"),
        (lambda d: d.update(version="1"), "invalid-plan"),
        (lambda d: d.update(version=True), "invalid-plan"),
        (lambda d: d.update(format="other"), "invalid-plan"),
        (lambda d: d.update(extra=1), "invalid-plan"),
        (lambda d: d.pop("rules"), "invalid-plan"),
        (lambda d: d.update(rules={"a": "R"}), "invalid-plan"),
        (lambda d: d.update(rules=[["a", "R"], ["a", "R"]]), "invalid-plan"),
        (lambda d: d.update(rules=[["a", 1]]), "invalid-plan"),
        (lambda d: d.update(rules=[["a", {"pickle": "gASV"}]]), "invalid-plan"),
        (lambda d: d.update(rules=[["a", {"chunk": {"dim": 0, "placements": ["rank:0/cpu"]}}]]), "invalid-plan"),
        (lambda d: d.update(strict=1), "invalid-plan"),
        (lambda d: d.update(return_local_tensor="a"), "invalid-plan"),
        (lambda d: d.update(mesh=[]), "invalid-plan"),
        (lambda d: d["mesh"].update(axes=[["tp", 2], ["tp", 2]]), "invalid-plan"),
        (lambda d: d["mesh"].update(axes=[["tp", 10**12]]), "mesh-too-large"),
        (lambda d: d["mesh"].update(axes=[["tp", 2.5]]), "invalid-plan"),
        (lambda d: d["mesh"].update(ranks=["a"]), "invalid-plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(change: Any, code: Any) -> None:
    document = good_document()
    change(document)
    with pytest.raises(PlanError, match=code):
        ShardingPlan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nul",
        "[" * 100_000,
        '{"a":' * 50_000,
        "9" * 10_000,
        '{"format": "shard-spec/plan", "format": "x"}',
        '{"format": NaN}',
        b"\xff\xfe",
        "\x00",
        "1e999",
    ],
)
def test_hostile_text_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="invalid-plan"):
        ShardingPlan.from_json(text)


def test_hostile_rules_in_a_good_file_cost_nothing_and_are_problems() -> None:
    import time

    rules = {
        "w1": "I(0,999999999999)",
        "w2": "B(0,1,cyclic)",
        "re:w1": "S(0)",
        "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}": "S(0)",
        "w3": "U(0,[" + ",".join(["1"] * 1000) + "])",
        "w4": "S(" + "9" * 30 + ")",
    }
    document = json.dumps({**good_document(), "rules": sorted([k, v] for k, v in rules.items())})
    metadata = ModelMetadata(tuple(TensorMetadata(f"w{i}", (1 << 40,)) for i in range(1, 5)))
    begin = time.perf_counter()
    with pytest.raises(PlanError, match="cannot be read") as caught:
        ShardingPlan.from_json(document)
    unreadable = {problem.name for problem in caught.value.problems}
    assert unreadable
    assert {problem.code for problem in caught.value.problems} == {"invalid-plan"}
    rest = {key: value for key, value in rules.items() if key not in unreadable}
    document = json.dumps({**good_document(), "rules": sorted([k, v] for k, v in rest.items())})
    problems = ShardingPlan.from_json(document).validate(metadata)
    assert time.perf_counter() - begin < 5
    assert len(problems) >= len(rest) > 2


def test_what_a_file_cannot_hold_is_named() -> None:
    class Mine(Sharder):
        def shard(self, module: Any) -> Any:
            return module

    plan = ShardingPlan({"a": Mine(), "b": "nonsense", "c": "S(0)"}, mesh={"tp": 2})
    with pytest.raises(PlanError) as caught:
        plan.to_json()
    assert [(p.code, p.name) for p in caught.value.problems] == [("invalid-plan", "a"), ("invalid-plan", "b")]
    assert plan.digest != ShardingPlan({"c": "S(0)"}, mesh={"tp": 2}).digest


# ---- live models ----------------------------------------------------------------------------------------------------


def test_from_module_of_a_plain_model(model: Any) -> None:
    plan = ShardingPlan.from_module(model, mesh={"dp": 2})
    assert set(plan.plan) == {*dict(model.named_parameters()), *dict(model.named_buffers())}
    assert all(layout.is_replicated for layout in plan.resolve(model).values())
    with pytest.raises(PlanError, match="missing-mesh"):
        ShardingPlan.from_module(model)


def test_metadata_of_a_lazy_and_of_a_deep_copied_model(model: Any) -> None:
    assert ShardingPlan({}, mesh={"x": 1}).validate(nn.LazyLinear(4))[0].code == "uninitialized-parameter"
    before = copy.deepcopy(model.state_dict())
    ShardingPlan(RULES, mesh=MESH).validate(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    not_a_module: Any = [1, 2]
    with pytest.raises(TypeError, match="ModelMetadata"):
        ShardingPlan({}).validate(not_a_module)


def test_a_kept_resolution_is_that_of_the_model_at_hand() -> None:
    """A plan keeps its last resolution: another model, a changed one and a caller's spec are resolved anew."""
    asked: list[tuple[int, ...]] = []

    class Counted(ShardingSpec):
        def build_metadata(self, tensor_sizes: Any, tensor_properties: object = None) -> Any:
            asked.append(tuple(tensor_sizes))
            return ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).build_metadata(tensor_sizes)

    plan, model = ShardingPlan({"weight": "tp:S(0)"}, mesh={"tp": 2}), nn.Linear(4, 4, bias=False)
    first, trained = plan.resolve(model), plan.memory(model).max_bytes
    assert plan.resolve(model) == first
    model.weight.requires_grad_(False)
    assert plan.memory(model).max_bytes == 2 * 4 * 4 < trained
    assert [problem.code for problem in plan.validate(nn.Sequential(model))] == ["unmatched-pattern"]
    assert plan.memory(nn.Linear(8, 6, bias=False), optimizer=None).max_bytes == 2 * 3 * 8 * 4
    assert plan.resolve(model) == first
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.on_mesh(MeshSpec({"tp": 4})).memory(model).max_bytes == 4 * 4
    specs = ShardingPlan({"weight": Counted()})
    assert specs.resolve(model) == specs.resolve(model)
    assert asked == [(4, 4), (4, 4)]


def test_a_plan_is_asked_without_torch_distributed_tensor() -> None:
    """Importing it takes a second or more; only what makes DTensors needs it."""
    program = """
import sys
from shard_spec import ChunkShardingSpec, MegatronPlanner, ShardingPlan
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
plan = MegatronPlanner({"tp": 2}).build_plan(model) | ShardingPlan({"0.bias": "tp:S(0)"})
assert plan.validate(model, world_size=2) == ()
plan.resolve(model), plan.explain("0.weight", model), plan.diff(ShardingPlan({}, mesh="tp=2"), model)
plan.memory(model)
plan.communication(model), ShardingPlan.from_json(plan.to_json()), plan.compact(model)
ShardingPlan({"0.weight": ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])}).resolve(model)
assert "torch.distributed.tensor" not in sys.modules
plan.to_dtensor_placements(model)
assert "torch.distributed.tensor" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_full_name_is_a_name_also_where_it_holds_letters_of_a_glob() -> None:
    model = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in ("a*", "ab", "w[0]", "w0", "{x}")})
    names = ["a*.weight", "w[0].weight", "{x}.weight"]
    resolved = ShardingPlan(dict.fromkeys(names, "S(0)"), mesh={"tp": 2}).resolve(model)
    assert [name for name, layout in resolved.items() if not layout.is_replicated] == names
    compacted = ShardingPlan(dict.fromkeys(names, "S(0)"), mesh={"tp": 2}).compact(model)
    assert dict(compacted.resolve(model)) == dict(resolved)


def test_subclasses_of_linear_and_embedding_count_as_these() -> None:
    class Own(nn.Linear):
        pass

    class Table(nn.Embedding):
        pass

    rules = {"table.weight": "tp:S(0)", "up.weight": "tp:S(0)", "down.weight": "tp:S(1)", "conv.weight": "tp:S(0)"}
    estimates = []
    for linear, embedding in ((nn.Linear, nn.Embedding), (Own, Table)):
        up, down = linear(8, 16, bias=False), linear(16, 8, bias=False)
        model = nn.Sequential(
            OrderedDict({"table": embedding(16, 8), "up": up, "down": down, "conv": nn.Conv1d(8, 8, 1)})
        )
        estimates.append(ShardingPlan(rules, mesh={"tp": 2}).communication(model, batch=(4, 8)))
    assert estimates[0].by_axis() == estimates[1].by_axis()
    assert estimates[0].by_axis()["tp"]["activations"] > 0
    assert any("conv.weight are not counted" in line for line in estimates[0].assumptions)


def test_batches_and_data_axes_of_estimates() -> None:
    plan, model = ShardingPlan({"weight": "dp:S(0)"}, mesh={"dp": 2}), nn.Linear(4, 4)
    once, twice = (plan.communication(model, (4, 4), data_axes=axes).assumptions for axes in ("dp", ["dp", "dp"]))
    assert once == twice
    for batch in ((-4, 4), (0, 4), True):
        with pytest.raises(PlanError, match="invalid-argument"):
            plan.communication(model, batch)


def test_a_plan_whose_key_is_no_text_cannot_be_written() -> None:
    plan = ShardingPlan({3: "S(0)"}, mesh={"tp": 2})  # type: ignore[dict-item]  # on purpose
    with pytest.raises(PlanError, match="a key of type int"):
        plan.to_json()
