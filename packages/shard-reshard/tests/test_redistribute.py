"""DTensor in, DTensor out: the values are DTensor's own, the bytes are the fewest."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shard_reshard import PlanError, redistribute
from shard_spec import MeshSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor


def _random_placements(rng: random.Random, ndim: int, axes: int) -> tuple[Placement, ...]:
    return tuple(rng.choice([Replicate(), Shard(rng.randrange(-ndim, ndim))]) for _ in range(axes))


@pytest.mark.ranks(4)
def test_any_mesh_to_any_mesh(ranks: Ranks) -> None:
    rng = random.Random(3)
    kind = ranks.device.type
    meshes = [
        ranks.mesh((4,), ("x",)),
        ranks.mesh((2, 2), ("x", "y")),
        DeviceMesh(kind, torch.tensor([1, 2, 3])),
    ]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # torch 2.11 makes ascending groups only
        meshes.append(MeshSpec({"x": 4}, [3, 1, 0, 2]).to_device_mesh(kind))  # its groups have its order
        meshes.append(MeshSpec({"x": 2, "y": 2}, [2, 3, 1, 0]).to_device_mesh(kind))
    compared = 0
    for _ in range(80):
        shape = (rng.choice([1, 3, 4, 8, 9]), rng.choice([2, 5, 8]))
        full = torch.arange(float(shape[0] * shape[1]), device=ranks.device).view(shape)
        src, dst = rng.choice(meshes), rng.choice(meshes)
        # No scatter: torch's sends by ranks of groups, which it sorts, and mixes up meshes in another order.
        dtensor = distribute_tensor(full, src, _random_placements(rng, 2, src.ndim), src_data_rank=None)
        placements = _random_placements(rng, 2, dst.ndim)
        if src.ndim == dst.ndim == 1 and src.size() == dst.size() == 3:
            continue  # the fourth rank has nothing to do with it
        with ranks.delayed():
            moved = redistribute(dtensor, dst, placements)
        expected = distribute_tensor(full, dst, placements, src_data_rank=None)
        assert moved.device_mesh == dst
        assert moved.shape == full.shape
        assert moved.placements == expected.placements
        assert torch.equal(moved.to_local(), expected.to_local())
        compared += moved.to_local().numel()
    assert sum(ranks.gather(compared)) > 3000


@pytest.mark.ranks(4)
def test_two_axes_change_in_one_exchange(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("x", "y"))
    full = torch.arange(64.0, device=ranks.device).view(8, 8)
    dtensor = distribute_tensor(full, mesh, (Shard(0), Shard(1)))
    redistribute(dtensor, mesh, (Shard(1), Shard(0)))  # the check between ranks
    with ranks.record() as log:
        moved = redistribute(dtensor, mesh, (Shard(1), Shard(0)))
    assert list(log.ops) == ["all_to_all"]
    sent = sum(ranks.gather(log.bytes_sent()))
    assert sent == 2 * 16 * 4  # ranks 1 and 2 swap their quarters; ranks 0 and 3 keep theirs
    assert torch.equal(moved.full_tensor(), full)


@pytest.mark.ranks(4)
def test_partial_sums_and_gradients_as_dtensor_has_them(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("x", "y"))
    cases: list[tuple[tuple[Placement, ...], tuple[Placement, ...]]] = [
        ((Partial(), Shard(0)), (Shard(0), Shard(1))),
        ((Partial("avg"), Replicate()), (Shard(1), Shard(0))),
        ((Shard(0), Replicate()), (Replicate(), Shard(0))),
        ((Shard(1), Shard(1)), (Replicate(), Replicate())),
    ]
    for src, dst in cases:
        local = torch.arange(32.0, device=ranks.device).view(4, 8) + ranks.rank
        results = []
        for move in (lambda t, d: t.redistribute(mesh, d), lambda t, d: redistribute(t, mesh, d)):
            leaf = local.clone().requires_grad_()
            dtensor = DTensor.from_local(leaf, mesh, src, run_check=False)
            moved = move(dtensor, dst)
            (moved * moved).sum().backward()
            assert leaf.grad is not None
            results.append((moved.to_local().detach(), leaf.grad))
        if not any(isinstance(p, Partial) and p.reduce_op == "avg" for p in src):
            assert torch.equal(results[0][1], results[1][1]), (src, dst)
        else:  # DTensor hands the gradient of an average out undivided
            assert torch.equal(results[0][1] / 2, results[1][1])
        assert torch.equal(results[0][0], results[1][0]), (src, dst)


@pytest.mark.ranks(4)
def test_meshes_outside_of_every_group_say_what_to_do(ranks: Ranks) -> None:
    mesh = DeviceMesh(ranks.device.type, torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("x", "y"))["y"]
    dtensor = distribute_tensor(torch.arange(8.0, device=ranks.device), mesh, (Shard(0),))
    moved = redistribute(dtensor, mesh, (Replicate(),))  # the sub-mesh's own group
    assert torch.equal(moved.to_local(), torch.arange(8.0, device=ranks.device))
    with pytest.raises(PlanError, match="dim-out-of-range"):
        redistribute(dtensor, mesh, (Shard(3),))
