"""Files from strangers: each is read, or refused with one clear error, quickly, whatever is in it.

Some hundred inputs a run. ``SHARD_SPEC_FUZZ=10000 python -m pytest tests/test_fuzz.py`` tries 10,000 plan files, as
many safetensors headers, 40,000 texts of layouts and meshes, and fewer of the slower kinds.
"""

import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_spec import Layout, MeshSpec, ModelFacts, PlanError, ShardingPlan
from shard_spec.cli import main

COUNT = int(os.environ.get("SHARD_SPEC_FUZZ", "250"))
SECONDS = 2.0  # of CPU time for one input

MODEL = ModelFacts.from_shapes({"layers.0.w": (8, 4), "layers.1.w": (8, 4), "head.weight": (16, 4), "scale": ()})
PLAN = {
    "format": "shard-spec/plan",
    "version": 1,
    "mesh": {"axes": [["dp", 2], ["tp", 2]], "ranks": None, "ranks_per_host": 2},
    "strict": True,
    "rules": [
        ["layers.*.w", "dp:S(1), tp:S(0)"],
        ["re:head\\.we.*", "dp:S(0), tp:S(0); order=tp>dp"],
        [
            "{scale,none}",
            {"layout": "x:R", "mesh": {"axes": [["x", 4]], "ranks": [3, 2, 1, 0], "ranks_per_host": None}},
        ],
        ["head.w*", {"chunk": {"dim": 0, "placements": ["rank:0/cpu", "rank:1/cpu"]}}],
        ["head.*t", {"enumerable": [[[0, 0], [8, 4], "rank:0/cpu"], [[8, 0], [8, 4], "rank:1/cpu"]]}],
        ["layers.1.w", "tp:I(0,[4,2,2]), dp:B(1,2,cyclic)"],
    ],
    "output_plan": [["head", "tp:R"]],
    "return_local_tensor": ["head"],
}
HEADER = {
    "__metadata__": {"format": "pt"},
    "layers.0.w": {"dtype": "BF16", "shape": [64, 8], "data_offsets": [0, 1024]},
    "layers.1.w": {"dtype": "F32", "shape": [64, 8], "data_offsets": [1024, 3072]},
}
TP_PLAN = {"layers.*": "colwise", "head": "rowwise"}
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**18), 1.5, 1e308, "", " ", "\x00", "\ud800", "*", "**", "*" * 300,
    "re:(a+)+b", "re:(" * 50, "re:" + "a?" * 40 + "a" * 40, "re:(?s:.)*{99}", "{" * 40, "{a,b}" * 12, "[!", "..",
    "a" * 5000,
    "tp:S(0)", "tp:S(-99)", "tp:I(0,1000000)", "tp:I(0,[4,-4,8])", "tp:U(0,[9999999999999999999,1])", "dp:B(0,0)",
    "S(0)" * 500,
    "tp:" + "(" * 500, "rank:-1/cpu", "rank:99999999999/cuda:9", [], {}, [[]], {"a": {"a": {"a": {}}}}, [0] * 3000,
    {"axes": [["dp", 16777216]], "ranks": None, "ranks_per_host": None},
    {"axes": [["dp", 4096], ["tp", 4096], ["x", 4096]], "ranks": None, "ranks_per_host": 1},
    {"axes": [["dp", 2]], "ranks": [2**62, 5], "ranks_per_host": 2**62},
    {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 1]},
    {"dtype": "F32", "shape": [0] * 200, "data_offsets": [0, 1]},
    {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]},
]  # fmt: skip


def mutated(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """``value`` with one node replaced, dropped, doubled or buried."""
    if isinstance(value, dict | list) and value and (depth == 0 or rng.random() < 0.8):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        at = rng.choice(keys)
        copied = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.12:
            del copied[at]
        elif rng.random() < 0.12 and isinstance(copied, dict):
            copied[str(rng.choice(NASTY[15:22]))] = copied[at]
        elif rng.random() < 0.12 and isinstance(copied, list):
            copied.insert(at, copied[at])
        else:
            copied[at] = mutated(value[at], rng, depth + 1)
        return copied
    if rng.random() < 0.1:
        return [[value] * rng.randint(1, 3)] * rng.randint(1, 3)
    return rng.choice(NASTY)


def files(document: Any, rng: random.Random, write: Callable[[Any], str]) -> str:
    """One text: the document mutated once to thrice, or its characters are."""
    for _ in range(rng.randint(0, 3)):
        document = mutated(document, rng)
    text = write(document)
    kind = rng.random()
    if kind < 0.15:
        at = rng.randrange(len(text) + 1)
        return (
            text[:at]
            + rng.choice(['"', "{", "[", "]" * 9, "\\", "1e999", "NaN", "&a *a", "!!python/x", "\t", "\ufffe"])
            + text[at:]
        )
    if kind < 0.25:
        return text[: rng.randrange(len(text) + 1)]
    if kind < 0.27:
        return "[" * 100_000
    return text


def read(reader: Callable[[], ShardingPlan], text: str) -> ShardingPlan | None:
    """The plan, or None where it was refused; anything but one short ``PlanError`` is a fault."""
    plan: ShardingPlan | None
    begin = time.process_time()
    try:
        plan = reader()
        plan.validate(MODEL)
        refused = None
    except PlanError as error:
        plan, refused = None, error
    assert time.process_time() - begin < SECONDS, text[:3000]
    if refused is not None:
        assert refused.problems, text
        assert len(str(refused)) < 20_000, text
    return plan


def test_plan_files() -> None:
    rng, good = random.Random(0), 0
    for _ in range(COUNT):
        text = files(PLAN, rng, json.dumps)
        plan = read(lambda text=text: ShardingPlan.from_json(text), text)  # type: ignore[misc]  # bound per loop
        if plan is not None:
            good += 1
            if not plan.problems:
                assert ShardingPlan.from_json(plan.to_json()) == plan
    assert COUNT // 20 < good < COUNT


@pytest.mark.extra("pyyaml")
def test_yaml_files() -> None:
    import yaml

    rng, good = random.Random(1), 0
    for _ in range(COUNT // 5):
        text = files(PLAN, rng, lambda document: yaml.safe_dump(document))
        good += read(lambda text=text: ShardingPlan.from_yaml(text), text) is not None  # type: ignore[misc]  # as above
    assert COUNT // 200 < good < COUNT // 5


def test_layouts_and_meshes_as_text() -> None:
    rng, good = random.Random(2), 0
    mesh = MeshSpec({"dp": 2, "tp": 2})
    letters = "dtp:SRUBIP(),0123-[]=> ;order sum"
    for _ in range(4 * COUNT):
        text = rng.choice(["dp:S(0), tp:S(1)", "tp:I(0,[4,2,2])", "S(0), R", "dp:U(0,[3,5])", "tp:S(0); order=tp>dp"])
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(letters) * rng.choice((1, 1, 30)) + text[at + rng.randint(0, 2) :]
        for parse in (lambda text=text: Layout.parse(text, mesh), lambda text=text: MeshSpec.parse(text)):
            try:
                value = parse()
            except PlanError:
                continue
            good += 1
            assert (
                Layout.parse(str(value), mesh) if isinstance(value, Layout) else MeshSpec.parse(str(value))
            ) == value
    assert good > COUNT // 10


@pytest.fixture(autouse=True, scope="module")
def _torch_is_imported() -> None:
    """Importing torch takes longer than any input may."""
    ShardingPlan.from_json(json.dumps(PLAN)).validate(MODEL)


def shown(arguments: list[str], capsys: Any) -> int:
    """The exit status; a traceback, a status of its own or a long wait are faults."""
    begin = time.process_time()
    status = main(arguments)
    took = time.process_time() - begin
    said = capsys.readouterr()
    assert status in (0, 1, 2)
    assert (status == 0) or said.err or said.out
    assert took < SECONDS, (arguments, took)
    return status


def test_safetensors_headers(tmp_path: Path, capsys: Any) -> None:
    rng, seen = random.Random(3), set()
    file = tmp_path / "model.safetensors"
    for at in range(COUNT // 2 if COUNT < 1000 else COUNT):
        header = files(HEADER, rng, json.dumps).encode("utf-8", "surrogatepass")
        length = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 2**32, 2**63, len(header) + 1))
        file.write_bytes(struct.pack("<Q", length)[: rng.choice((8, 8, 8, 8, 8, 8, 8, 3))] + header)
        planner = ("fsdp", "auto", "megatron", "balanced")[at % 4]
        seen.add(shown(["plan", str(file), "--mesh", "dp=2,tp=2", "--planner", planner], capsys))
    assert {0, 2} <= seen


def test_plans_and_tp_plans_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    rng = random.Random(4)
    model, plan = tmp_path / "model.safetensors", tmp_path / "plan.json"
    header = json.dumps(HEADER).encode()
    model.write_bytes(struct.pack("<Q", len(header)) + header)
    for at in range(COUNT // 4):
        source = TP_PLAN if at % 4 == 3 else PLAN
        plan.write_text(files(source, rng, json.dumps), encoding="utf-8", errors="surrogatepass")
        arguments = [
            ["check", str(model), str(plan), "--json"],
            ["explain", str(plan), "layers.0.w", "--model", str(model)],
            ["diff", str(plan), str(plan), "--model", str(model)],
            ["convert", str(plan), "--from", "hf", "--to", "json", "--model", str(model), "--mesh", "tp=2"],
        ][at % 4]
        shown(arguments, capsys)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # what transformers says about fields it does not like
def test_hugging_face_configs(tmp_path: Path, capsys: Any) -> None:
    rng = random.Random(5)
    file = tmp_path / "config.json"
    seen = set()
    file.write_text(json.dumps(CONFIG))
    assert main(["plan", str(file), "--mesh", "dp=2,tp=2"]) == 0  # imports transformers
    for giant in ({"num_hidden_layers": 10**9}, {"hidden_size": 10**60}, {"vocab_size": 1 << 41}):
        file.write_text(json.dumps(CONFIG | giant))
        assert shown(["plan", str(file), "--mesh", "dp=2,tp=2"], capsys) == 2
    for _ in range(COUNT // 25):
        file.write_text(files(CONFIG, rng, json.dumps), encoding="utf-8", errors="surrogatepass")
        seen.add(shown(["plan", str(file), "--mesh", "dp=2,tp=2"], capsys))
    assert 2 in seen


@pytest.mark.extra("hypothesis")
def test_any_text_is_a_plan_or_a_plan_error() -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    leaves = (
        st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from(["tp:S(0)", "re:.*", "**"])
    )
    documents = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )
    values = st.fixed_dictionaries({key: documents | st.just(value) for key, value in PLAN.items()})

    @settings(
        max_examples=COUNT // 10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(st.text(), values.map(json.dumps)))
    def check(text: str) -> None:
        read(lambda: ShardingPlan.from_json(text), text)

    check()
