"""On a CUDA rank that does not exist: no value is asked for, no device is mixed, no bare "cuda" is said."""

from __future__ import annotations

import pytest
import torch
from ranktest import fake_cuda, fake_mesh
from shard_reshard import (
    Part,
    Resharder,
    StateDictResharder,
    build_reshard_metadata,
    plan_reshard,
    redistribute,
    reshard,
    reshard_local_shard,
    reshuffle_local_shard,
)
from shard_spec.specs import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard

CASES = [
    ("2: S(0)", "2: S(1)", None),
    ("2: S(1)", "2: S(0)", None),
    ("2: S(0)", "2: R", None),
    ("2: P", "2: R", None),
    ("2: P(avg)", "2: S(0)", 4096),
    ("2: S(0)", "2: I(1,2)", 4096),
    ("rank 0", "2: S(0)", None),
    ("2: S(1)", "2: S(0) on ranks 1,0", None),
    ("2: S(0)", "2: P", None),
]


@pytest.mark.parametrize(("src", "dst", "limit"), CASES)
def test_every_acting_path(src: str, dst: str, limit: int | None) -> None:
    plan = plan_reshard((64, 32), torch.bfloat16, src, dst, max_workspace_bytes=limit)
    with fake_cuda(rank=1, world_size=2, strict=True) as device:
        resharder = Resharder(plan)
        shapes, outs = plan.src.local_shapes(1), plan.dst.local_shapes(1)
        local = torch.empty(shapes[0], dtype=torch.bfloat16, device=device) if shapes else None
        out = torch.empty(outs[0], dtype=torch.bfloat16, device=device)
        for _ in range(3):
            moved = resharder(local, out=out)
            assert moved.device == device
        assert resharder(local, out=out, async_op=True).wait().device == device
        fresh = resharder(local) if shapes else out
        assert fresh.device == device
        assert fresh.shape == outs[0]
        if shapes:
            handle = reshard(local, src, dst, shape=(64, 32), async_op=True, dtype=torch.float32)
            assert handle.wait().dtype == torch.float32
        backward = plan.transpose()  # what backward runs
        grads = torch.empty(backward.src.local_shapes(1)[0], dtype=torch.bfloat16, device=device)
        moved = Resharder(backward)(grads)
        assert moved is None if not shapes else moved.device == device


def test_replicas_that_pass_parts_on() -> None:
    plan = plan_reshard((512, 512), torch.float16, "4: P", "4: R")
    assert plan.uses_scatter_allgather
    with fake_cuda(rank=1, world_size=4, strict=True) as device:
        for _ in range(2):
            moved = Resharder(plan)(torch.empty(512, 512, dtype=torch.float16, device=device))
        assert moved.device == device


def test_dtensors_and_the_functions_of_torch() -> None:
    with fake_cuda(rank=1, world_size=2, strict=True) as device:
        mesh = fake_mesh((2,), ("x",))
        dtensor = DTensor.from_local(torch.empty(4, 6, device=device), mesh, (Shard(0),), run_check=False)
        for placements in ((Shard(1),), (Replicate(),)):
            assert redistribute(dtensor, mesh, placements).to_local().device == device
        rows, columns = (ChunkShardingSpec(dim, ["rank:1/cuda:1", "rank:0/cuda:0"]) for dim in (0, 1))
        turned = ChunkShardingSpec(0, ["rank:0/cuda:0", "rank:1/cuda:1"])
        metadata, ranks = build_reshard_metadata(torch.Size((8, 6)), rows, 2)
        assert (len(metadata), ranks) == (2, [1, 0])
        for mover, dst in ((reshard_local_shard, columns), (reshuffle_local_shard, turned)):
            shards, _ = mover(torch.empty(4, 6, device=device), torch.Size((8, 6)), rows, dst, None)
            assert [shard.tensor.device for shard in shards] == [device]


def test_state_dicts() -> None:
    # A fake group's other ranks have what this one has.
    layouts = {"q": "2: S(0)", "k": "2: S(0)", "norm": "2: R"}
    shapes = {"q": (8, 6), "k": (4, 6), "norm": (6,)}
    key_map = {"q": Part("qk"), "k": Part("qk", 8)}

    with fake_cuda(rank=1, world_size=2, strict=True) as device:
        sizes = {"q": (4, 6), "k": (2, 6), "norm": (6,)}
        state = {name: torch.empty(size, device=device) for name, size in sizes.items()}
        out = {"qk": torch.empty(12, 3, device=device), "norm": torch.empty(3, device=device)}
        for bucket_bytes in (1 << 20, 64):
            resharder = StateDictResharder(
                state, "2: S(-1)", src_layouts=layouts, shapes=shapes, key_map=key_map, bucket_bytes=bucket_bytes
            )
            for into in (None, out):
                for atomic in (True, False):
                    for _ in range(2):
                        moved = resharder(state, out=into, atomic=atomic)
                        assert [tensor.device for tensor in moved.values()] == [device, device]
                        work = resharder(state, out=into, atomic=atomic, async_op=True)
                        assert len(work.buckets) == (1 if bucket_bytes > 64 else 3)
                        devices = [value.device for bucket in work.buckets for value in bucket.wait().values()]
                        assert devices == [device, device]
                        assert work.wait().keys() == {"qk", "norm"}
