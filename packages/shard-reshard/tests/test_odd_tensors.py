"""Tensors of other kinds at a later call: a PlanError at every call, never an end of the process or old values."""

from __future__ import annotations

from collections.abc import Callable
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
    kept, into = Resharder(plan), Resharder(plan)
    always = Resharder(plan, check="always")
    state = StateDictResharder({"w": local}, "2: S(1)", **LAYOUTS)
    out = torch.zeros(8, 4)
    return {
        "reshard": lambda t: reshard(t, "2: S(0)", "2: S(1)", shape=(8, 8)),
        "Resharder": kept,
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
