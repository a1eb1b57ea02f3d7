"""Which part of the step a node belongs to: forward, backward or optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.optim import Optimizer

from dp_partition._torch_compat import current_trace_nodes


@dataclass
class Phases:
    """Names of nodes, as recorded while tracing.

    Attributes:
        backward: The nodes of each backward pass.
        optimizer: The nodes of each optimizer step.
        cleared: Whether gradients were cleared before the first backward pass.
    """

    backward: list[frozenset[str]] = field(default_factory=list)
    optimizer: list[frozenset[str]] = field(default_factory=list)
    cleared: bool = False

    @contextmanager
    def recording(self, optimizers: list[Optimizer], modules: list[torch.nn.Module]) -> Iterator[None]:
        """Record the calls of ``backward``, ``step`` and ``zero_grad`` made within the block."""
        with ExitStack() as stack:
            for name in ("backward", "grad"):
                original = getattr(torch.autograd, name)
                stack.enter_context(patch.object(torch.autograd, name, self._timed(original, self.backward)))
            for optimizer in optimizers:
                step = self._timed(optimizer.step, self.optimizer)
                stack.enter_context(patch.object(optimizer, "step", step))
            owners: list[Any] = [*optimizers, *modules]
            for owner in owners:
                clearing = self._clearing(owner.zero_grad)
                stack.enter_context(patch.object(owner, "zero_grad", clearing))
            yield

    def _timed(self, call: Callable[..., Any], calls: list[frozenset[str]]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = current_trace_nodes()
            result = call(*args, **kwargs)
            calls.append(frozenset(current_trace_nodes()) - frozenset(before))
            return result

        return timed

    def _clearing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clearing(*args: Any, **kwargs: Any) -> Any:
            if not self.backward:
                self.cleared = True
            return call(*args, **kwargs)

        return clearing


def mark_phases(nodes: list[fx.Node], phases: Phases) -> None:
    """Write ``meta["phase"]`` on the nodes of a graph: what follows the last backward pass is the optimizer's."""
    backward = frozenset[str]().union(*phases.backward)
    last = max((position for position, node in enumerate(nodes) if node.name in backward), default=len(nodes))
    for position, node in enumerate(nodes):
        if node.name in backward:
            node.meta["phase"] = "backward"
        else:
            node.meta["phase"] = "optimizer" if position > last else "forward"
