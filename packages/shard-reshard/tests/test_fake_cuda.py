"""On a CUDA rank that does not exist: no value is asked for, no device is mixed, no bare "cuda" is said."""

from __future__ import annotations

import pytest
import torch
from ranktest import fake_cuda
from shard_reshard import Resharder, plan_reshard, reshard

CASES = [
    ("2: S(0)", "2: S(1)", None),
    ("2: S(1)", "2: S(0)", None),
    ("2: S(0)", "2: R", None),
    ("2: P", "2: R", None),
    ("2: P(avg)", "2: S(0)", 4096),
    ("2: S(0)", "2: I(1,2)", 4096),
    ("rank 0", "2: S(0)", None),
]


@pytest.mark.parametrize(("src", "dst", "limit"), CASES)
def test_every_acting_path(src: str, dst: str, limit: int | None) -> None:
    plan = plan_reshard((64, 32), torch.bfloat16, src, dst, max_workspace_bytes=limit)
    with fake_cuda(rank=1, world_size=2, strict=True) as device:
        resharder = Resharder(plan)
        shapes, outs = plan.src.local_shapes(1), plan.dst.local_shapes(1)
        local = torch.empty(shapes[0], dtype=torch.bfloat16, device=device) if shapes else None
        out = torch.empty(outs[0], dtype=torch.bfloat16, device=device)
        for _ in range(2):
            moved = resharder(local, out=out)
            assert moved.device == device
        fresh = resharder(local) if shapes else out
        assert fresh.device == device
        assert fresh.shape == outs[0]
        if shapes:
            handle = reshard(local, src, dst, shape=(64, 32), async_op=True, dtype=torch.float32)
            assert handle.wait().dtype == torch.float32
