"""Recomputed random numbers: a draw behind a restored state of a generator is refused while a step is traced.

Activation checkpointing saves the state of torch's generators in forward and restores it for recomputation. A graph
cannot restore a state: it would draw another mask than forward's. While a step is traced states are positions in the
sequence of draws, so that a recomputation without draws needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from dp_partition._shared.execution_check import is_random
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import TorchDispatchMode, pytree


@dataclass(frozen=True)
class _Position:
    """State of a generator while a step is traced."""

    device: str
    index: int


class RandomReplay(TorchDispatchMode):
    """Counts the draws of torch's default generators, and refuses those behind a restored state.

    Args:
        name: Name of the step, for errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.drawn = {"cpu": 0, "cuda": 0}
        self.position = {"cpu": 0, "cuda": 0}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace states of generators by positions within the block."""
        with ExitStack() as stack:
            for module, device in ((torch, "cpu"), (torch.cuda, "cuda")):
                get, put = self._get(device), self._put(device, module.set_rng_state)
                stack.enter_context(patch.object(module, "get_rng_state", get))
                stack.enter_context(patch.object(module, "set_rng_state", put))
            stack.enter_context(self)
            yield
            if self.position != self.drawn:
                raise self._refused("puts a generator back to where it was before it drew")

    def _get(self, device: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Position(device, self.position[device])

    def _put(self, device: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def put(new_state: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(new_state, _Position):  # a state from outside the step: detected afterwards
                original(new_state, *args, **kwargs)
            else:
                self.position[device] = new_state.index

        return put

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs) and kwargs.get("generator") is None:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            kind = tensors[0].device.type if tensors else torch.device(kwargs.get("device") or "cpu").type
            device = "cuda" if kind == "cuda" else "cpu"
            if self.position[device] != self.drawn[device]:
                raise self._refused(f"recomputes {func}, which draws")
            self.drawn[device] += 1
            self.position[device] += 1
        return func(*args, **kwargs)

    def _refused(self, found: str) -> PlanError:
        hint = "draw outside of the checkpointed block, or run the step eagerly"
        return PlanError(Problem("random-replay", self.name, found=found, hint=hint))
