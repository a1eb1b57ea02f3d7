"""Plans that are refused, and dtypes that torch adds."""

from __future__ import annotations

import pytest
import torch
from shard_reshard import PlanError, plan_reshard, simulate


def test_sums_of_dtypes_that_torch_adds_and_of_those_it_does_not() -> None:
    values = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for op, expected in (("sum", 2 * values), ("avg", values), ("max", values), ("product", values * values)):
            addend = values.to(dtype)
            moved = simulate(plan_reshard((2, 2), dtype, f"2: P({op})", "2: S(0)"), [addend, addend])
            both = [tensor.float() for tensor in moved if isinstance(tensor, torch.Tensor)]
            assert torch.equal(torch.cat(both), expected), (dtype, op)
    for name in ("uint16", "uint32", "uint64"):
        for op in ("sum", "min", "max"):
            with pytest.raises(PlanError, match="unsupported-dtype"):
                plan_reshard((2, 2), name, f"2: P({op})", "2: S(0)")
    for name in ("float4_e2m1fn_x2", "complex32"):  # two numbers in a byte; few kernels of torch's
        with pytest.raises(PlanError, match="unsupported-dtype"):
            plan_reshard((2, 2), name, "2: S(1)", "2: S(0)")
