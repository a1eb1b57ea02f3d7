"""Files from strangers: each is read, or refused with one clear error, quickly, whatever is in it.

A sample of each kind; ``FUZZ_INPUTS=10000 pytest tests/test_fuzz.py`` tries as many of each (docs/benchmarks/fuzz.md).
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from shard_spec import PlanError, ShardingPlan
from strange_files import CONFIG, GIANTS, HEADER, PARSERS, PLAN, bounded, planned, safetensors, told, warm_up


@pytest.fixture(autouse=True, scope="module")
def _torch_is_imported(tmp_path_factory: Any) -> None:
    warm_up(PARSERS["plan-json"], tmp_path_factory.mktemp("warm"))
    warm_up(PARSERS["safetensors-header"], tmp_path_factory.mktemp("warm"))


def inputs_of(name: str) -> Any:
    parser = PARSERS[name]
    return pytest.param(name, id=name, marks=pytest.mark.extra("hypothesis", *parser.extras))


@pytest.mark.filterwarnings("ignore")  # what transformers says about fields it does not like
@pytest.mark.parametrize("name", [inputs_of(name) for name in PARSERS])
def test_any_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    parser = PARSERS[name]
    warm_up(parser, tmp_path)
    results, inputs = [], int(os.environ.get("FUZZ_INPUTS", parser.sample))

    @settings(max_examples=inputs, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.randoms(use_true_random=True))
    def check(rng: Any) -> None:
        results.append(parser.check(parser.make(rng), tmp_path))

    check()
    assert len(results) >= inputs
    assert not all(results)
    assert any(results)
    for giant in GIANTS if name == "hugging-face-config" else ():  # here, where transformers is imported
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | giant))
        assert not told(["plan", str(tmp_path / "config.json"), "--mesh", "dp=2,tp=2"], tmp_path, giant)


# ---- tricks by name -------------------------------------------------------------------------------------------------

GOOD = json.dumps(PLAN)
LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
TRICKS: dict[str, bytes | str] = {
    "empty": "",
    "truncated": GOOD[:-9],
    "two documents": GOOD + GOOD,
    "deep lists": "[" * 1_000_000,
    "deep maps": '{"a":' * 100_000,
    "huge integer": GOOD.replace('"version": 1', '"version": ' + "9" * 1_000_000),
    "integer that is no version": GOOD.replace('"version": 1', '"version": 1' + "0" * 400),
    "NaN": GOOD.replace('"version": 1', '"version": NaN'),
    "infinity": GOOD.replace('"version": 1', '"version": -Infinity'),
    "fraction": GOOD.replace('"version": 1', '"version": 1.0'),
    "truth for a number": GOOD.replace('"version": 1', '"version": true'),
    "key twice": GOOD[:-1] + ', "version": 1}',
    "not UTF-8": GOOD.encode()[:-1] + b"\xff}",
    "UTF-16": GOOD.encode("utf-16"),
    "zero byte": GOOD.replace("head", "he\x00ad"),
    "billion laughs": LAUGHS,
    "python object": "!!python/object/apply:os.system ['true']",
    "too long": GOOD + " " * (64 * 2**20),
}


@pytest.mark.parametrize("trick", [name for name in TRICKS if name != "zero byte"])
def test_tricks_in_json_are_refused(trick: str) -> None:
    text = TRICKS[trick]
    with bounded(trick), pytest.raises(PlanError) as caught:
        ShardingPlan.from_json(text)
    assert {problem.code for problem in caught.value.problems} <= {"invalid-plan"}
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("trick", [name for name in TRICKS if name not in ("too long", "deep lists")])
def test_tricks_in_headers_are_refused(trick: str, tmp_path: Path, capsys: Any) -> None:
    text = TRICKS[trick]
    header = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "x.safetensors").write_bytes(safetensors(header))
    assert not told(["plan", str(tmp_path / "x.safetensors"), "--mesh", "dp=2"], tmp_path, trick)


@pytest.mark.parametrize("name", ["...x", "", ".", "a.", "forward", "a.training", "w.x"])
def test_names_that_no_module_can_have_are_refused(name: str, tmp_path: Path, capsys: Any) -> None:
    entries = {"w": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}
    entries[name] = {"dtype": "I8", "shape": [2], "data_offsets": [2, 4]}
    (tmp_path / "x.safetensors").write_bytes(safetensors(json.dumps(entries).encode()))
    assert not told(["plan", str(tmp_path / "x.safetensors"), "--mesh", "dp=2"], tmp_path, name)


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../secret.safetensors", "/etc/passwd", "a\x00.safetensors", "pipe.safetensors"]
)
def test_an_index_names_files_beside_it_and_nothing_else(name: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "secret.safetensors").write_bytes(safetensors(json.dumps(HEADER).encode()))
    inner = tmp_path / "inner"
    inner.mkdir()
    os.mkfifo(inner / "pipe.safetensors")
    index = inner / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"layers.0.w": name}}))
    assert not told(["plan", str(index), "--mesh", "dp=2"], inner, name)


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

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.text(), values.map(json.dumps)))
    def check(text: str) -> None:
        planned(lambda: ShardingPlan.from_json(text), text)

    check()
