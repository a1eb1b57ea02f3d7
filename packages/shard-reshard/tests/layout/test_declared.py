"""Layouts that tensors declare themselves, and meshes whose process groups have another order."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shard_reshard import PlanError, StateDictResharder, redistribute, reshard, reshard_state_dict
from shard_spec import MeshSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

ordered_groups = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch 2.11 makes ascending groups only"
)


@pytest.mark.ranks(2)
def test_meshes_in_another_order_than_their_groups_are_refused_by_all(ranks: Ranks) -> None:
    turned, mesh = DeviceMesh("cpu", [1, 0]), ranks.mesh((2,), ("x",))
    unsorted = DTensor.from_local(torch.full((2, 4), float(ranks.rank)), turned, [Shard(0)])
    plain = DTensor.from_local(torch.full((2, 4), float(ranks.rank)), mesh, [Shard(0)])
    calls: dict[str, Callable[[], Any]] = {
        "reshard": lambda: reshard(unsorted, None, "rank 0"),
        "destination": lambda: reshard(plain, None, (turned, [Shard(1)])),
        "redistribute": lambda: redistribute(unsorted, mesh, [Shard(1)]),
        "state dict": lambda: reshard_state_dict({"w": unsorted}, "rank 0"),
        "layouts": lambda: reshard_state_dict({"w": plain}, (turned, [Shard(1)])),
        "out": lambda: reshard_state_dict({"w": plain}, out={"w": unsorted}),
        "resharder": lambda: StateDictResharder({"w": unsorted}, "rank 0"),
    }
    for name, call in calls.items():
        with pytest.raises(PlanError, match=r"ranks \[1, 0\] along the axis, \[0, 1\] in its process group"):
            call()
        assert unsorted.to_local().eq(ranks.rank).all(), name


@ordered_groups
@pytest.mark.ranks(2)
def test_a_mesh_that_equals_an_earlier_one_of_another_order_is_refused_by_all(ranks: Ranks) -> None:
    """Torch compares meshes by ranks and names: what was remembered for one is not what the other means."""
    ordered, turned = MeshSpec({"x": 2}, [1, 0]).to_device_mesh("cpu"), DeviceMesh("cpu", [1, 0], mesh_dim_names=("x",))
    assert ordered == turned
    mesh, local = ranks.mesh((2,), ("x",)), torch.full((2, 4), float(ranks.rank))
    right, wrong = (DTensor.from_local(local, where, [Shard(0)]) for where in (ordered, turned))
    plain = DTensor.from_local(local, mesh, [Shard(0)])
    fill, into = (DTensor.from_local(torch.zeros(4, 2), where, [Shard(1)]) for where in (ordered, turned))
    resharder = StateDictResharder({"w": right}, "2: R")
    calls: dict[str, Callable[[DeviceMesh, DTensor, DTensor], Any]] = {
        "redistribute": lambda where, source, out: redistribute(source, mesh, [Shard(1)]),
        "redistribute to": lambda where, source, out: redistribute(plain, where, [Shard(1)]),
        "reshard": lambda where, source, out: reshard(local, (where, [Shard(0)]), "2: R", shape=(4, 4)),
        "reshard to": lambda where, source, out: reshard(plain, None, (where, [Shard(1)])),
        "state dict": lambda where, source, out: reshard_state_dict({"w": source}, "2: R"),
        "src_layouts": lambda where, source, out: reshard_state_dict(
            {"w": local}, "2: R", src_layouts={"w": (where, [Shard(0)])}, shapes={"w": (4, 4)}
        ),
        "dst_layouts": lambda where, source, out: reshard_state_dict({"w": plain}, (where, [Shard(1)])),
        "a function": lambda where, source, out: reshard_state_dict(
            {"w": plain}, lambda name, shape: (where, [Shard(1)])
        ),
        "out": lambda where, source, out: reshard_state_dict({"w": plain}, out={"w": out}),
        "resharder": lambda where, source, out: resharder({"w": source}),
    }
    for name, call in calls.items():
        for _ in range(2):
            call(ordered, right, fill)
        with pytest.raises(PlanError, match=r"ranks \[1, 0\] along the axis, \[0, 1\] in its process group"):
            call(turned, wrong, into)
        assert not into.to_local().any(), name
    assert torch.equal(redistribute(right, mesh, [Replicate()]).to_local(), right.full_tensor())


@ordered_groups
@pytest.mark.ranks(4)
def test_meshes_whose_groups_have_their_order_are_moved_as_torch_gathers_them(ranks: Ranks) -> None:
    rng, compared = random.Random(5), 0
    flat = ranks.mesh((4,), ("x",))
    for shape in ((4,), (2, 2), (2, 2)):
        order = rng.sample(range(4), 4)
        mesh = MeshSpec({f"a{at}": size for at, size in enumerate(shape)}, order).to_device_mesh("cpu")
        local = torch.arange(6.0).view(2, 3) + 10 * ranks.rank
        source = DTensor.from_local(local, mesh, [Shard(0), *[Replicate()] * (len(shape) - 1)])
        moved = redistribute(source, flat, [Shard(1)]).full_tensor()
        if len(shape) == 1:  # replicas that differ have no one value
            assert torch.equal(moved, source.full_tensor())
            compared += 1
        sharded = DTensor.from_local(local, mesh, [Shard(at % 2) for at in range(len(shape))])
        assert torch.equal(redistribute(sharded, flat, [Shard(0)]).full_tensor(), sharded.full_tensor())
        compared += 1
    assert compared == 4
