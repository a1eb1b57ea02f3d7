"""Draws beyond a graph: those of a checkpoint's recomputation, and those behind a restored state.

Activation checkpointing saves the state of torch's generators in forward and restores it for recomputation. A graph
cannot restore a state: it would draw another mask than forward's. A recomputation without draws needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dp_partition._shared.execution_check import is_random
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import TorchDispatchMode, is_in_backward


class RandomReplay(TorchDispatchMode):
    """Refuses draws of torch's default generators in backward, and restored states elsewhere.

    Args:
        name: Name of the step, for errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in (torch, torch.cuda):
                stack.enter_context(patch.object(module, "set_rng_state", self._put(module.set_rng_state)))
            stack.enter_context(self)
            yield

    def _put(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def put(*args: Any, **kwargs: Any) -> None:
            if not is_in_backward():  # a checkpoint's: fakes draw nothing, so the state is the present one
                raise self._refused("puts a generator back to an earlier state")
            original(*args, **kwargs)

        return put

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_in_backward() and is_random(func, args, kwargs) and kwargs.get("generator") is None:
            raise self._refused(f"recomputes {func}, which draws")
        return func(*args, **kwargs)

    def _refused(self, found: str) -> PlanError:
        hint = "draw outside of the checkpointed block, or run the step eagerly"
        return PlanError(Problem("random-replay", self.name, found=found, hint=hint))
