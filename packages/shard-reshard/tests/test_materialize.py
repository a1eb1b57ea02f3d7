"""Loading into a module on the meta device, folders with an index, and buffers that nothing has initialised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, load_safetensors
from stored_files import write
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytestmark = pytest.mark.extra("safetensors")


class Model(nn.Module):
    """Tied, sharded and plain parameters, a buffer in the state dict and one that is in none."""

    scale: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.heads = nn.Linear(8, 12, bias=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("steps", torch.arange(4.0), persistent=False)


FULL = {
    "embed.weight": torch.arange(96.0).view(12, 8),
    "heads.weight": torch.arange(96.0).view(12, 8) * 2,
    "scale": torch.tensor([3.0, 4.0, 5.0]),
}


def _sharded(model: Model, mesh: Any, rank: int) -> Model:
    """The embedding as a DTensor, the heads as a local parameter that carries what it is a shard of."""
    weight = nn.Parameter(distribute_tensor(model.embed.weight.detach(), mesh, [Shard(0)], src_data_rank=None))
    model.embed.weight = model.head.weight = weight
    local = nn.Parameter(model.heads.weight.detach()[:6].clone())
    sections = ((4, 4, 2), (4, 2, 1))
    local._sharding_info = (mesh, (Shard(0),), (8, 8), (8, 1), sections)  # type: ignore[attr-defined]
    model.heads.weight = local
    return model


@pytest.mark.ranks(2)
def test_a_module_on_meta_gets_memory_and_says_so(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    if ranks.rank == 0:
        write(folder / "a.safetensors", FULL | {"heads.weight": FULL["heads.weight"][:8]})
    ranks.gather(None)
    mesh = ranks.mesh((2,), ("tp",))
    with torch.device("meta"):
        model = _sharded(Model(), mesh, ranks.rank)
    original = model.heads.weight
    with pytest.raises(PlanError, match=r"\[uninitialized-buffer\] steps: a buffer on the meta device") as caught:
        load_safetensors(folder, out=model)
    assert len(set(ranks.gather(str(caught.value)))) == 1
    assert model.heads.weight is original  # a refused load leaves the module as it was
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.steps = torch.arange(4.0)
    for _ in range(2):  # the second time nothing is on meta
        loaded = load_safetensors(folder, out=model)
        assert model.head.weight is model.embed.weight
        assert isinstance(model.embed.weight, nn.Parameter)
        assert isinstance(model.embed.weight, DTensor)
        assert torch.equal(model.embed.weight.full_tensor().detach(), FULL["embed.weight"])
        own = torch.cat([FULL["heads.weight"][:4], FULL["heads.weight"][4:8].chunk(2)[ranks.rank]])
        assert torch.equal(model.heads.weight.detach(), own)
        assert model.heads.weight._sharding_info[4] == ((4, 4, 2), (4, 2, 1))  # type: ignore[attr-defined]
        assert model.heads.weight.requires_grad
        assert torch.equal(model.scale, FULL["scale"])
        if _ == 0:
            assert set(loaded.materialized) == {"embed.weight", "head.weight", "heads.weight", "scale"}
            assert loaded["scale"] is model.scale
    assert loaded.materialized == ()
    with torch.device("meta"):
        model = _sharded(Model(), mesh, ranks.rank)
    load_safetensors(folder, out=model, strict=False)
    assert model.steps.is_meta


@pytest.mark.ranks(2)
def test_files_that_hold_tied_tensors_twice(ranks: Ranks, tmp_path: Path) -> None:
    folder, mesh = Path(ranks.gather(str(tmp_path))[0]), ranks.mesh((2,), ("tp",))
    if ranks.rank == 0:
        heads = FULL["heads.weight"][:8]
        write(folder / "a.safetensors", FULL | {"heads.weight": heads, "head.weight": FULL["embed.weight"]})
        write(folder / "b.safetensors", FULL | {"heads.weight": heads, "head.weight": FULL["embed.weight"] + 1})
    ranks.gather(None)
    with torch.device("meta"):
        model = _sharded(Model(), mesh, ranks.rank)
    model.steps = torch.arange(4.0)
    for file in ("a.safetensors", "b.safetensors"):
        with pytest.raises(PlanError, match=r"\[invalid-out\] head\.weight: .*memory of embed\.weight"):
            load_safetensors(folder / file, out=model)
    assert model.head.weight.is_meta
    loaded = load_safetensors(folder / "a.safetensors", out=model, key_map={"head.weight": None})
    assert len(loaded.materialized) == 4
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, DTensor)
    assert torch.equal(model.embed.weight.full_tensor().detach(), FULL["embed.weight"])
    assert torch.equal(model.scale, FULL["scale"])


@pytest.mark.ranks(2)
def test_buffers_after_to_empty(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    if ranks.rank == 0:
        write(folder / "a.safetensors", FULL)
    ranks.gather(None)
    model = Model()
    load_safetensors(folder, out=model)  # what a constructor computed
    for values in (float("nan"), float(ranks.rank + 1)):  # what an allocator leaves behind
        model.steps.fill_(values)
        before = model.scale.clone().fill_(7.0)
        model.scale.copy_(before)
        with pytest.raises(PlanError, match=r"\[uninitialized-buffer\] steps"):
            load_safetensors(folder, out=model)
        assert torch.equal(model.scale, before)
        load_safetensors(folder, out=model, strict=False)
    model.steps.zero_()
    load_safetensors(folder, out=model)


@pytest.mark.ranks(2)
def test_a_failed_load_leaves_meta_as_it_was(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    if ranks.rank == 0:
        write(folder / "a.safetensors", {"weight": torch.ones(4, 4)})
    ranks.gather(None)
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    original = model.weight

    def broken(*args: Any) -> None:
        raise OSError("a disk that is gone")

    monkeypatch.setattr("shard_reshard.checkpoint.load.read_rows", broken)
    with pytest.raises(PlanError, match="a disk that is gone"):
        load_safetensors(folder, {"weight": "2: R"}, out=model)
    assert model.weight is original
    assert original.is_meta


INDEX = "model.safetensors.index.json"
REFUSED: dict[str, Any] = {
    "a parent": {"weight_map": {"w": "../a.safetensors"}},
    "a root": {"weight_map": {"w": "/a.safetensors"}},
    "a folder": {"weight_map": {"w": "sub/a.safetensors"}},
    "a drive": {"weight_map": {"w": "C:\\a.safetensors"}},
    "a stream": {"weight_map": {"w": "a:b.safetensors"}},
    "a zero": {"weight_map": {"w": "a\0.safetensors"}},
    "another kind": {"weight_map": {"w": "a.bin"}},
    "a number": {"weight_map": {"w": 3}},
    "half a character": {"weight_map": {"w": "\ud800.safetensors"}},
    "no map": {},
    "a list": [1],
    "a map that is none": {"weight_map": [["w", "a.safetensors"]]},
}


@pytest.mark.ranks(2)
def test_folders_with_an_index(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    first, second = {"w": torch.arange(6.0)}, {"v": torch.ones(2, 2)}
    if ranks.rank == 0:
        (folder / "sub").mkdir()
        for place in (folder, folder / "sub"):
            write(place / "a.safetensors", first)
            write(place / "b.safetensors", second)
        write(folder / "consolidated.safetensors", first | second)  # in no index: not read
        (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    ranks.gather(None)
    for path in (folder, folder / INDEX):
        loaded = load_safetensors(path, "2: R")
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
            "w": list(range(6)),
            "v": [[1, 1], [1, 1]],
        }
    for what, text in REFUSED.items():
        ranks.gather(None)
        if ranks.rank == 0:
            (folder / "sub" / INDEX).write_text(json.dumps(text))
        ranks.gather(None)
        with pytest.raises(PlanError, match="invalid-file") as caught:
            load_safetensors(folder / "sub", "2: R")
        assert len(set(ranks.gather(str(caught.value)))) == 1, what
    if ranks.rank == 0:
        (folder / "sub" / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    ranks.gather(None)
    with pytest.raises(PlanError, match=r"\[missing-tensor\] x"):
        load_safetensors(folder / "sub", "2: R")


@pytest.mark.ranks(2)
def test_ties_and_views_of_memory_on_meta(ranks: Ranks, tmp_path: Path) -> None:
    """Tied by memory and not by object, they became two tensors; a buffer without memory ended the process."""
    folder, full = Path(ranks.gather(str(tmp_path))[0]), torch.arange(32.0).view(8, 4)
    if ranks.rank == 0:
        write(folder / "f", {"a": full, "b": full, "c": full[2:4]})
    ranks.gather(None)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(8, 4))
            self.b = nn.Parameter(self.a.data)

    with torch.device("meta"):
        model = Views()
    if ranks.rank == 1:
        model.register_buffer("odd", torch.ones(3).to_sparse(), False)
    load_safetensors(folder / "f", dict.fromkeys("ab", "2: R"), out=model, key_map={"b": None, "c": None})
    assert model.a is not model.b
    assert model.a.data_ptr() == model.b.data_ptr()
    assert torch.equal(model.b.detach(), full)
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    model.register_buffer("gone", freed if ranks.rank else torch.ones(1000), False)
    with pytest.raises(PlanError, match=r"uninitialized-buffer\] gone: on rank \d: a buffer whose storage was"):
        load_safetensors(folder / "f", dict.fromkeys("ab", "2: R"), out=model, key_map={"b": None, "c": None})


@pytest.mark.ranks(2)
def test_folders_of_many_writers_and_folders_that_are_not_complete(ranks: Ranks, tmp_path: Path) -> None:
    folder, full = Path(ranks.gather(str(tmp_path))[0]), torch.arange(24.0).view(12, 2)
    if ranks.rank == 0:
        for name in ("writers", "half", "both"):
            (folder / name).mkdir()
        for number, rows in enumerate(full.chunk(12)):  # rank_10 comes after rank_9, not after rank_1
            write(folder / "writers" / f"rank_{number}.safetensors", {"w": rows})
        write(folder / "half" / "model-00001-of-00002.safetensors", {"w": full})
        for name in ("model-00001-of-00001", "model"):
            write(folder / "both" / f"{name}.safetensors", {"w": full})
        (folder / "both" / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    ranks.gather(None)
    loaded = load_safetensors(folder / "writers", "2: S(0)", stored_as={"w": "12: S(0)"}, shapes={"w": (12, 2)})
    assert torch.equal(loaded["w"], full.chunk(2)[ranks.rank])
    with pytest.raises(PlanError, match=r"1 of 2 files model-\.\.\.-of-00002, and no index"):
        load_safetensors(folder / "half", "2: S(0)")
    with pytest.raises(PlanError, match="2 variants of the weights"):
        load_safetensors(folder / "both", "2: S(0)")
    for name in (INDEX, "model.safetensors"):
        assert torch.equal(load_safetensors(folder / "both" / name, "2: R")["w"], full)
    listed = [folder / "half" / "model-00001-of-00002.safetensors"]
    assert torch.equal(load_safetensors(listed, "2: R")["w"], full)
