"""``shard-spec search``: every mesh and planner of a number of ranks in one table, and presets by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from shard_spec.cli import main

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
STEP = ("--batch", "16x32", "--topology", "h100-sxm")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def rows_of(capsys: Any, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    assert main(["search", *arguments, "--json"]) == status
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["candidates"]
    return rows


@pytest.mark.extra("transformers")
def test_the_table_has_every_mesh_with_the_numbers_of_its_plan(config: str, capsys: Any) -> None:
    rows = rows_of(capsys, config, "--ranks", "4", *STEP)
    found = {(row["mesh"], row["planner"]) for row in rows}
    wanted = {("dp=4", "replicate"), ("dp=4", "fsdp"), ("tp=4", "megatron")}
    assert found == wanted | {("dp=2, tp=2", "megatron"), ("dp=2, tp=2", "megatron+fsdp")}
    times = [row["seconds"][1] for row in rows]
    assert times == sorted(times)
    for row in rows:
        assert 0 < row["seconds"][0] <= row["seconds"][1]
        assert row["assumptions"]
        if row["planner"] in ("fsdp", "megatron+fsdp"):
            mesh = row["mesh"].replace(" ", "")
            assert main(["plan", config, "--mesh", mesh, "--planner", row["planner"], *STEP, "--json"]) == 0
            document = json.loads(capsys.readouterr().out)
            assert row["peak_bytes"] == max(document["memory"]["total"])
            sent = sum(sum(kinds.values()) for kinds in document["communication"]["by_axis"].values())
            assert row["sent_bytes"] == pytest.approx(sent)


@pytest.mark.extra("transformers")
def test_what_does_not_fit_comes_last_and_fails_if_nothing_does(config: str, capsys: Any) -> None:
    peaks = sorted(row["peak_bytes"] for row in rows_of(capsys, config, "--ranks", "4", *STEP))
    rows = rows_of(capsys, config, "--ranks", "4", *STEP, "--memory-limit", f"{peaks[1]}B")
    assert [row["fits"] for row in rows] == [True, True, False, False, False]
    rows = rows_of(capsys, config, "--ranks", "4", *STEP, "--memory-limit", f"{peaks[0] - 1}B", status=1)
    assert not any(row["fits"] for row in rows)
    assert main(["search", config, "--ranks", "4", *STEP, "--memory-limit", "1KiB"]) == 1
    output = capsys.readouterr().out
    assert "nothing fits" in output
    assert "--checkpointing" in output


@pytest.mark.extra("transformers")
def test_refused_meshes_keep_their_reason(config: str, capsys: Any) -> None:
    rows = rows_of(capsys, config, "--ranks", "6", *STEP)
    refused = {row["mesh"]: row["refused"] for row in rows if row["peak_bytes"] is None}
    assert "16 sequences over 6 ranks" in refused["dp=6"]
    assert all(refused.values())
    assert rows[-1]["peak_bytes"] is None
    assert rows[0]["peak_bytes"] > 0
    assert main(["search", config, "--ranks", "6"]) == 0
    assert "activations are not counted: pass --batch" in capsys.readouterr().out


@pytest.mark.extra("transformers")
@pytest.mark.parametrize(("ranks", "message"), [("0", "a number from 1"), ("9999999", "a number from 1")])
def test_wrong_numbers_of_ranks_are_refused(config: str, capsys: Any, ranks: str, message: str) -> None:
    assert main(["search", config, "--ranks", ranks]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.extra("transformers")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    from shard_spec.cli.sources import load_model
    from shard_spec.plan.resolve import metadata_of

    assert sum(each.numel for each in metadata_of(load_model(name)).parameters) == parameters


def test_an_unknown_name_lists_the_presets(capsys: Any) -> None:
    assert main(["search", "llama-9", "--ranks", "2"]) == 2
    assert "llama-3.1-70b" in capsys.readouterr().err
