"""Files as layouts: safetensors headers and the metadata of distributed checkpoints."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, layouts_from_dcp, reshard
from torch.distributed.tensor import Shard, distribute_tensor


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.ranks(2)
def test_a_distributed_checkpoint_knows_its_layout(ranks: Ranks, tmp_path: Path) -> None:
    import torch.distributed.checkpoint.state_dict_saver as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    folder = ranks.gather(str(tmp_path))[0]
    full = torch.arange(35.0).view(7, 5)
    state = {"w": distribute_tensor(full, ranks.mesh((2,), ("x",)), (Shard(0),))}
    dcp.save(state, checkpoint_id=folder)
    stored = layouts_from_dcp(FileSystemReader(folder).read_metadata())
    shape, dtype, layout = stored["w"]
    assert (shape, dtype) == ((7, 5), "float32")
    moved = reshard(state["w"].to_local(), layout, "2: S(1)")
    assert torch.equal(moved, full.chunk(2, 1)[ranks.rank])


FAULTS: dict[str, Any] = {
    "a missing file": lambda path: path.unlink(),
    "a file cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "an empty file": lambda path: os.truncate(path, 0),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.ranks(2)
def test_a_checkpoint_that_fails_on_one_rank_fails_on_all_and_the_group_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    import torch.distributed.checkpoint.state_dict_loader as loader
    import torch.distributed.checkpoint.state_dict_saver as saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    folder, full = ranks.gather(str(tmp_path))[0], torch.arange(35.0).view(7, 5)
    mesh = ranks.mesh((2,), ("x",))

    def state() -> dict[str, Any]:
        return {"w": distribute_tensor(full, mesh, (Shard(0),)), "v": distribute_tensor(full + 1, mesh, (Shard(1),))}

    def group_goes_on() -> None:
        moved = reshard(full.chunk(2, 1)[ranks.rank].contiguous(), "2: S(1)", "rank 1", shape=(7, 5))
        assert torch.equal(moved, full) if ranks.rank else moved is None

    class Failing(FileSystemWriter):
        def write_data(self, *given: Any) -> Any:
            if ranks.rank:
                raise OSError("no space left on device")
            return super().write_data(*given)

    with pytest.raises(CheckpointException, match="no space left"):
        saver.save(state(), storage_writer=Failing(f"{folder}/failed"))
    assert not Path(f"{folder}/failed/.metadata").exists()
    group_goes_on()
    refused = 0
    for what, fault in FAULTS.items():
        saver.save(state(), checkpoint_id=f"{folder}/{what}")
        stored = layouts_from_dcp(FileSystemReader(f"{folder}/{what}").read_metadata())
        ranks.gather(0)
        if not ranks.rank:
            fault(Path(f"{folder}/{what}/__1_0.distcp"))
        ranks.gather(0)
        with pytest.raises(CheckpointException):
            loader.load(state(), checkpoint_id=f"{folder}/{what}")
        group_goes_on()
        # The layouts of two checkpoints, one a rank: found before anything moves.
        layout = stored["w" if ranks.rank else "v"].layout
        with pytest.raises(PlanError):
            reshard(state()["w"].to_local(), layout, "2: S(1)", check="always")
        group_goes_on()
        refused += 1
    assert refused == len(FAULTS)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_metadata_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint.state_dict_saver as saver
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saver.save({"w": torch.ones(4, 3)}, checkpoint_id=str(tmp_path), no_dist=True)
    good = FileSystemReader(str(tmp_path)).read_metadata()
    assert layouts_from_dcp(good)["w"].shape == (4, 3)
    (index,) = good.storage_data
    chunk = good.state_dict_metadata["w"].chunks[0]  # type: ignore[union-attr]  # of a tensor
    changes: dict[str, Any] = {
        "unknown-chunk": lambda bad: bad.state_dict_metadata["w"].chunks.clear(),
        "invalid-file": lambda bad: setattr(bad.storage_data[index], "relative_path", "elsewhere"),
        "boxes-incomplete": lambda bad: setattr(bad.state_dict_metadata["w"], "size", torch.Size((9, 3))),
        "box-out-of-range": lambda bad: setattr(bad.state_dict_metadata["w"], "size", torch.Size((2, 3))),
    }
    for code, change in changes.items():
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(PlanError, match=code):
            layouts_from_dcp(bad)
    del good.state_dict_metadata["w"]
    with pytest.raises(PlanError, match="unknown-chunk"):
        layouts_from_dcp(good)
    assert tuple(chunk.sizes) == (4, 3)
