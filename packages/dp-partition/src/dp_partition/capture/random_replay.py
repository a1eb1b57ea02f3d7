"""Repeated random numbers: after a generator's state is restored, the former numbers come again.

Activation checkpointing saves the state of torch's generators in forward and restores it for recomputation. A graph
cannot restore a state, so while a step is traced states are positions in the sequence of draws, and a draw at an
earlier position is the value drawn there: forward's mask, and not another one.
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

aten = torch.ops.aten


@dataclass(frozen=True)
class _Position:
    """State of a generator while a step is traced."""

    device: str
    index: int


@dataclass(frozen=True)
class _Draw:
    op: Any
    signature: str
    value: Any


class RandomReplay(TorchDispatchMode):
    """Records the draws of torch's default generators, and repeats them after a restored state.

    Args:
        name: Name of the step, for errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.drawn: dict[str, list[_Draw]] = {"cpu": [], "cuda": []}
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
            try:
                yield
                if any(self.position[device] < len(values) for device, values in self.drawn.items()):
                    raise self._refused("puts a generator back to where it was before it drew")
            finally:
                for values in self.drawn.values():
                    values.clear()  # keeps nothing of a finished step alive

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
        if not is_random(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        device = _device(args, kwargs)
        drawn, position = self.drawn[device], self.position[device]
        self.position[device] += 1
        signature = _signature(args, kwargs)
        if position < len(drawn):
            if (drawn[position].op, drawn[position].signature) != (func, signature):
                raise self._refused(f"draws {func} where {drawn[position].op} was drawn from the same state")
            return self._again(drawn[position], args)
        result = func(*args, **kwargs)
        # A copy: the step may write to its draw; without a second draw the copy is dead code.
        drawn.append(_Draw(func, signature, pytree.tree_map_only(torch.Tensor, aten.clone.default, result)))
        return result

    def _again(self, draw: _Draw, args: Any) -> Any:
        if draw.op is aten.native_dropout.default:
            scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
            mask = draw.value[1]
            return aten.native_dropout_backward.default(args[0], mask, scale), mask
        if not isinstance(draw.value, torch.Tensor):
            raise self._refused(f"recomputes {draw.op}, which draws and computes at once")
        if draw.op._schema.is_mutable:
            return aten.copy_.default(args[0], draw.value)
        return aten.clone.default(draw.value)

    def _refused(self, found: str) -> PlanError:
        hint = "draw in the same order when recomputing, or draw outside the checkpointed block"
        return PlanError(Problem("random-replay", self.name, found=found, hint=hint))


def _device(args: Any, kwargs: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kind = tensors[0].device.type if tensors else torch.device(kwargs.get("device") or "cpu").type
    return "cuda" if kind == "cuda" else "cpu"


def _signature(args: Any, kwargs: Any) -> str:
    def shown(leaf: Any) -> str:
        return f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)

    return ", ".join([shown(leaf) for leaf in pytree.tree_leaves((args, kwargs))])
