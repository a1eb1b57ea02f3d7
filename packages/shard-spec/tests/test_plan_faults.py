"""Seeded faults: each is reported, five at once are all reported, and the model stays bit for bit as it was.

Torch's own version stops at the first fault, with the module half sharded.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from shard_spec import (
    BlockShard,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    InterleavedShard,
    Layout,
    MeshSpec,
    Partial,
    PlanError,
    Replicate,
    Shard,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
    UnevenShard,
)
from shard_spec.specs import TensorShards
from torch import nn

MESH = MeshSpec({"dp": 2, "tp": 2})


class Mine:
    """Quacks like a Sharder."""

    def shard(self, module: Any) -> Any:
        return module


class Own(ShardingSpec):
    """A user's own spec: whatever shards it is given, right or wrong."""

    def __init__(self, *shards: Any) -> None:
        self.shards = [ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in shards]

    def build_metadata(self, tensor_sizes: Any, tensor_properties: Any = None) -> Any:
        return TensorShards(self.shards, tuple(tensor_sizes), tensor_properties)


@dataclass
class Case:
    """A model and a good plan for it; faults change one or the other."""

    model: nn.Module
    rules: dict[Any, Any]
    output: dict[str, Any] = field(default_factory=dict)
    local: list[str] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> Any:
        plan = ShardingPlan(self.rules, self.output, self.local, mesh=MESH, strict=True)
        return plan.validate(self.model, **self.check)


@dataclass
class Fault:
    """`seed(case, m)` puts the fault at module `m`, a name of its own; the rest is the problem it has to give."""

    code: str
    seed: Callable[[Case, str], None]
    name: str = "{m}.weight"
    dim: int | None = None
    axis: str | None = None


def weight(value: Any) -> Any:
    return lambda case, m: case.rules.update({f"{m}.weight": value})


def added(key: Any, value: Any) -> Any:
    return lambda case, m: case.rules.update({key.format(m=m) if isinstance(key, str) else key: value})


def removed(case: Any, m: Any) -> Any:
    del case.rules[f"{m}.weight"]


def nested(case: Any, m: Any) -> Any:
    setattr(case.model, m, nn.ModuleDict({"in": nn.ModuleDict({"a": nn.Linear(8, 8)})}))
    for name in ("weight", "bias"):
        del case.rules[f"{m}.{name}"]
    case.rules.update({m: Mine(), f"{m}.in": Mine()})


def sharder_and_rule(case: Any, m: Any) -> Any:
    del case.rules[f"{m}.bias"]
    case.rules[m] = Mine()


def tied_across(case: Any, m: Any) -> Any:
    outside = nn.Linear(8, 8, bias=False)
    outside.weight = getattr(case.model, m).weight
    setattr(case.model, f"{m}_tied", outside)
    del case.rules[f"{m}.weight"], case.rules[f"{m}.bias"]
    case.rules[m] = Mine()


def tied_conflict(case: Any, m: Any) -> Any:
    outside = nn.Linear(8, 8, bias=False)
    outside.weight = getattr(case.model, m).weight
    setattr(case.model, f"{m}_tied", outside)
    case.rules[f"{m}_tied.weight"] = "tp:S(1)"


def lazy(case: Any, m: Any) -> Any:
    del case.rules[f"{m}.weight"], case.rules[f"{m}.bias"]
    setattr(case.model, m, nn.LazyLinear(8, bias=False))


def scalar(case: Any, m: Any) -> Any:
    getattr(case.model, m).temperature = nn.Parameter(torch.ones(()))
    case.rules[f"{m}.temperature"] = "tp:S(0)"


def equal_globs(case: Any, m: Any) -> Any:
    removed(case, m)
    case.rules.update({f"{m}.wei*": "tp:S(0)", f"{m}.*ght": "tp:S(1)"})


def two_sharders(case: Any, m: Any) -> Any:
    del case.rules[f"{m}.weight"], case.rules[f"{m}.bias"]
    case.rules.update({m: Mine(), f"[{m[0]}]{m[1:]}": Mine()})


def chunk(dim: Any, *ranks: Any) -> Any:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def grid(*shards: Any) -> Any:
    boxes = [ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in shards]
    return EnumerableShardingSpec(boxes)


FAULTS = {
    # what a rule says
    "placement-text": Fault("invalid-layout", weight("tp:X(0)")),
    "layout-text": Fault("invalid-layout", weight("tp S(0), dp:R")),
    "order-text": Fault("invalid-layout", weight("tp:S(0), dp:R; backwards")),
    "unknown-axis": Fault("unknown-axis", weight({"pp": Shard(0)}), axis="pp"),
    "unknown-axis-text": Fault("unknown-axis", weight("cp:S(0)"), axis="cp"),
    "duplicate-name": Fault("duplicate-name", weight("tp:S(0), tp:S(1)"), axis="tp"),
    "order-unknown-axis": Fault("unknown-axis", weight("tp:S(0), dp:S(0); order=pp>tp"), name="{m}.weight (order)"),
    "order-without-effect": Fault("conflicting-arguments", weight("tp:S(0); order=dp>tp"), name="{m}.weight (order)"),
    "too-few-placements": Fault("argument-count", weight([Shard(0)])),
    "too-many-placements": Fault("argument-count", weight("R, S(0), R")),
    "no-placement": Fault("wrong-type", weight([Replicate(), 0])),
    "class-not-instance": Fault("wrong-type", weight(Shard)),
    "nothing": Fault("wrong-type", weight(None)),
    "number": Fault("wrong-type", weight(0)),
    "invalid-argument": Fault("invalid-argument", weight([Replicate(), Partial("median")]), axis="tp"),
    "partial-value": Fault("partial-value", weight("tp:P"), axis="tp"),
    "uneven-count": Fault("argument-count", weight([Replicate(), UnevenShard(0, (2, 2, 4))]), dim=0, axis="tp"),
    "block-text": Fault("invalid-layout", weight("tp:B(0,0)"), name="{m}.weight (BlockShard)"),
    "uneven-negative": Fault("invalid-layout", weight("tp:U(0,-3)")),
    "section-zero": Fault("invalid-layout", weight("tp:I(0,0)"), name="{m}.weight (InterleavedShard)"),
    "other-mesh": Fault("mesh-mismatch", weight(Layout(MeshSpec({"tp": 4}), "S(0)"))),
    # what only the shape tells
    "dim-too-large": Fault("dim-out-of-range", weight("tp:S(2)"), dim=2, axis="tp"),
    "dim-too-negative": Fault("dim-out-of-range", weight("dp:S(-3)"), dim=-3, axis="dp"),
    "dim-of-bias": Fault("dim-out-of-range", added("{m}.bias", "tp:S(1)"), name="{m}.bias", dim=1, axis="tp"),
    "scalar": Fault("dim-out-of-range", scalar, name="{m}.temperature", dim=0, axis="tp"),
    "uneven-sum": Fault("shape-mismatch", weight({"tp": UnevenShard(0, (3, 4))}), dim=0, axis="tp"),
    "uneven-after-shard": Fault(
        "shape-mismatch", weight({"dp": Shard(0), "tp": UnevenShard(0, (5, 3))}), dim=0, axis="tp"
    ),
    "sections-sum": Fault("invalid-sections", weight({"tp": InterleavedShard(-1, (4, 2))}), dim=1, axis="tp"),
    "too-many-sections": Fault("invalid-sections", weight({"tp": InterleavedShard(0, 10**9)}), dim=0, axis="tp"),
    "block-dim": Fault("dim-out-of-range", weight({"tp": BlockShard(5, 2)}), dim=5, axis="tp"),
    # specs
    "chunk-dim": Fault("dim-out-of-range", weight(chunk(2, 0, 1))),
    "chunk-rank-twice": Fault("invalid-layout", weight(chunk(0, 0, 1, 0, 1))),
    "enumerable-hole": Fault("boxes-incomplete", weight(grid(([0, 0], [4, 8], 0), ([5, 0], [3, 8], 1)))),
    "own-overlap": Fault("boxes-overlap", weight(Own(([0, 0], [5, 8], 0), ([4, 0], [4, 8], 1)))),
    "enumerable-ndim": Fault("shape-mismatch", weight(grid(([0], [4], 0), ([4], [4], 1)))),
    "enumerable-outside": Fault("box-out-of-range", weight(grid(([0, 0], [8, 8], 0), ([8, 0], [2, 8], 1)))),
    "enumerable-no-grid": Fault(
        "not-a-grid",
        weight(
            grid(
                ([0, 0], [3, 5], 0), ([0, 5], [5, 3], 1), ([5, 3], [3, 5], 2), ([3, 0], [5, 3], 3), ([3, 3], [2, 2], 4)
            )
        ),
    ),
    "own-hole": Fault("boxes-incomplete", weight(Own(([0, 0], [4, 8], 0), ([4, 0], [4, 7], 1)))),
    # which tensors a rule means
    "unmatched-pattern": Fault("unmatched-pattern", added("{m}.wieght", "tp:S(0)"), name="{m}.wieght"),
    "glob-matches-nothing": Fault("unmatched-pattern", added("{m}.*.gamma", "R, R"), name="{m}.*.gamma"),
    "module-not-parameter": Fault("unmatched-pattern", added("{m}", "tp:S(0)"), name="{m}"),
    "regex": Fault("invalid-argument", added("re:{m}.*", "R, R"), name="re:{m}.*"),
    "bad-braces": Fault("invalid-argument", added("{{{m},b.weight", "R, R"), name="{{{m},b.weight"),
    "bad-stars": Fault("invalid-argument", added("{m}**.weight", "R, R"), name="{m}**.weight"),
    "empty-segment": Fault("invalid-argument", added("{m}..weight", "R, R"), name="{m}..weight"),
    "key-no-text": Fault("invalid-argument", added(7, "R, R"), name="7"),
    "equal-globs": Fault("ambiguous-pattern", equal_globs),
    "unmentioned": Fault("unmatched-pattern", removed),
    "tied-weights": Fault("tied-weights", tied_conflict, name="{m}_tied.weight"),
    # sharders
    "sharder-nowhere": Fault("unknown-name", added("{m}.attn", Mine()), name="{m}.attn"),
    "sharder-on-parameter": Fault("unknown-name", added("{m}.weight", Mine())),
    "sharder-nesting": Fault("sharder-nesting", added("", Mine()), name=""),
    "sharder-in-sharder": Fault("sharder-nesting", nested, name="{m}.in"),
    "sharder-and-rule": Fault("ambiguous-pattern", sharder_and_rule),
    "two-sharders": Fault("ambiguous-pattern", two_sharders, name="{m}"),
    "tied-across-sharder": Fault("tied-weights", tied_across),
    # outputs
    "output-nowhere": Fault(
        "unknown-name", lambda case, m: case.output.update({f"{m}.out": "tp:S(0)"}), name="{m}.out"
    ),
    "output-wrong": Fault(
        "unknown-axis", lambda case, m: case.output.update({m: "pp:S(0)"}), name="output_plan['{m}']", axis="pp"
    ),
    "output-other-mesh": Fault(
        "mesh-mismatch",
        lambda case, m: case.output.update({m: Layout(MeshSpec({"x": 2}), "R")}),
        name="output_plan['{m}']",
    ),
    "local-nowhere": Fault("unknown-name", lambda case, m: case.local.append(f"{m}.no"), name="{m}.no"),
    "local-twice": Fault("duplicate-name", lambda case, m: case.local.extend([m, m]), name="{m}"),
    # the model and the machine
    "lazy": Fault("uninitialized-parameter", lazy),
    "world-too-small": Fault("mesh-too-large", lambda case, m: case.check.update(world_size=3), name=""),
}


def make_case() -> Any:
    torch.manual_seed(0)
    model = nn.Module()
    rules: dict[Any, Any] = {}
    for at in range(len(FAULTS)):
        setattr(model, f"m{at:02d}", nn.Linear(8, 8))
        rules.update({f"m{at:02d}.weight": "tp:S(0)", f"m{at:02d}.bias": "R, R"})
    return Case(model, rules)


def expected(fault: Any, m: Any) -> Any:
    return fault.code, fault.name.format(m=m), fault.dim, fault.axis


def reported(problems: Any) -> Any:
    return {(p.code, p.name, p.dim, p.axis) for p in problems}


def is_reported(fault: Any, m: Any, problems: Any) -> Any:
    code, name, dim, axis = expected(fault, m)
    return any(p.code == code and p.name == name and dim in (None, p.dim) and axis in (None, p.axis) for p in problems)


def snapshot(model: Any) -> Any:
    """Everything about the model that a validation could disturb."""
    tensors = [(n, id(p), p.requires_grad, None if _lazy(p) else p.detach().clone()) for n, p in _named(model)]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._parameters)) for m in model.modules()]
    return tensors, hooks, [id(m) for m in model.modules()]


def _named(model: Any) -> Any:
    return list(model.named_parameters(remove_duplicate=False))


def _lazy(parameter: Any) -> Any:
    return isinstance(parameter, nn.parameter.UninitializedParameter)


def assert_untouched(before: Any, model: Any) -> Any:
    after = snapshot(model)
    assert before[1:] == after[1:]
    for (name, identity, grad, value), (name2, identity2, grad2, value2) in zip(before[0], after[0], strict=True):
        assert (name, identity, grad) == (name2, identity2, grad2)
        assert value is value2 or torch.equal(value, value2)


def test_the_good_case_is_good_and_there_are_enough_faults() -> None:
    assert make_case().validate() == ()
    assert len(FAULTS) >= 60
    assert len({fault.code for fault in FAULTS.values()}) >= 23  # codes of one fact are one


@pytest.mark.parametrize("kind", list(FAULTS))
def test_each_fault_is_reported(kind: Any) -> None:
    case, fault = make_case(), FAULTS[kind]
    m = f"m{list(FAULTS).index(kind):02d}"
    fault.seed(case, m)
    before = snapshot(case.model)
    problems = case.validate()
    assert is_reported(fault, m, problems), (expected(fault, m), reported(problems))
    assert len(problems) <= 3, "one fault is no reason for a page of problems"
    assert all(problem.hint or problem.found for problem in problems)
    assert_untouched(before, case.model)
    if fault.code in ("mesh-too-large", "does-not-fit") or fault.name == "" or m in case.output or m in case.local:
        return
    plan = ShardingPlan(case.rules, mesh=MESH, strict=True)
    if any(p.code == fault.code for p in plan.validate(case.model)):
        with pytest.raises(PlanError) as caught:
            plan.resolve(case.model)
        assert is_reported(fault, m, caught.value.problems)


@pytest.mark.parametrize("seed", range(25))
def test_five_random_faults_at_once_are_all_reported(seed: Any) -> None:
    rng = random.Random(seed)
    kinds = rng.sample(list(FAULTS), 5)
    case = make_case()
    for kind in kinds:
        FAULTS[kind].seed(case, f"m{list(FAULTS).index(kind):02d}")
    before = snapshot(case.model)
    problems = case.validate()
    missing = [kind for kind in kinds if not is_reported(FAULTS[kind], f"m{list(FAULTS).index(kind):02d}", problems)]
    assert missing == [], reported(problems)
    assert_untouched(before, case.model)


def test_all_faults_at_once_are_all_reported() -> None:
    case = make_case()
    for at, fault in enumerate(FAULTS.values()):
        fault.seed(case, f"m{at:02d}")
    problems = case.validate()
    missing = [
        kind for at, (kind, fault) in enumerate(FAULTS.items()) if not is_reported(fault, f"m{at:02d}", problems)
    ]
    assert missing == []
