"""What tensors say of themselves and how they are, in calls that come again: most of it went wrong without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import (
    Part,
    PlanError,
    Resharder,
    StateDictResharder,
    plan_reshard,
    reshard,
    reshard_state_dict,
    simulate,
)
from shard_reshard.state_dict.agreement import checksum
from shard_spec import MeshSpec

FULL = torch.arange(1.0, 17).view(4, 4)
ROWS: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (4, 4)}}


def refused(code: str, call: Callable[[], object]) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert {problem.code for problem in caught.value.problems} == {code}


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
        given = {"src_layouts": ROWS["src_layouts"], "shapes": shapes, "key_map": key_map}
        moved = reshard_state_dict({"w": rows}, policy.of, **given)
        assert moved.keys() == ({"w"} if at < 2 else {"w", "v"})
        assert all(torch.equal(value, full if layout == "2: R" else columns[ranks.rank]) for value in moved.values())
    asked = []

    def raising(name: str, shape: tuple[int, ...]) -> str:
        asked.append(name)
        if ranks.rank == 1 and len(asked) == 2:
            raise KeyError(name)
        return "2: R"

    reshard_state_dict({"w": rows}, raising, **ROWS)
    assert len(asked) == 1  # planning and results go by one answer
    refused("rank-failed", lambda: reshard_state_dict({"w": rows}, raising, **ROWS))
    shapes["w"][0] = 6
    refused("shape-mismatch", lambda: reshard_state_dict({"w": rows}, policy.of, **given))

    # A later source of equal metadata whose memory is gone.
    resharder, gone = StateDictResharder({"w": rows}, "2: S(1)", **ROWS), rows.clone()
    resharder({"w": rows})
    if ranks.rank == 1:
        gone.untyped_storage().resize_(8)
    refused("no-data", lambda: resharder({"w": gone}))
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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode
@pytest.mark.ranks(2)
def test_tensors_under_modes_and_transformations(ranks: Ranks) -> None:
    import torch.autograd.forward_ad as forward_ad
    from torch.distributed.tensor import DTensor, Partial, Replicate

    full = FULL.to(ranks.device)
    rows, columns = full.chunk(2)[ranks.rank], full.chunk(2, 1)[ranks.rank]
    resharder = Resharder(plan_reshard((4, 4), torch.float32, "2: S(0)", "2: S(1)"))
    summing = Resharder(plan_reshard((4, 4), torch.float32, "2: P(sum)", "2: S(1)"))
    out = torch.zeros_like(columns)
    for inference in (True, False, True):  # what is kept was made in inference mode, and could not be written to
        with torch.inference_mode(inference):
            own = torch.zeros_like(columns)
            for _ in range(3):
                assert torch.equal(resharder(rows), columns)
                assert torch.equal(resharder(rows, out=out), columns)
                assert torch.equal(resharder(rows, out=own), columns)
                assert torch.equal(summing(full, out=out), 2 * columns)
        if inference:
            refused("invalid-out", partial(resharder, rows, out=own))
    leaf = rows.clone().requires_grad_()
    resharder(leaf).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.ones_like(rows))

    # A tensor that is still on its way has no memory: the first call's was sent again.
    whole = Resharder(plan_reshard((4, 4), torch.float32, "2: R", "2: S(0)"))
    for step in range(1, 4):
        parts = DTensor.from_local(full * step, ranks.mesh((2,), ("all",)), [Partial()])
        coming = parts.redistribute(placements=[Replicate()], async_op=True).to_local()
        assert type(coming).__name__ == "AsyncCollectiveTensor"
        assert torch.equal(whole(coming), 2 * step * rows)

    # An out that was computed kept its graph, which is of other values.
    computed = 2 * torch.ones_like(columns, requires_grad=True)
    refused("invalid-out", lambda: resharder(rows, out=computed))
    with forward_ad.dual_level():  # the tangent was lost
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at the first dual number
            ones = torch.ones_like(rows)
            dual = forward_ad.make_dual(rows, ones)
        refused("not-differentiable", lambda: resharder(dual))
    refused("not-differentiable", lambda: torch.func.grad(lambda tensor: resharder(tensor).sum())(rows))


def test_sums_of_dtypes_that_torch_adds_and_of_those_it_does_not() -> None:
    values = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for op, wanted in (("sum", 2 * values), ("avg", values), ("max", values), ("product", values * values)):
            given = values.to(dtype)
            moved = simulate(plan_reshard((2, 2), dtype, f"2: P({op})", "2: S(0)"), [given, given])
            both = [tensor.float() for tensor in moved if isinstance(tensor, torch.Tensor)]
            assert torch.equal(torch.cat(both), wanted), (dtype, op)
    for name in ("uint16", "uint32", "uint64"):
        for op in ("sum", "min", "max"):
            refused("unsupported-dtype", partial(plan_reshard, (2, 2), name, f"2: P({op})", "2: S(0)"))
    for name in ("float4_e2m1fn_x2", "complex32"):  # two numbers in a byte; few kernels of torch's
        refused("unsupported-dtype", partial(plan_reshard, (2, 2), name, "2: S(1)", "2: S(0)"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128])
def test_other_signs_and_other_places_are_other_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_reshard.state_dict.agreement._CHUNK", 8)
    compared = 0
    for size in (2, 4, 8, 40, 64):
        values, ones = torch.arange(1, size + 1).to(dtype), torch.ones(size, dtype=dtype)
        signs = ones.where(torch.arange(size) % 4 % 3 == 0, -ones)  # + - - +
        first, last = ones.clone(), ones.clone()
        first[0] = last[-1] = -1
        for one, other in ((values, -values), (signs, -signs), (first, last), (values, values.roll(1)), (ones, -ones)):
            assert checksum(one) == checksum(one.clone()) != checksum(other)
            compared += 1
    assert compared == 25


@pytest.mark.ranks(2)
def test_plain_tensors_of_other_signs_are_no_replicas(ranks: Ranks) -> None:
    plain = torch.arange(1.0, 9.0, dtype=torch.float64) * (1 - 2 * ranks.rank)
    with pytest.raises(PlanError, match=r"missing-argument.*plain tensors that differ"):
        reshard_state_dict({"a": plain}, "rank 0")
