"""Sharded tensors into safetensors files: the format's own library reads the full tensors, each byte written once."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import Part, PlanError, load_safetensors, reshard_state_dict, save_safetensors
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.extra("safetensors")


def _folder(ranks: Ranks, tmp_path: Path) -> Path:
    path: str = ranks.gather(str(tmp_path))[0]
    return Path(path)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """All files of a folder, by the format's own library; the index has to agree with what they hold."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not loaded.keys() & tensors.keys()
        tensors |= loaded
        if (index := folder / "model.safetensors.index.json").exists():
            weights = json.loads(index.read_text())["weight_map"]
            assert {name for name, file in weights.items() if file == path.name} == set(loaded)
    return tensors


def _equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def _full() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "rows": (7, 5), "columns": (6, 9), "copies": (300, 120), "two.axes": (8, 8), "scalar": (), "none": (0, 4),
        "short": (1, 3), "both.rows": (9, 2), "large.columns": (260, 512),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _state(ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Full tensors of several dtypes, and the same sharded: uneven, empty, replicated, on a mesh of two axes, plain."""
    dtypes = {
        "rows": torch.bfloat16, "columns": torch.float64, "two.axes": torch.int16, "short": torch.bool,
        "both.rows": torch.float8_e4m3fn, "copies": torch.float16,
    }  # fmt: skip
    full = {name: value.to(dtypes.get(name, torch.float32)) for name, value in _full().items()}
    line, grid = ranks.mesh((ranks.world_size,), ("x",)), ranks.mesh((2, ranks.world_size // 2), ("a", "b"))
    places: dict[str, tuple[Any, list[Placement]]] = {
        "rows": (line, [Shard(0)]), "columns": (line, [Shard(1)]), "copies": (line, [Replicate()]),
        "two.axes": (grid, [Shard(1), Shard(0)]), "none": (line, [Shard(0)]), "short": (line, [Shard(0)]),
        "both.rows": (grid, [Shard(0), Replicate()]), "large.columns": (line, [Shard(1)]),
    }  # fmt: skip
    state = {
        # Without communication: gloo does not scatter these dtypes.
        name: distribute_tensor(value, *places[name], src_data_rank=None) if name in places else value
        for name, value in full.items()
    }
    return full, state


@pytest.mark.ranks(2)
def test_a_module_that_fsdp2_has_gathered_for_a_validation(ranks: Ranks, tmp_path: Path) -> None:
    """Its root stays gathered behind a forward without gradients; reading its state dict shards it again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    full = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=ranks.mesh((2,), ("dp",)))
    folder = _folder(ranks, tmp_path) / "model"
    for call in (save_safetensors, load_safetensors, reshard_state_dict):
        with torch.no_grad():
            model(torch.ones(2, 7))
        if call is save_safetensors:
            save_safetensors(model, folder)
        elif call is load_safetensors:
            load_safetensors(folder, out=model)
        else:
            reshard_state_dict({name: value + 1 for name, value in full.items()}, out=model)
    _equal(_read(folder), full)
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    _equal(after, {name: value + 1 for name, value in full.items()})
    assert sum(isinstance(value, DTensor) for value in model.state_dict().values()) == 4


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("limit", [10**9, 40_000, 1])
def test_files_hold_the_full_tensors_and_each_byte_is_written_once(ranks: Ranks, tmp_path: Path, limit: int) -> None:
    full, state = _state(ranks)
    folder = _folder(ranks, tmp_path) / "new"
    plan = save_safetensors(state, folder, max_file_bytes=limit, bucket_bytes=30_000)
    _equal(_read(folder), full)
    assert (len(plan.files) == 1) == (limit == 10**9)
    assert len(plan.files) == len(full) or limit > 1
    assert {path.name for path in folder.iterdir()} - {"model.safetensors.index.json"} == set(plan.files)
    num_bytes = sum(value.numel() * value.itemsize for value in full.values())
    assert sum(ranks.gather(plan.written_bytes(ranks.rank))) == num_bytes
    # Rows, copies and plain tensors are written by ranks that hold them: of the rest alone something moves.
    moved = {move.source for move in plan.moves.moves if move.plan.wire_bytes}
    assert moved <= {"columns", "two.axes", "large.columns"}
    assert plan.written_bytes(ranks.rank) > num_bytes // ranks.world_size // 2
    loaded = load_safetensors(folder, f"{ranks.world_size}: S(0)", key_map={"scalar": None})
    for name in ("rows", "columns", "large.columns"):
        chunks = full[name].chunk(ranks.world_size)
        expected = chunks[ranks.rank] if ranks.rank < len(chunks) else full[name][:0]
        assert torch.equal(loaded[name], expected)
    assert "model" in plan.explain()
    assert plan.digest == ranks.gather(plan.digest)[0]


class Tied(nn.Module):
    """A model with tied weights, whose first name is not the first of the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight


@pytest.mark.ranks(2)
def test_tied_weights_are_written_once_under_the_first_name(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_model

    torch.manual_seed(0)
    model, folder = Tied(), _folder(ranks, tmp_path)
    expected = {name: value.detach().clone() for name, value in model.state_dict().items() if name != "head.weight"}
    mesh = ranks.mesh((2,), ("x",))
    tokens = nn.Parameter(distribute_tensor(model.tokens.weight.detach(), mesh, [Shard(0)]))
    model.tokens.weight = model.head.weight = tokens
    save_safetensors(model, folder)
    _equal(_read(folder), expected)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "tokens.weight"}
    plain = Tied()
    missing, unexpected = load_model(plain, folder / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(plain.head.weight, expected["tokens.weight"])
    loaded = Tied()
    load_safetensors(folder, out=loaded)
    assert torch.equal(loaded.head.weight, expected["tokens.weight"])


@pytest.mark.ranks(2)
def test_names_are_mapped_and_tensors_split_on_the_way(ranks: Ranks, tmp_path: Path) -> None:
    full, folder = torch.arange(60.0).view(12, 5), _folder(ranks, tmp_path)
    layouts = {"qkv": "2: S(1)", "old": "rank 1"}
    state = {"qkv": full.tensor_split(2, 1)[ranks.rank].contiguous()} if ranks.rank else {"qkv": full[:, :3].clone()}
    if ranks.rank:
        state = {"qkv": full[:, 3:].clone(), "old": full + 1, "left": full}
    save_safetensors(
        state,
        folder,
        src_layouts=layouts,
        shapes={"qkv": (12, 5), "old": (12, 5)},
        key_map={"qkv": [Part("q", size=4), Part("k", source_start=4)], "old": "new", "left": None},
    )
    _equal(_read(folder), {"q": full[:4], "k": full[4:], "new": full + 1})


@pytest.mark.ranks(2)
def test_what_cannot_be_written_is_refused_by_all_and_leaves_no_file(ranks: Ranks, tmp_path: Path) -> None:
    mesh, folder = ranks.mesh((2,), ("x",)), _folder(ranks, tmp_path)
    ones, rank = torch.ones(4, 4), ranks.rank
    half = distribute_tensor(ones, mesh, [Shard(0)], src_data_rank=None)
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "a sum": ("partial-value", {"a": DTensor.from_local(ones, mesh, [Partial()], run_check=False)}),
        "no dtype": ("unsupported-dtype", {"a": ones.to(torch.complex128)}),
        "shards of no layout": ("missing-argument", {"a": ones + rank}),
        "nothing": ("invalid-argument", {}),
        "no memory": ("no-data", {"a": half.to("meta") if rank else half}),
        "no tensor": ("wrong-type", {"a": ones, "b": 3} if rank else {"a": ones}),
        "a name of the format": ("invalid-argument", {"__metadata__": ones}),
    }
    for what, (code, state) in cases.items():
        with pytest.raises(PlanError) as caught:
            save_safetensors(state, folder / "x")
        assert code in str(caught.value), (what, caught.value)
        assert len(set(ranks.gather(str(caught.value)))) == 1
        assert not list((folder / "x").iterdir())
    with pytest.raises(PlanError, match="ranks-disagree"):
        save_safetensors({"a": ones}, folder / f"{rank}")
    save_safetensors({"a": ones}, folder)
    with pytest.raises(PlanError, match="exists"):
        save_safetensors({"a": ones}, folder)
    _equal(_read(folder), {"a": ones})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_write_stops_all_and_leaves_no_file(ranks: Ranks, tmp_path: Path, who: int) -> None:
    folder, mesh = _folder(ranks, tmp_path), ranks.mesh((2,), ("x",))
    state = {f"w{at}": distribute_tensor(torch.randn(64, 8), mesh, [Shard(1)]) for at in range(4)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == who:  # the system lets this process write the first two tensors, and refuses the rest
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(PlanError, match="File too large"):
            save_safetensors(state, folder, bucket_bytes=4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ranks.gather(None)
    assert not list(folder.iterdir())
    save_safetensors(state, folder)
    assert set(_read(folder)) == set(state)
