"""Checks of tensors at a call: other kinds, modes and transformations are right or refused, with no old values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranktest import Ranks
from shard_reshard import PlanError, Resharder, StateDictResharder, plan_reshard, reshard, reshard_state_dict

ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "nested of rows": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor([t], layout=torch.jagged),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.quint8),
    "meta": lambda t: t.to("meta"),
    "a number": lambda t: 3.0,
    "a DTensor's list": lambda t: [t, t],
}
LAYOUTS: dict[str, Any] = {"src_layouts": {"w": "2: S(0)"}, "shapes": {"w": (8, 8)}}


def _callers(local: torch.Tensor) -> dict[str, Callable[[Any], Any]]:
    plan = plan_reshard((8, 8), torch.float32, "2: S(0)", "2: S(1)")
    resharder, into = Resharder(plan), Resharder(plan)
    always = Resharder(plan, check="always")
    state = StateDictResharder({"w": local}, "2: S(1)", **LAYOUTS)
    out = torch.zeros(8, 4)
    return {
        "reshard": lambda t: reshard(t, "2: S(0)", "2: S(1)", shape=(8, 8)),
        "Resharder": resharder,
        "Resharder(out=)": lambda t: into(t, out=out),
        "Resharder, always": always,
        "StateDictResharder": lambda t: state({"w": t})["w"],
        "reshard_state_dict": lambda t: reshard_state_dict({"w": t}, "2: S(1)", **LAYOUTS)["w"],
    }


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # torch's own, of prototypes and deprecations
@pytest.mark.parametrize("before", [0, 1, 3])
def test_odd_tensors_after_ordinary_ones(ranks: Ranks, before: int) -> None:
    full = torch.arange(64.0).view(8, 8)
    local, columns = full.chunk(2)[ranks.rank], full.chunk(2, 1)[ranks.rank]
    refused = 0
    for name, call in _callers(local).items():
        for odd, make in ODD.items():
            for _ in range(before):
                assert torch.equal(call(local), columns)
            with pytest.raises(PlanError):
                call(make(local))
            refused += 1
            assert torch.equal(call(local), columns), (name, odd)
    assert refused == 60


FULL = torch.arange(1.0, 17).view(4, 4)


def refused(code: str, call: Callable[[], object]) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert {problem.code for problem in caught.value.problems} == {code}


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
    slicing = Resharder(plan_reshard((4, 4), torch.float32, "2: R", "2: S(0)"))
    for step in range(1, 4):
        parts = DTensor.from_local(full * step, ranks.mesh((2,), ("all",)), [Partial()])
        coming = parts.redistribute(placements=[Replicate()], async_op=True).to_local()
        assert type(coming).__name__ == "AsyncCollectiveTensor"
        assert torch.equal(slicing(coming), 2 * step * rows)

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
