"""A fake CUDA rank finds what a CPU test cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranktest import FakeCudaError, fake_cuda, fake_mesh
from ranktest import _torch_compat as compat
from torch.distributed.tensor import DTensor, Replicate, Shard

FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
    "copy to the CPU": lambda x: torch.empty(4, 4).copy_(x),
    "mixed devices": lambda x: x + torch.ones(4, 4),
    "mixed in cat": lambda x: torch.cat([x, torch.ones(4, 4)]),
    "bare cuda": lambda x: torch.ones(4, 4, device="cuda"),
    "bare cuda in to": lambda x: torch.ones(4, 4).to("cuda"),
    "cuda()": lambda x: torch.ones(4, 4).cuda(),
    "other rank's device": lambda x: torch.ones(4, 4, device="cuda:0"),
    "index 0 of cuda()": lambda x: torch.ones(4, 4).cuda(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    with fake_cuda(rank=1, world_size=2) as device:
        x = torch.ones(4, 4, device=device)
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|scalar_dense|nonzero"):
            FAULTS[fault](x)


@pytest.mark.parametrize("fault", ["pageable", "index"])
def test_strict_refuses_what_only_a_first_call_may_do(fault: str) -> None:
    def program(x: torch.Tensor) -> object:
        return torch.ones(2).to(x.device) if fault == "pageable" else x[torch.tensor([0, 1])]

    with fake_cuda() as device:
        program(torch.ones(4, device=device))
    with fake_cuda(strict=True) as device:
        x = torch.ones(4, device=device)
        with pytest.raises(FakeCudaError, match=r"pageable|CPU index"):
            program(x)


def test_good_program_passes() -> None:
    """Views, index assignment, copies, layers, collectives, meshes and DTensors, all on cuda:1."""
    with fake_cuda(rank=1, world_size=4) as device:
        assert device == torch.device("cuda:1")
        x = torch.rand(4, 4, device=device)
        x[0:2, 1].copy_(x[2:, 0])
        x[1, ..., None] = x[0, :, None]
        x[:, torch.zeros(2, dtype=torch.long, device=device)] = 0.0
        buffer = torch.empty(64, dtype=torch.uint8, device=device)
        buffer[:16].view(torch.float32).copy_(x.t().contiguous()[0])
        assert x[None, 1:3, ::2].shape == (1, 2, 2)
        assert torch.nn.Linear(4, 8, device=device)(x).device == device
        dist.all_reduce(x)
        out = torch.empty(16, 4, device=device)
        compat.all_gather_single(out, x, async_op=True).wait()
        dist.all_to_all_single(x, x, [1] * 4, [1] * 4)
        mesh = fake_mesh((2, 2), ("dp", "tp"))
        sharded = DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
        full = sharded.redistribute(placements=[Replicate()]).to_local()
        assert full.shape == (8, 4)
        assert full.device == device
        assert dist.get_rank() == 1
        assert not torch.is_grad_enabled()
    assert not dist.is_initialized()
    assert torch.ones(2)[0].item() == 1.0
    assert torch.Tensor.copy_ is torch._C.TensorBase.copy_


def test_leaves_nothing_behind_after_an_error() -> None:
    before = torch.Tensor.to
    with pytest.raises(ZeroDivisionError), fake_cuda():
        raise ZeroDivisionError
    assert torch.Tensor.to is before
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"), fake_cuda(rank=2):
        pass
