"""A parameter that another took the place of raises where optimizers look."""

from __future__ import annotations

import pytest
import torch
from shared.problems import PlanError, Problem
from shared.stale_parameters import current_parameter, is_stale, mark_current, mark_stale


def test_a_stale_parameter_raises_where_optimizers_look() -> None:
    old, new = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([old], lr=0.1)
    mark_stale(old, Problem("parameter-replaced", "fc.weight", found="sharded", hint="build it later"), new)
    assert is_stale(old)
    assert current_parameter(old) is new
    assert old.tolist() == [1.0, 1.0, 1.0]
    for work in (optimizer.step, optimizer.zero_grad, lambda: torch.nn.utils.clip_grad_norm_([old], 1.0)):
        with pytest.raises(PlanError, match=r"parameter-replaced\] fc.weight"):
            work()
    mark_current(old)
    assert type(old) is torch.nn.Parameter
    assert not is_stale(old)
    optimizer.step()
