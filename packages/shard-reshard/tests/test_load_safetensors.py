"""Safetensors files into layouts: the right data, each byte read once, headers that lie found out."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_pairs import as_listed, local_tensors, random_layout, random_shape
from ranktest import Ranks
from shard_reshard import (
    Part,
    PlanError,
    Progress,
    load_safetensors,
    plan_reshard,
    simulate,
)
from shard_reshard._shared.dtypes import SAFETENSORS
from shard_reshard.checkpoint.load import _read_boxes
from shard_reshard.checkpoint.plan import LoadPlan, plan_load, stored_tensors
from shard_reshard.checkpoint.safetensors import FileState, FileTable, file_state, file_table
from shard_reshard.layout.boxes import BoxShardMap
from shard_spec import Box, InterleavedShard, Layout, MeshSpec
from stored_files import file_bytes, write
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

pytestmark = pytest.mark.extra("safetensors")
NUM_PAIRS = 150
CPU = torch.device("cpu")


def _ranges(plan: LoadPlan) -> list[tuple[str, int, int]]:
    """Every range that any rank reads."""
    return sorted(
        (read.path, read.offset, read.offset + read.num_bytes)
        for table in plan.reads
        for reads in table.values()
        for read in reads
    )


def _loaded(plan: LoadPlan, world_size: int) -> dict[str, list[list[torch.Tensor]]]:
    """Reads and moves for all ranks in this process."""
    return {
        move.target: [
            as_listed(moved)
            for moved in simulate(
                move.plan, [_read_boxes(plan.reads[rank].get(move.source, ()), CPU) for rank in range(world_size)]
            )
        ]
        for move in plan.moves.moves
    }


@pytest.mark.parametrize("smallest", [1, 64 * 1024])
def test_files_of_any_layout_to_any_layout(tmp_path: Path, smallest: int) -> None:
    # Small tensors are read whole by one rank; with a limit of one byte their rows are shared out.
    rng = random.Random(smallest)
    compared = read_bytes = shared = 0
    for number in range(NUM_PAIRS):
        world_size, shape = rng.randint(1, 4), random_shape(rng)
        src, dst = random_layout(rng, shape, world_size), random_layout(rng, shape, world_size)
        if isinstance(src, BoxShardMap):
            src = BoxShardMap(shape, {rank: boxes[:1] for rank, boxes in src.boxes.items()}) if _one_each(src) else src
            if not _one_each(src):
                continue
        full = torch.randint(-1000, 1000, shape, dtype=torch.int16)
        empty = file_table(write(tmp_path / "empty", {}))
        files = [empty] * (max(src.ranks) + 1)
        for rank in src.ranks:
            (local,) = local_tensors(src, rank, full) or [full]
            path = write(tmp_path / f"{number}-{rank}", {"w": local})
            files[rank] = file_table(path)
        stored = stored_tensors(files, {"w": src}, {"w": shape})
        plan = plan_load(stored, {"w": dst}, world_size, smallest_read_bytes=smallest)
        loaded = _loaded(plan, world_size)["w"]
        for rank in range(world_size):
            for tensor, expected in zip(loaded[rank], local_tensors(dst, rank, full), strict=True):
                assert torch.equal(tensor, expected), (src, dst)
                compared += tensor.numel()
        ranges = _ranges(plan)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges))
        assert sum(stop - start for _, start, stop in ranges) == 2 * full.numel()  # every byte once
        assert plan.moves.wire_bytes == plan.moves.lower_bound
        read_bytes += 2 * full.numel()
        shared += sum(bool(table) for table in plan.reads) > 1
    assert compared > 1_000
    assert read_bytes > 1_000
    assert shared > 20


def _one_each(layout: BoxShardMap) -> bool:
    return all(len(boxes) == 1 for boxes in layout.boxes.values())


def test_what_a_rank_wants_alone_it_reads_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"w": torch.arange(4096.0 * 32).view(4096, 32)})
    stored = stored_tensors([file_table(path)], {}, {})
    rows = plan_load(stored, {"w": "4: S(0)"}, 4)
    assert rows.moves.wire_bytes == 0
    assert [rows.read_bytes(rank) for rank in range(4)] == [4096 * 32] * 4
    replicas = plan_load(stored, {"w": "2x2: R, S(0)"}, 4)  # each half is wanted by two ranks, which share it out
    assert [replicas.read_bytes(rank) for rank in range(4)] == [4096 * 32] * 4
    assert replicas.moves.wire_bytes == replicas.moves.lower_bound == 4096 * 32 * 4
    columns = plan_load(stored, {"w": "2: S(1) on ranks 2..3"}, 4)
    assert [columns.read_bytes(rank) for rank in range(4)] == [0, 0, 4096 * 64, 4096 * 64]
    assert "rank 2 reads 256 KiB in 1 ranges of 1 files" in columns.explain()
    assert columns.digest != rows.digest


def test_every_dtype(tmp_path: Path) -> None:
    for name in sorted(set(SAFETENSORS.values())):
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
        path = write(tmp_path / name, {"w": raw.view(dtype)})
        stored = stored_tensors([file_table(path)], {}, {})
        plan = plan_load(stored, {"w": "2: S(1)"}, 2)
        for loaded, expected in zip(_loaded(plan, 2)["w"], raw.chunk(2, 1), strict=True):
            assert loaded[0].dtype == dtype
            assert torch.equal(loaded[0].contiguous().view(torch.uint8), expected), name


@pytest.mark.extra("safetensors")
def test_what_the_library_writes_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {"a": torch.arange(12.0).view(3, 4).bfloat16(), "b": torch.arange(5), "c": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    stored = stored_tensors([file_table(tmp_path / "theirs")], {}, {})
    loaded = _loaded(plan_load(stored, "rank 0", 1), 1)
    assert sorted(loaded) == ["a", "b", "c"]
    by_library = load_file(write(tmp_path / "ours", tensors))
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name][0][0], tensor)
        assert torch.equal(by_library[name], tensor)


BAD: dict[str, bytes] = {
    "empty": b"",
    "short": b"\1\0\0",
    "a header longer than the file": (10**6).to_bytes(8, "little") + b"{}",
    "a header longer than memory": (2**63).to_bytes(8, "little") + b"{}",
    "not JSON": b"\2\0\0\0\0\0\0\0{]",
    "deep": (9000).to_bytes(8, "little") + b'{"a":' + b"[" * 8995,
}
_LIES: dict[str, dict[str, Any]] = {
    "past the end": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "backwards": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    "negative": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
    "an overflow": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]},
    "another size": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
    "a bool": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
    "a fraction": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
    "a gap": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
}


def _lying(about: Mapping[str, Any]) -> bytes:
    import json

    text = json.dumps({"w": about}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize("what", [*BAD, *_LIES, "a name twice"])
def test_headers_that_lie_are_refused(tmp_path: Path, what: str) -> None:
    twice = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    data = BAD.get(what) or (
        _lying(_LIES[what]) if what in _LIES else len(twice).to_bytes(8, "little") + twice + b"1234"
    )
    (tmp_path / "f").write_bytes(data if what != "empty" else b"")
    with pytest.raises(PlanError, match="invalid-file"):
        file_table(tmp_path / "f")


@pytest.mark.extra("hypothesis", "safetensors")
def test_no_file_does_more_than_be_refused(tmp_path: Path) -> None:
    # 60 examples here; benchmarks/grids.py runs 20,000, see docs/benchmarks/shard-reshard-grids.md.
    from broken_files import broken_files, check_one
    from hypothesis import HealthCheck, given, settings

    accepted = []

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(broken_files())
    def check(data: bytes) -> None:
        accepted.append(check_one(data, tmp_path / "f"))

    check()
    assert len(accepted) >= 60
    assert any(accepted)
    assert not all(accepted)


def test_no_pickle() -> None:
    import shard_reshard.checkpoint.safetensors as module

    text = Path(module.__file__).read_text()
    assert not any(word in text for word in ("pickle", "eval(", "exec(", "torch.load"))
    assert sys.byteorder == "little"


# ---- on ranks -------------------------------------------------------------------------------------------------


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"q": (128, 96), "k": (64, 96), "v": (64, 96), "o": (96, 128), "norm": (96,), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _layout(name: str, shape: tuple[int, ...]) -> Layout | str:
    serving = MeshSpec({"tp": 4})
    if name == "qkv":
        return Layout(serving, [InterleavedShard(0, (128, 64, 64))])
    return "4: S(1)" if name == "o" else "4: R"


KEYS = {"q": Part("qkv"), "k": Part("qkv", 128), "v": Part("qkv", 192)}


@pytest.mark.ranks(4)
def test_from_two_writers_to_four_readers(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    full = _tensors()
    matrices = [name for name, tensor in full.items() if tensor.dim() == 2]
    if ranks.rank == 0:  # what two ranks wrote: rows of matrices each, the rest by one of them
        for writer in (0, 1):
            rows = {name: full[name].chunk(2)[writer] for name in matrices}
            write(folder / f"{writer}.safetensors", rows if writer else rows | {n: full[n] for n in ("norm", "scale")})
    ranks.gather(None)
    ranges: list[tuple[str, int, int]] = []

    def counted(path: str, num_bytes: int, offset: int, *rest: Any) -> torch.Tensor:
        from shard_reshard.checkpoint.safetensors import read_rows

        tensor = read_rows(path, num_bytes, offset, *rest)
        ranges.append((path, offset, offset + tensor.numel() * tensor.element_size()))
        return tensor

    monkeypatch.setattr("shard_reshard.checkpoint.load.read_rows", counted)
    stored_as = dict.fromkeys(matrices, "2: S(0)")
    shapes = {name: tuple(full[name].shape) for name in matrices}
    with ranks.record() as log, ranks.delayed():
        loaded = load_safetensors(
            folder, _layout, stored_as=stored_as, shapes=shapes, key_map=KEYS, bucket_bytes=96 * 1024
        )
    heads = torch.cat([full[name].chunk(4)[ranks.rank] for name in "qkv"])
    assert torch.equal(loaded["qkv"], heads)
    assert torch.equal(loaded["o"], full["o"].chunk(4, 1)[ranks.rank])
    assert torch.equal(loaded["norm"], full["norm"])
    assert torch.equal(loaded["scale"], full["scale"])
    # Every byte of the files' data is read once, by one rank.
    everyone = sorted(entry for entries in ranks.gather(ranges) for entry in entries)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(everyone))
    total = sum(stop - start for _, start, stop in everyone)
    assert total == sum(4 * tensor.numel() for tensor in full.values())
    assert loaded.read_bytes == sum(stop - start for _, start, stop in ranges) < total
    # What the exchanges sent is the fewest bytes.
    sent = sum(sum(event.bytes_sent) for event in log.events if event.op == "all_to_all")
    assert sum(ranks.gather(sent)) == loaded.plan.moves.wire_bytes == loaded.plan.moves.lower_bound
    assert len(loaded.plan.moves.buckets) > 1


@pytest.mark.ranks(2)
def test_files_of_two_ranks_into_a_live_module(ranks: Ranks, tmp_path: Path) -> None:
    full = torch.arange(48.0).view(6, 8)
    name = f"only-on-{ranks.rank}"
    write(tmp_path / name, {"weight": full.chunk(2)[ranks.rank], f"unread{ranks.rank}": torch.ones(3)})
    files = ranks.gather(str(tmp_path / name))
    model = nn.Linear(8, 6, bias=False).to(torch.bfloat16)
    loaded = load_safetensors(
        files,
        stored_as={"weight": "2: S(0)"},
        shapes={"weight": (6, 8)},
        out=model,
        key_map={"unread0": None, "unread1": None},
    )
    assert torch.equal(model.weight.detach(), full.bfloat16())
    assert sum(ranks.gather(loaded.read_bytes)) == 48 * 4


@pytest.mark.ranks(2)
def test_problems_come_to_all_ranks_alike(ranks: Ranks, tmp_path: Path) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    tensors = {"w": torch.arange(12.0).view(3, 4)}
    if ranks.rank == 0:
        write(folder / "good", tensors)
        (folder / "cut").write_bytes(file_bytes(tensors)[:-1])
    ranks.gather(None)
    out = {"w": torch.zeros(3, 4), "more": torch.ones(2)}
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("invalid-file", lambda: load_safetensors([folder / "cut"], "2: R")),
        ("wrong-type", lambda: load_safetensors({0: folder / "good"}, "2: R")),  # type: ignore[arg-type]
        ("invalid-file", lambda: load_safetensors([folder / "good", folder / "none"], "2: R")),
        ("duplicate-name", lambda: load_safetensors([folder / "good", folder / "good"], "2: R")),
        (
            "missing-tensor",
            lambda: load_safetensors([folder / "good"], "2: R", stored_as={"w": "2: S(0)"}, shapes={"w": (6, 4)}),
        ),
        (
            "shape-mismatch",
            lambda: load_safetensors([folder / "good"], "2: R", stored_as={"w": "2: S(0)"}, shapes={"w": (5, 5)}),
        ),
        (
            "partial-value",
            lambda: load_safetensors([folder / "good"], "2: R", stored_as={"w": "2: P"}, shapes={"w": (3, 4)}),
        ),
        ("unknown-name", lambda: load_safetensors([folder / "good"], "2: R", stored_as={"x": "2: R"})),
        ("rank-outside-mesh", lambda: load_safetensors([folder / "good"], "4: S(0)")),
        ("rank-outside-mesh", lambda: load_safetensors([folder / "good"], {"w": "2: S(1) on ranks 5,7"})),
        ("ranks-disagree", lambda: load_safetensors([folder / "good"], "2: S(0)" if ranks.rank else "2: S(1)")),
        ("missing-source", lambda: load_safetensors([folder / "good"], out=out)),
        ("did you mean 'w'", lambda: load_safetensors([folder / "good"], {"w": "2: R", "ww": "2: R"})),
        # A module's get memory; a mapping stayed as it was, and was said to be of the new version.
        ("no-data", lambda: load_safetensors([folder / "good"], out={"w": torch.zeros(3, 4, device="meta")})),
    ]
    for code, call in calls:
        with pytest.raises(PlanError, match=code) as caught:
            call()
        assert len(set(ranks.gather(str(caught.value)))) == 1
    assert torch.equal(out["w"], torch.zeros(3, 4))
    load_safetensors([folder / "good"], "2: R", out=out, strict=False)
    assert torch.equal(out["w"], tensors["w"])


@pytest.mark.ranks(2)
def test_a_file_that_changes_meanwhile(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 1 finds the file shorter than its header said; both raise, and the module keeps what it had. The tensor is
    # large enough that rank 1 reads a row of it.
    folder = Path(ranks.gather(str(tmp_path))[0])
    if ranks.rank == 0:
        write(folder / "f", {"w": torch.zeros(3, 2**14)})
    ranks.gather(None)
    if ranks.rank == 1:
        from shard_reshard.checkpoint import safetensors as safetensors_files

        def shortened(path: str, num_bytes: int, *rest: Any) -> torch.Tensor:
            return safetensors_files.read_rows(path, num_bytes + 1, *rest)

        monkeypatch.setattr("shard_reshard.checkpoint.load.read_rows", shortened)
    model = nn.Linear(2**14, 3, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(PlanError, match="file-changed") as caught:
        load_safetensors([folder / "f"], {"weight": "2: R"}, out=model, key_map={"w": "weight"})
    assert len(set(ranks.gather(str(caught.value)))) == 1
    assert torch.equal(model.weight.detach(), before)


@pytest.mark.ranks(2)
def test_what_out_declares_is_compared_with_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Their local shapes are equal: a partial tensor came out doubled, and rows went to other ranks."""
    folder, mesh = Path(ranks.gather(str(tmp_path))[0]), ranks.mesh((2,), ("tp",))
    full = torch.arange(48.0).view(8, 6)
    if ranks.rank == 0:
        write(folder / "f", {"w": full})
    ranks.gather(None)
    partial = DTensor.from_local(torch.zeros(8, 6), mesh, [Partial()], run_check=False)
    fused = nn.Parameter(torch.zeros(4, 6))
    fused._sharding_info = (mesh, (Shard(0),), (8, 6), (6, 1), ((4, 1, 1), (4, 1, 1)))  # type: ignore[attr-defined]
    for out, layout in ((partial, "2: R"), (fused, "2: S(0)")):
        with pytest.raises(PlanError, match="layout-mismatch"):
            load_safetensors(folder / "f", layout, out={"w": out})
    assert not torch.cat([partial.to_local(), fused.detach()]).any()
    load_safetensors(folder / "f", out={"w": fused})
    assert torch.equal(fused.detach(), full[[0, 1, 4, 5] if ranks.rank == 0 else [2, 3, 6, 7]])


@pytest.mark.ranks(2)
def test_rows_that_nobody_wants(ranks: Ranks, tmp_path: Path) -> None:
    folder, full = Path(ranks.gather(str(tmp_path))[0]), torch.arange(96.0).view(12, 8)
    if ranks.rank == 0:
        write(folder / "f", {"w": full})
    ranks.gather(None)
    for dim, columns in ((0, 8), (1, 12)):
        part = Part("h", dim=dim, source_start=2, size=4)
        loaded = load_safetensors(folder / "f", "2: S(0)", key_map={"w": part})
        expected = full.narrow(dim, 2, 4).chunk(2)[ranks.rank]
        assert torch.equal(loaded["h"], expected)
        assert sum(ranks.gather(loaded.read_bytes)) == 4 * 4 * columns if dim == 0 else 4 * full.numel()
    holes = BoxShardMap((12, 8), {0: [Box((1, 0), (2, 8))], 1: [Box((7, 0), (3, 8))]}, holes=True)
    loaded = load_safetensors(folder / "f", {"w": holes})
    assert torch.equal(loaded["w"], full[1:3] if ranks.rank == 0 else full[7:10])
    gap = BoxShardMap((12, 8), {0: [Box((0, 0), (5, 8))], 1: [Box((6, 0), (6, 8))]}, holes=True)
    with pytest.raises(PlanError, match="boxes-incomplete"):
        plan_reshard((12, 8), "float32", gap, "2: S(0)")
    assert plan_reshard((12, 8), "float32", gap, gap).wire_bytes == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("atomic", [True, False])
def test_what_happens_to_one_rank_or_file_in_the_middle(ranks: Ranks, tmp_path: Path, atomic: bool) -> None:
    folder = Path(ranks.gather(str(tmp_path))[0])
    old = {f"t{at}": torch.full((64, 4), float(at)) for at in range(6)}
    for name in ("f", "new"):
        if ranks.rank == 0:
            write(folder / name, old if name == "f" else {key: -value for key, value in old.items()})
        ranks.gather(None)

    def replace(progress: Progress) -> None:
        if progress.done == 2 and ranks.rank == 0:  # by a file of the same length
            (folder / "new").replace(folder / "f")

    out = {name: torch.full((32, 4), 9.0) for name in old}
    options: dict[str, Any] = {"bucket_bytes": 1500, "atomic": atomic}
    state = "out stays as it was" if atomic else "out is filled in part"
    with pytest.raises(PlanError, match=rf"{state}[^\0]*file-changed") as caught:
        load_safetensors(folder / "f", "2: S(0)", out=out, progress=replace, **options)
    assert len(set(ranks.gather(str(caught.value)))) == 1
    assert all(bool((value == 9).all()) for value in out.values()) == atomic

    def failing(progress: Progress) -> None:
        if ranks.rank == 1:
            raise RuntimeError("not drawn")

    with pytest.raises(RuntimeError, match="not drawn") if ranks.rank else nullcontext():
        load_safetensors(folder / "f", "2: S(0)", out=out, progress=failing, **options)
    assert torch.equal(out["t5"], torch.full((32, 4), -5.0))
    with pytest.raises(PlanError, match=r"null (byte|character)"):
        load_safetensors([folder / "f", "f\0" if ranks.rank else "g"], "2: R")


@pytest.mark.ranks(2)
def test_a_file_of_which_one_rank_saw_another_one(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads the header, then the file is replaced by one of the same length, which rank 1 sees and reads."""
    folder = Path(ranks.gather(str(tmp_path))[0])
    if ranks.rank == 0:
        write(folder / "f", {"a": torch.zeros(4, 4), "b": torch.ones(4, 4)})
        write(folder / "new", {"b": torch.ones(4, 4), "a": torch.zeros(4, 4)})
    ranks.gather(None)

    def read_first(path: str) -> FileTable:
        table = file_table(path)
        (folder / "new").replace(folder / "f")
        return table

    def look_later(path: str) -> FileState | None:
        while (folder / "new").exists():
            time.sleep(0.01)
        return file_state(path)

    name, late = ("file_table", read_first) if ranks.rank == 0 else ("file_state", look_later)
    monkeypatch.setattr(f"shard_reshard.checkpoint.load.{name}", late)
    with pytest.raises(PlanError, match="file-changed"):
        load_safetensors(folder / "f", "rank 1")
