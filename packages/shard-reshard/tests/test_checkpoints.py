"""Files as layouts: safetensors headers and the metadata of distributed checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_pairs import as_listed
from ranktest import Ranks
from shard_reshard import PlanError, layouts_from_dcp, layouts_from_safetensors, plan_reshard, reshard, simulate
from torch.distributed.tensor import Shard, distribute_tensor


@pytest.mark.extra("safetensors")
def test_safetensors_files_to_a_mesh(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    first = {"a": torch.arange(12.0).view(3, 4).bfloat16(), "b": torch.arange(5)}
    save_file(first, tmp_path / "one.safetensors")
    save_file({"c": torch.randn(2, 6)}, tmp_path / "two.safetensors")
    stored = layouts_from_safetensors({0: tmp_path / "one.safetensors", 2: tmp_path / "two.safetensors"})
    assert sorted(stored) == ["a", "b", "c"]
    data = load_file(tmp_path / "one.safetensors") | load_file(tmp_path / "two.safetensors")
    for name, (shape, dtype, layout) in stored.items():
        plan = plan_reshard(shape, dtype, layout, "3: S(-1)")
        reader = 2 if name == "c" else 0
        moved = simulate(plan, [data[name] if rank == reader else None for rank in range(3)])
        parts = [as_listed(shard)[0] for shard in moved]
        assert torch.equal(torch.cat(parts, -1), data[name])
    with pytest.raises(PlanError, match="duplicate-name"):
        layouts_from_safetensors({0: tmp_path / "one.safetensors", 1: tmp_path / "one.safetensors"})
    (tmp_path / "bad").write_bytes(b"nothing here")
    with pytest.raises(PlanError, match="invalid-file"):
        layouts_from_safetensors({0: tmp_path / "bad"})


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
