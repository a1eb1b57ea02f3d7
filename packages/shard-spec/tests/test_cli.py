"""The command line: models from three kinds of sources, exit statuses, JSON, and the page in a browser."""

import json
import shutil
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from shard_spec import ShardingPlan
from shard_spec.cli import main
from torch import nn

THIS = "shard_spec_cli_models:make"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def factory(tmp_path: Any, monkeypatch: Any) -> Any:
    """A module that can be imported, with a model factory in it."""
    text = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)

def make():
    model = Model()
    assert all(p.device.type == "meta" for p in model.parameters()), "no memory for weights is needed"
    return model

def broken(size):
    return Model()

def raises():
    raise RuntimeError("no such checkpoint")

number = 3
"""
    (tmp_path / "shard_spec_cli_models.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return THIS


def safetensors_file(path: Any) -> Any:
    """A file as safetensors writes it, filled with zeros."""
    header = {
        "__metadata__": {"format": "pt"},
        "layers.0.w": {"dtype": "BF16", "shape": [64, 8], "data_offsets": [0, 1024]},
        "layers.1.w": {"dtype": "BF16", "shape": [64, 8], "data_offsets": [1024, 2048]},
        "codes": {"dtype": "I8", "shape": [10], "data_offsets": [2048, 2058]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2058))
    return str(path)


def test_plan_check_explain_and_diff(factory: Any, tmp_path: Any, capsys: Any) -> None:
    plan, page = str(tmp_path / "plan.json"), tmp_path / "report.html"
    status = main(["plan", factory, "--mesh", "dp=2,tp=2", "--out", plan, "--html", str(page), "--batch", "4x8"])
    output = capsys.readouterr().out
    assert status == 0
    assert "blocks.*.fc1.weight" in output
    assert "memory on each rank" in output
    assert "all_gather" in output
    assert "blocks.*.fc1.weight" in dict(ShardingPlan.from_json(Path(plan).read_text()).plan)
    assert page.read_text().startswith("<!doctype html>")
    assert main(["check", factory, plan]) == 0
    assert main(["check", factory, plan, "--memory-limit", "1KiB"]) == 1
    assert "does-not-fit" in capsys.readouterr().out
    assert main(["explain", plan, "blocks.0.fc1.weight", "--model", factory]) == 0
    assert "rank 0: local shape" in capsys.readouterr().out
    assert main(["diff", plan, plan]) == 0
    other = tmp_path / "other.json"
    other.write_text(ShardingPlan({"head.weight": "tp:S(1)"}, mesh={"dp": 2, "tp": 2}).to_json())
    assert main(["diff", plan, str(other), "--model", factory]) == 1
    assert "head.weight" in capsys.readouterr().out


def test_a_factory_that_raises_is_wrong_usage(factory: Any, capsys: Any) -> None:
    for name, message in (("raises", "RuntimeError: no such checkpoint"), ("broken", "TypeError: ")):
        assert main(["plan", f"{THIS.partition(':')[0]}:{name}", "--mesh", "dp=2"]) == 2
        assert message in capsys.readouterr().err


def test_json_is_json(factory: Any, tmp_path: Any, capsys: Any) -> None:
    assert main(["plan", factory, "--mesh", "dp=4", "--json", "--optimizer", "sgd"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == []
    assert document["memory"]["ranks"] == [0, 1, 2, 3]
    assert document["plan"]["mesh"]["axes"] == [["dp", 4]]
    wrong = tmp_path / "wrong.json"
    wrong.write_text(ShardingPlan({"embed.wieght": "tp:S(0)", "head.weight": "tp:S(7)"}, mesh={"tp": 2}).to_json())
    assert main(["check", factory, str(wrong), "--json"]) == 1
    codes = [problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    assert sorted(codes) == ["dim-out-of-range", "unmatched-pattern"]
    wrong.write_text("{}")
    assert main(["check", factory, str(wrong), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "invalid-plan"


@pytest.mark.extra("safetensors")
def test_safetensors_headers(tmp_path: Any, capsys: Any) -> None:
    file = safetensors_file(tmp_path / "model.safetensors")
    plan = tmp_path / "plan.json"
    plan.write_text(ShardingPlan({"layers.*.w": "S(0)", "codes": "R"}, mesh={"dp": 4}).to_json())
    assert main(["check", file, str(plan), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["plan", file, "--mesh", "dp=4"]) == 2
    assert "a planner reads modules" in capsys.readouterr().err
    assert document["memory"]["parts"]["parameters"][0] == 2 * 16 * 8 * 2 + 10
    index = tmp_path / "model.safetensors.index.json"
    both = {"layers.0.w": "model.safetensors", "codes": "model.safetensors"}
    index.write_text(json.dumps({"weight_map": both}))
    assert main(["check", str(index), str(plan)]) == 0
    for wrong in ("../model.safetensors", "other.safetensors"):
        index.write_text(json.dumps({"weight_map": {"layers.0.w": wrong}}))
        assert main(["check", str(index), str(plan)]) == 2
    index.write_text(json.dumps({"weight_map": {"layers.0.w": "model.safetensors", "absent": "model.safetensors"}}))
    assert main(["check", str(index), str(plan)]) == 2
    for shape in ([10**30, 0], [2**62, 2**62, 0], [2**60]):
        text = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        assert main(["check", str(tmp_path / "huge.safetensors"), str(plan)]) == 2
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert main(["check", str(tmp_path / "bad.safetensors"), str(plan)]) == 2


@pytest.mark.extra("transformers")
def test_a_hugging_face_config(tmp_path: Any, capsys: Any) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--mesh", "dp=4,tp=8", "--dtype", "bfloat16"]) == 0
    output = capsys.readouterr().out
    assert "model.layers.*.self_attn.q_proj.weight" in output
    assert "dp:S(0), tp:S(1)" in output
    plan = tmp_path / "hf.json"
    plan.write_text(ShardingPlan({"model.layers.*.mlp.down_proj.weight": "S(1)"}, mesh={"tp": 8}).to_json())
    assert main(["check", str(tmp_path), str(plan)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", THIS],
        ["plan", "no_such_module:x", "--mesh", "dp=2"],
        ["plan", "shard_spec_cli_models:none", "--mesh", "dp=2"],
        ["plan", "shard_spec_cli_models:number", "--mesh", "dp=2"],
        ["plan", "shard_spec_cli_models:broken", "--mesh", "dp=2"],
        ["plan", "nothing", "--mesh", "dp=2"],
        ["plan", THIS, "--mesh", "dp=2", "--planner", "magic"],
        ["plan", THIS, "--mesh", "x=2"],
        ["plan", THIS, "--mesh", "dp=2", "--batch", "many"],
        ["plan", THIS, "--mesh", "dp=2", "--memory-limit", "a lot"],
        ["plan", THIS, "--mesh", "dp=2", "--topology", "abacus"],
        ["plan", THIS, "--mesh", "dp=2", "--optimizer", "abacus"],
        ["plan", THIS, "--mesh", "dp=2", "--dtype", "float1"],
        ["plan", THIS, "--mesh", "dp"],
        ["plan", THIS, "--mesh", "dp=999999999"],
        ["plan", THIS, "--mesh", "dp=2", "--out", "no/such/folder/plan.json"],
        ["plan", THIS, "--mesh", "dp=2", "--html", "/"],
        ["check", THIS, "no-such-file.json"],
    ],
)
def test_wrong_usage_is_status_2_and_says_why(factory: Any, arguments: Any, capsys: Any) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("shard-spec: ")


def test_argparse_errors_are_status_2_and_help_imports_no_torch() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["frobnicate"])
    assert caught.value.code == 2
    code = """
import sys
from shard_spec.cli import main
for arguments in (["--help"], ["plan", "--help"], ["--version"]):
    try:
        main(arguments)
    except SystemExit as error:
        assert error.code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


class Page(HTMLParser):
    """What a page refers to, and whether its tags pair."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Any] = []
        self.open: list[str] = []
        self.ids: set[Any] = set()

    def handle_starttag(self, tag: Any, attrs: Any) -> Any:
        attributes = dict(attrs)
        self.links += [value for key, value in attrs if key in ("src", "href")]
        self.ids.add(attributes.get("id"))
        if tag in ("svg", "g", "title", "table", "div", "ul"):
            self.open.append(tag)

    def handle_endtag(self, tag: Any) -> Any:
        if tag in ("svg", "g", "title", "table", "div", "ul"):
            assert self.open.pop() == tag


def page_of(tmp_path: Any) -> Any:
    from shard_spec.report import html_report

    net = nn.ModuleDict({"<b>odd</b> & name": nn.Linear(8, 8), "fused": nn.Linear(8, 8, bias=False)})
    plan = ShardingPlan(
        {"fused.weight": "dp:S(1), tp:I(0,[4,2,2])", "*.bias": "dp:R, tp:U(0,[8,0])"}, mesh={"dp": 2, "tp": 2}
    )
    from shard_spec import metadata_of

    metadata = metadata_of(net)
    text = html_report(
        plan, metadata, plan.memory(metadata), plan.communication(metadata), title="<script>alert(1)</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    return path, text


def test_the_page_is_self_contained_and_escapes_names(tmp_path: Any) -> None:
    _, text = page_of(tmp_path)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert {"plan", "memory", "communication"} <= page.ids
    assert "<script" not in text
    assert "<b>odd" not in text
    assert "http" not in text


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_the_page_is_drawn_by_a_real_browser(tmp_path: Any) -> None:
    assert BROWSER is not None
    path, _ = page_of(tmp_path)
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1200", f"--user-data-dir={tmp_path}/u"]
    command = [BROWSER, *flags, f"--screenshot={picture}", path.as_uri()]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000, "a blank page is smaller"
    dom = subprocess.run([BROWSER, *flags, "--dump-dom", path.as_uri()], check=True, timeout=120, capture_output=True)
    assert dom.stdout.count(b"<rect") > 20


def test_a_batch_counts_activations_against_the_limit(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    text = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x
"""
    (tmp_path / "shard_spec_cli_stack.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = [
        "plan",
        "shard_spec_cli_stack:Model",
        "--mesh",
        "dp=2",
        "--optimizer",
        "sgd",
        "--batch",
        "8x128",
        "--json",
    ]

    def run(*more: str) -> tuple[int, dict[str, Any]]:
        status = main([*command, *more])
        return status, json.loads(capsys.readouterr().out)

    status, report = run()
    assert status == 0
    full = max(report["memory"]["total"])
    small = max(run("--checkpointing")[1]["memory"]["total"])
    static = sum(report["memory"]["parts"][part][0] for part in ("parameters", "gradients"))
    assert static < small < full
    moment = report["memory"]["moment"]
    status, report = run("--memory-limit", f"{full}B")
    assert (status, report["verdict"].split(":")[0]) == (0, "fits")
    status, report = run("--memory-limit", f"{full - 1}B")
    assert status == 1
    assert [problem["code"] for problem in report["problems"]] == ["does-not-fit"]
    assert report["problems"][0]["found"] == report["verdict"]
    assert report["verdict"].endswith(f"peak at the {moment}")
    assert "--checkpointing" in report["problems"][0]["hint"]
    assert run("--memory-limit", f"{small}B", "--checkpointing")[0] == 0
    assert run("--memory-limit", f"{small - 1}B", "--checkpointing")[0] == 1
    half = run("--dtype", "bfloat16")[1]["memory"]["total"][0]
    assert half < 0.6 * full
    assert run("--dtype", "bfloat16", "--memory-limit", f"{half}B")[0] == 0
    assert run("--dtype", "bfloat16", "--memory-limit", f"{half - 1}B")[0] == 1


def test_fsdp_is_a_data_axis_and_an_axis_that_shards_nothing_is_refused(factory: Any, capsys: Any) -> None:
    assert main(["plan", factory, "--mesh", "fsdp=2,tp=2", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["plan"]["rules"]
    assert any("fsdp:S(0)" in text for _, text in rules)
    assert any("tp:S" in text for _, text in rules)
    assert main(["plan", factory, "--mesh", "fsdp=2,model=2"]) == 2
    assert "'model' would shard nothing" in capsys.readouterr().err
    assert main(["plan", "torch.nn:Identity", "--mesh", "tp=2"]) == 2
    assert "'tp' of 2 ranks would shard nothing" in capsys.readouterr().err


def test_a_model_without_a_forward_is_said_to_be_uncounted(factory: Any, capsys: Any) -> None:
    assert main(["plan", factory, "--mesh", "dp=2", "--batch", "8x128"]) == 0
    printed = capsys.readouterr().out
    assert "forward on token ids 8x128: PlanError: [unverified] batch: a Model has no forward" in printed
    assert "no problems" in printed


def test_a_misspelt_name_is_answered_with_the_nearest(factory: Any, tmp_path: Any, capsys: Any) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["plan", factory, "--mesh", "tp=2", "--out", plan]) == 0
    capsys.readouterr()
    assert main(["explain", plan, "blocks.0.fc1.wieght", "--model", factory]) != 0
    assert "did you mean blocks.0.fc1.weight" in capsys.readouterr().err


def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "shard_spec", "--help"], check=True, capture_output=True, text=True)
    assert "shard-spec" in run.stdout
