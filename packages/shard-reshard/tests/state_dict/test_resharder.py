"""Declared layouts, ties, functions and plain tensors in state dicts that come again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from shard_reshard import (
    Part,
    PlanError,
    StateDictResharder,
    reshard,
    reshard_state_dict,
)
from shard_spec import MeshSpec

ordered_groups = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch 2.11 makes ascending groups only"
)
FULL = torch.arange(1.0, 17).view(4, 4)
ROWS: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (4, 4)}}


def refused(code: str, call: Callable[[], object]) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert {problem.code for problem in caught.value.problems} == {code}


@ordered_groups
@pytest.mark.ranks(2)
def test_state_dicts_that_say_something_else(ranks: Ranks) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    full = FULL.to(ranks.device)
    rows, columns = full.chunk(2)[ranks.rank], full.chunk(2, 1)
    mesh, turned = (MeshSpec({"x": 2}, order).to_device_mesh(ranks.device.type) for order in ([0, 1], [1, 0]))

    # A plan was found again under the id of a function that had been freed, and under a mesh of other ranks.
    for place in (0, 1, 0):
        layouts = (lambda text: lambda name, shape: text)(f"2: S(1) on ranks {place},{1 - place}")
        assert torch.equal(reshard_state_dict({"w": rows}, layouts, **ROWS)["w"], columns[(ranks.rank + place) % 2])
        where = (mesh, turned)[place]
        moved = reshard_state_dict({"w": rows}, (where, [Shard(1)]), **ROWS)["w"].to_local()
        assert torch.equal(moved, columns[(ranks.rank + place) % 2])

    # Plain tensors are compared in every call, not in the first alone.
    plain = torch.ones(9, device=ranks.device)
    resharder = StateDictResharder({"b": plain}, "2: S(0) on ranks 1,0")
    for _ in range(2):
        resharder({"b": plain})
        assert reshard_state_dict({"b": plain}, "rank 1").keys() == ({"b"} if ranks.rank == 1 else set())
    drifted = {"b": plain + ranks.rank}
    refused("missing-argument", lambda: resharder(drifted))
    refused("missing-argument", lambda: reshard_state_dict(drifted, "rank 1"))
    assert resharder({"b": plain})["b"].numel() == 4 + ranks.rank

    # Answers of a function, and lists, are those of the call.
    class Policy:
        layout = "2: S(1)"

        def of(self, name: str, shape: tuple[int, ...]) -> str:
            return self.layout

    policy, key_map, shapes = Policy(), {"w": [Part("w")]}, {"w": [4, 4]}
    for at, layout in enumerate(("2: S(1)", "2: R", "2: R", "2: S(1)")):
        policy.layout = layout
        if at == 2:
            key_map["w"].append(Part("v"))
        options = {"src_layouts": ROWS["src_layouts"], "shapes": shapes, "key_map": key_map}
        moved = reshard_state_dict({"w": rows}, policy.of, **options)
        assert moved.keys() == ({"w"} if at < 2 else {"w", "v"})
        assert all(torch.equal(value, full if layout == "2: R" else columns[ranks.rank]) for value in moved.values())
    names = []

    def raising(name: str, shape: tuple[int, ...]) -> str:
        names.append(name)
        if ranks.rank == 1 and len(names) == 2:
            raise KeyError(name)
        return "2: R"

    reshard_state_dict({"w": rows}, raising, **ROWS)
    assert len(names) == 1  # planning and results go by one answer
    refused("rank-failed", lambda: reshard_state_dict({"w": rows}, raising, **ROWS))
    shapes["w"][0] = 6
    refused("shape-mismatch", lambda: reshard_state_dict({"w": rows}, policy.of, **options))

    # A later source of equal metadata whose memory is gone.
    resharder, freed = StateDictResharder({"w": rows}, "2: S(1)", **ROWS), rows.clone()
    resharder({"w": rows})
    if ranks.rank == 1:
        freed.untyped_storage().resize_(8)
    refused("no-data", lambda: resharder({"w": freed}))
    assert torch.equal(resharder({"w": rows})["w"], columns[ranks.rank])

    # Two stretches of one tied tensor are not tied; a tensor that is tied no more is another tensor.
    tied: dict[str, Any] = {"src_layouts": dict.fromkeys("ab", "2: S(0)"), "shapes": dict.fromkeys("ab", (4, 4))}
    halves: dict[str, Any] = {
        "a": [Part("x", size=2), Part("y", source_start=2)],
        "b": Part("z", source_start=1, size=2),
    }
    moved = reshard_state_dict({"a": rows, "b": rows}, "2: R", key_map=halves, **tied)
    assert all(torch.equal(moved[name], full[at : at + 2]) for name, at in (("x", 0), ("y", 2), ("z", 1)))
    resharder = StateDictResharder({"a": rows, "b": rows}, "2: R", **tied)
    resharder({"a": rows, "b": rows})
    refused("tied-weights", lambda: resharder({"a": rows, "b": -rows}))
    refused("unknown-name", lambda: resharder({"a": rows, "b": rows, "c": rows}))

    # A DTensor is not taken for, and not filled as, what it does not say it is.
    ours, zeros = distribute_tensor(full, mesh, [Shard(0)]), distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)])
    other = {**ROWS, "src_layouts": {"w": "2: S(0) on ranks 1,0"}}
    refused("layout-mismatch", lambda: reshard_state_dict({"w": ours}, "2: R", **other))
    refused("layout-mismatch", lambda: reshard_state_dict({"w": rows}, other["src_layouts"], **ROWS, out={"w": zeros}))
    assert not zeros.to_local().any()
    reshard_state_dict({"w": ours}, "2: S(0)", **ROWS, out={"w": zeros})  # where they agree both may be given
    assert torch.equal(zeros.to_local(), rows)
    pending = DTensor.from_local(full, mesh, [Partial()])
    refused("layout-mismatch", lambda: reshard(pending, "2: R", "2: S(0)"))
    resharder = StateDictResharder({"w": distribute_tensor(full, mesh, [Replicate()])}, "2: S(0)")
    refused("layout-mismatch", lambda: resharder({"w": pending}))
