"""Files from strangers, made by changing good ones, and what reading one of them may do.

Each entry of ``PARSERS`` reads one kind of file: ``make`` draws an input from a ``random.Random`` (hypothesis's own, so
that a failing input is made small), ``check`` reads it and says whether it was read (True) or refused with one clear
error (False). Anything else, or more than ``SECONDS`` of CPU time, is an ``AssertionError``: so is opening a file
outside of the folder, unpickling by name, or starting a process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shard_spec import Layout, MeshSpec, PlanError, ShardingPlan
from shard_spec.cli import main
from shard_spec.cli.sources import load_model
from shard_spec.plan.content import json_values
from shard_spec.plan.resolve import ModelMetadata

SECONDS = 2.0  # of CPU time for one input

MODEL = ModelMetadata.from_shapes({"layers.0.w": (8, 4), "layers.1.w": (8, 4), "head.weight": (16, 4), "scale": ()})
PLAN = {
    "format": "shard-spec/plan",
    "version": 1,
    "mesh": {"axes": [["dp", 2], ["tp", 2]], "ranks": None},
    "strict": True,
    "rules": [
        ["layers.*.w", "dp:S(1), tp:S(0)"],
        ["head.?eight", "dp:S(0), tp:S(0); order=tp>dp"],
        ["{scale,none}", {"layout": "x:R", "mesh": {"axes": [["x", 4]], "ranks": [3, 2, 1, 0]}}],
        ["layers.1.w", "tp:I(0,[4,2,2]), dp:B(1,2,cyclic)"],
    ],
    "output_plan": [["head", "tp:R"]],
    "return_local_tensor": ["head"],
}
HEADER = {
    "__metadata__": {"format": "pt"},
    "layers.0.w": {"dtype": "BF16", "shape": [64, 8], "data_offsets": [0, 1024]},
    "layers.1.w": {"dtype": "F32", "shape": [64, 8], "data_offsets": [1024, 3072]},
    "head.weight": {"dtype": "F32", "shape": [16, 4], "data_offsets": [3072, 3328]},
}
TP_PLAN = {"layers.*.w": "colwise", "head": "rowwise"}
SMALL_PLAN = {**PLAN, "rules": [["layers.*.w", "dp:S(1), tp:S(0)"], ["head.weight", "tp:S(-1)"]]}
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**18), 1.5, 1e308, "", " ", "\x00", "\ud800", "*", "**", "*" * 300,
    "re:(a+)+b", "{" * 40, "{a,b}" * 12, "[!", "..",
    "a" * 5000,
    "tp:S(0)", "tp:S(-99)", "tp:I(0,1000000)", "tp:I(0,[4,-4,8])", "tp:U(0,[9999999999999999999,1])", "dp:B(0,0)",
    "S(0)" * 500,
    "tp:" + "(" * 500, "rank:-1/cpu", "rank:99999999999/cuda:9", [], {}, [[]], {"a": {"a": {"a": {}}}}, [0] * 3000,
    {"axes": [["dp", 16777216]], "ranks": None},
    {"axes": [["dp", 4096], ["tp", 4096], ["x", 4096]], "ranks": None},
    {"axes": [["dp", 2]], "ranks": [2**62, 5]},
    {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 1]},
    {"dtype": "F32", "shape": [0] * 200, "data_offsets": [0, 1]},
    {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]},
    "../secret.safetensors", "/etc/passwd", "..", "a/../../b.safetensors", "model-1.safetensors\x00", float("nan"),
    float("-inf"), 10**4000, "\ufeff", "\u202e", "__class__", "a..b", ".",
    "forward", "training", "layers", "layers.0.w.x", "__import__('os').system('true')", "<<", "!!int",
]  # fmt: skip


ODD_TEXTS = [
    '"', "{", "[", "]" * 9, "\\", "1e999", "NaN", "Infinity", "&a *a", "!!python/x", "<<: *a", "\t", "\ufffe", "#",
    "9" * 5000, "1:" * 500, '{"a": 1, "a": 2}', "---", "...", "? ", "|", ">", "%YAML 9.9", "\x00", "\r", "'",
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
        return text[:at] + rng.choice(ODD_TEXTS) + text[at:]
    if kind < 0.25:
        return text[: rng.randrange(len(text) + 1)]
    if kind < 0.27:
        return "[" * 100_000
    return text


# ---- one input ------------------------------------------------------------------------------------------------------

FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
CODE = re.compile(r"\.(py|pyc|so)(\.\d+)?\Z|\A\d+\Z")  # what Python imports and keeps; files that are open already
_watched: list[tuple[str, str]] | None = None
_patient = False


def _audit(event: str, arguments: Any) -> None:
    if _watched is not None and (event == "open" or event in FORBIDDEN):
        _watched.append((event, str(arguments[0])))


sys.addaudithook(_audit)


@contextlib.contextmanager
def bounded(case: object, folder: Path | None = None) -> Iterator[None]:
    """No crash, no hang, nothing run; no file opened but those of ``folder`` and of Python's own packages."""
    global _watched

    def late(signum: int, frame: object) -> None:
        if not _patient:
            raise AssertionError(f"more than {SECONDS} s: {str(case)[:3000]}")

    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _watched = []
    try:
        yield
    finally:
        events, _watched = _watched, None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    allowed = (str(folder), sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/")
    strange = [
        (event, name)
        for event, name in events
        if event in FORBIDDEN or not (CODE.search(name) or os.path.realpath(name).startswith(allowed))
    ]
    assert not strange, (strange, str(case)[:3000])


def planned(reader: Callable[[], ShardingPlan], text: str | bytes) -> bool:
    """The plan is read, validated, and said again; or one short ``PlanError``."""
    refusal: PlanError | None = None
    with bounded(text):
        try:
            plan = reader()
            problems = plan.validate(MODEL)
        except PlanError as error:
            refusal = error
    if refusal is not None:
        assert refusal.problems
        assert len(str(refusal)) < 20_000
        return False
    if not problems and not plan.problems:
        assert ShardingPlan.from_json(plan.to_json()) == plan
    return True


def told(arguments: list[str], folder: Path, case: object) -> bool:
    """The command line's status: 0, or 1 or 2 with a reason; a traceback or a status of its own are faults."""
    out, err = io.StringIO(), io.StringIO()
    with bounded(case, folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    assert status in (0, 1, 2), case
    assert status == 0 or err.getvalue() or out.getvalue(), case
    return status == 0


# ---- the kinds of files ---------------------------------------------------------------------------------------------


def _bytes(text: str, rng: random.Random) -> bytes:
    """The text in UTF-8, or sometimes in what is none."""
    data = text.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.04:
        return text.encode("utf-16", "surrogatepass")
    if kind < 0.08:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.choice((b"\xff", b"\x80", b"\xc0\xaf", b"\x00")) + data[at:]
    return data


def make_plan_json(rng: random.Random) -> bytes:
    return _bytes(files(PLAN, rng, json.dumps), rng)


def check_plan_json(data: bytes, folder: Path) -> bool:
    return planned(lambda: ShardingPlan.from_json(data), data)


LAYOUTS = ["dp:S(0), tp:S(1)", "tp:I(0,[4,2,2])", "S(0), R", "dp:U(0,[3,5])", "tp:S(0); order=tp>dp", "tp:P(sum)"]


def make_layout(rng: random.Random) -> bytes:
    text = rng.choice(LAYOUTS)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(text) + 1)
        letter = rng.choice("dtp:SRUBIP(),0123-[]=> ;order sum")
        text = text[:at] + letter * rng.choice((1, 1, 30)) + text[at + rng.randint(0, 2) :]
    return text.encode()


def check_layout(data: bytes, folder: Path) -> bool:
    """As a layout and as a mesh; what is read reads itself again."""
    mesh, text, accepted = MeshSpec({"dp": 2, "tp": 2}), data.decode(), False
    with bounded(text):
        with contextlib.suppress(PlanError):
            layout = Layout.parse(text, mesh)
            assert Layout.parse(str(layout), mesh) == layout
            accepted = True
        with contextlib.suppress(PlanError):
            parsed = MeshSpec.parse(text)
            assert MeshSpec.parse(str(parsed)) == parsed
            accepted = True
    return accepted


def safetensors(header: bytes, length: int | None = None) -> bytes:
    try:
        ends = [entry["data_offsets"][1] for entry in json.loads(header).values() if "data_offsets" in entry]
        data = bytes(min(max(ends, default=0), 2**20))
    except Exception:  # no header of tensors: nothing can follow it
        data = b""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def make_header(rng: random.Random) -> bytes:
    header = _bytes(files(HEADER, rng, json.dumps), rng)
    length = None if rng.random() < 0.9 else rng.choice((0, 1, 2**32, 2**63, len(header) + 1))
    return safetensors(header, length)[: rng.choice((2**40,) * 9 + (3,))]


def check_header(data: bytes, folder: Path) -> bool:
    (folder / "model.safetensors").write_bytes(data)
    return told(["check", str(folder / "model.safetensors"), _empty_plan(folder)], folder, data)


def _empty_plan(folder: Path) -> str:
    """A plan of any model: every tensor is replicated."""
    file = folder / "empty.json"
    if not file.exists():
        file.write_text(ShardingPlan({}, mesh="dp=2,tp=2").to_json())
    return str(file)


INDEX = {
    "metadata": {"total_size": 3072},
    "weight_map": {
        "layers.0.w": "model-1.safetensors",
        "layers.1.w": "model-1.safetensors",
        "head.weight": "model-2.safetensors",
    },
}


def make_index(rng: random.Random) -> bytes:
    return _bytes(files(INDEX, rng, json.dumps), rng)


def check_index(data: bytes, folder: Path) -> bool:
    """A checkpoint in several files: the index names files, and none outside of its folder is opened."""
    inner = folder / "inner"
    if not inner.exists():
        inner.mkdir()
        for file in (folder / "secret.safetensors", inner / "model-1.safetensors", inner / "model-2.safetensors"):
            file.write_bytes(safetensors(json.dumps(HEADER).encode()))
    (inner / "model.safetensors.index.json").write_bytes(data)
    return told(["check", str(inner / "model.safetensors.index.json"), _empty_plan(inner)], inner, data)


def make_tp_plan(rng: random.Random) -> bytes:
    return _bytes(files(TP_PLAN, rng, json.dumps), rng)


def _model(folder: Path) -> str:
    file = folder / "model.safetensors"
    if not file.exists():
        file.write_bytes(safetensors(json.dumps(HEADER).encode()))
    return str(file)


def check_tp_plan(data: bytes, folder: Path) -> bool:
    metadata = load_model(_model(folder))
    try:
        tp_plan = json_values(data)
    except ValueError:
        return False
    return planned(lambda: ShardingPlan.from_hf_tp_plan(tp_plan, metadata, "tp=2"), data)


def make_small_plan(rng: random.Random) -> bytes:
    return _bytes(files(SMALL_PLAN, rng, json.dumps), rng)


def check_command_line(data: bytes, folder: Path) -> bool:
    """A plan file through the commands that read one."""
    (folder / "plan.json").write_bytes(data)
    plan, model = str(folder / "plan.json"), _model(folder)
    arguments = [
        ["check", model, plan, "--json"],
        ["explain", plan, "layers.0.w", "--model", model],
        ["diff", plan, plan, "--model", model],
    ][len(data) % 3]
    return told(arguments, folder, data)


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
KINDS = [("LlamaForCausalLM", "llama"), ("GPT2LMHeadModel", "gpt2"), ("MixtralForCausalLM", "mixtral")]
GIANTS: list[dict[str, Any]] = [{"num_hidden_layers": 10**9}, {"hidden_size": 10**60}, {"vocab_size": 1 << 41}]


def make_config(rng: random.Random) -> bytes:
    cls, kind = rng.choice(KINDS)
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "num_local_experts": 2}
    document = {**CONFIG, **small, "architectures": [cls], "model_type": kind}
    if rng.random() < 0.05:
        document |= rng.choice(GIANTS)
    return _bytes(files(document, rng, json.dumps), rng)


def check_config(data: bytes, folder: Path) -> bool:
    (folder / "config.json").write_bytes(data)
    return told(["plan", str(folder / "config.json"), "--mesh", "dp=2,tp=2"], folder, data)


@dataclass(frozen=True)
class Parser:
    """One kind of file."""

    what: str
    make: Callable[[random.Random], bytes]
    check: Callable[[bytes, Path], bool]
    sample: int  # inputs in a run of the suite
    extras: tuple[str, ...] = ()


PARSERS = {
    "plan-json": Parser("plans as JSON", make_plan_json, check_plan_json, 50),
    "layout-text": Parser("layouts and meshes as text", make_layout, check_layout, 120),
    "safetensors-header": Parser("safetensors headers", make_header, check_header, 30),
    "safetensors-index": Parser("indexes of checkpoints in several files", make_index, check_index, 20),
    "tp-plan": Parser("Hugging Face tp_plans", make_tp_plan, check_tp_plan, 20),
    "command-line": Parser("plans through `check`, `explain`, `diff`", make_small_plan, check_command_line, 20),
    "hugging-face-config": Parser("Hugging Face configs", make_config, check_config, 5, ("transformers",)),
}


def warm_up(parser: Parser, folder: Path) -> None:
    """Read some inputs without a limit: importing torch and transformers takes longer than any input may."""
    global _patient
    _patient = True
    ShardingPlan.from_json(json.dumps(PLAN)).validate(MODEL)
    for seed in range(1 if parser.make is make_config else 12):
        parser.check(parser.make(random.Random(seed)), folder)
    if parser.make is make_config:
        for cls, kind in KINDS:
            parser.check(json.dumps({**CONFIG, "architectures": [cls], "model_type": kind}).encode(), folder)
    _patient = False
