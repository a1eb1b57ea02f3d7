"""Average the reference's gradients over the ranks, as the graph does: after each backward pass.

The order is that of parameters, not of arrival: ranks with batches on other code paths would
otherwise fill each other's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._shared.consensus import all_gather_objects
from dp_partition.capture.phases import hook_gradient
from dp_partition.passes.bucketing import divisors
from dp_partition.plan.placements import all_groups
from dp_partition.plan.plan import CommConfig

RUNNING, FINISHED, OUT_OF_MEMORY, FAILED = range(4)


class PeerStoppedError(BaseException):
    """Another rank's reference has stopped. Not an `Exception`: the step's own handlers must not catch it."""


class NotComparableError(BaseException):
    """The reference is not comparable with the graph; holds the reason."""


@dataclass
class MicroBatches:
    """Sums of gradients over the micro-batches of a call."""

    count: int = 1
    is_last: bool = True  # whether the last one runs
    passes: int = 0  # number of backward passes of the present one so far
    sums: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of each pass, by parameter


class GradientAverage:
    """Work on gradients at the end of a backward pass of the reference."""

    def __init__(self, params: dict[str, nn.Parameter], mesh: DeviceMesh, comm: CommConfig, averages: bool) -> None:
        self.params = {name: p for name, p in params.items() if p.is_floating_point() or p.is_complex()}
        self.mesh, self.comm = mesh, comm
        self.averages, self.of_grad = averages, True  # average over the ranks; also what torch.autograd.grad returns
        self.meets = averages and (mesh.size() > 1 or comm.reduce_dtype is not None)
        self.stopped: int | None = None  # reason against any further communication; None while all ranks run
        self.depth = 0
        self.fired: set[str] = set()  # parameters with a gradient in this pass
        self.micro = MicroBatches()
        # complete gradients by name, from the first backward pass with one; None if another pass adds to it
        self.noted: dict[str, torch.Tensor | None] = {}
        self.held: frozenset[str] = frozenset()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Average at the end of every outermost backward pass within the block."""
        backward, grad = torch.autograd.backward, torch.autograd.grad
        with ExitStack() as stack:
            for name, param in self.params.items():

                def note(gradient: torch.Tensor, name: str = name) -> None:
                    self.fired.add(name)

                stack.callback(hook_gradient(param, note).remove)
            stack.enter_context(patch.object(torch.autograd, "backward", self._around(backward, self._after_backward)))
            stack.enter_context(patch.object(torch.autograd, "grad", self._around(grad, self._after_grad)))
            self.micro.passes, self.fired = 0, set()
            yield
            if self.fired and self.averages:
                raise NotComparableError("takes gradients past torch.autograd.backward and torch.autograd.grad")

    def _around(self, call: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
        def outermost(*args: Any, **kwargs: Any) -> Any:
            if self.depth:  # re-entrant checkpointing calls backward within backward
                return call(*args, **kwargs)
            before: dict[str, torch.Tensor | None] = dict.fromkeys(self.params)
            if self.micro.count > 1:
                before = {n: None if p.grad is None else p.grad.clone() for n, p in self.params.items()}
            self.held = frozenset(name for name, param in self.params.items() if param.grad is not None)
            self.depth += 1
            try:
                result = call(*args, **kwargs)
            finally:
                self.depth -= 1
            return after(result, before, *args, **kwargs)

        return outermost

    def _after_backward(self, result: Any, before: dict[str, torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
        if self.averages and self.fired:
            gradients = {name: param.grad for name, param in self.params.items()}
            for name, value in self._reduced(gradients, before).items():
                self.params[name].grad = value
        self._note_complete({name: self.params[name].grad for name in self.fired - self.held})
        self.fired.clear()
        return result

    def _after_grad(
        self,
        result: tuple[torch.Tensor | None, ...],
        before: dict[str, torch.Tensor | None],
        outputs: Any,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        names = {id(param): name for name, param in self.params.items()}
        asked = [names.get(id(item)) for item in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)]
        if not self.averages or not self.of_grad or not any(asked):
            self.fired.clear()
            return result
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(self.params)
        gradients |= {name: item for name, item in zip(asked, result, strict=True) if name is not None}
        reduced = self._reduced(gradients, dict.fromkeys(self.params))
        self._note_complete({name: item for name, item in reduced.items() if name in asked})
        self.fired.clear()
        pairs = zip(asked, result, strict=True)
        return tuple(value if name is None else reduced.get(name, value) for name, value in pairs)

    def _note_complete(self, gradients: dict[str, torch.Tensor | None]) -> None:
        if not self.micro.is_last:
            return
        for name in self.fired:
            item = gradients.get(name)
            self.noted[name] = None if item is None or name in self.noted else item.detach().clone()

    @torch.no_grad()
    def _reduced(
        self, gradients: dict[str, torch.Tensor | None], before: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        if any(item is not None and item.is_sparse for item in gradients.values()):
            raise NotComparableError("has sparse gradients")
        if self.micro.count > 1:
            gradients = self._over_micro_batches(gradients, before)
            if not self.micro.is_last:
                return {}
        if not self.meets:
            return {name: item for name, item in gradients.items() if item is not None}
        present = self.meet(RUNNING, [item is not None for item in gradients.values()])  # on any rank
        full = {  # zeros if only other ranks have one
            name: torch.zeros_like(self.params[name]) if item is None else item
            for (name, item), anywhere in zip(gradients.items(), present, strict=True)
            if anywhere
        }
        result: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(item.dtype for item in full.values()):
            names = [name for name, item in full.items() if item.dtype == dtype]
            flat = torch.cat([full[name].reshape(-1) for name in names])
            sent = flat.to(self.comm.reduce_dtype or dtype)
            divisor, rest = divisors(sent.dtype, self.mesh.size())
            sent = sent / divisor
            for group in all_groups(self.mesh):
                dist.all_reduce(sent, group=group)
            flat = (sent if rest == 1 else sent / rest).to(dtype)
            parts = flat.split([full[name].numel() for name in names])  # views of one reduced buffer
            for name, part in zip(names, parts, strict=True):
                like = full[name]
                result[name] = torch.empty_like(like).copy_(part.view(like.shape))
        return result

    def _over_micro_batches(
        self, gradients: dict[str, torch.Tensor | None], before: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor | None]:
        """Return the mean over the micro-batches of this pass's addition to the gradients."""
        if self.micro.passes == len(self.micro.sums):
            self.micro.sums.append({})  # this pass runs for the first time
        sums = self.micro.sums[self.micro.passes]
        self.micro.passes += 1
        mean: dict[str, torch.Tensor | None] = {}
        for name, gradient in gradients.items():
            old = before[name]
            added = gradient if gradient is None or old is None else gradient - old
            if added is not None:
                sums[name] = sums[name] + added if name in sums else added.clone()
            total = sums.get(name)
            mean[name] = old if total is None else total / self.micro.count + (0 if old is None else old)
        return mean

    def meet(self, status: int, present: list[bool] | None = None) -> list[bool]:
        """Exchange the next action of the ranks' references: an average, or the reason for this one's end.

        Returns True for each parameter with a gradient on any rank; raises `PeerStoppedError` if another rank does
        something else.
        """
        if not self.meets:
            return present or []
        if self.stopped is not None:  # peers no longer answer
            raise PeerStoppedError
        mine = (status, present or [False] * len(self.params))
        rows = all_gather_objects(self.mesh, mine, "the eager run of a check")
        statuses = {item for item, _ in rows}
        if statuses != {RUNNING}:
            self.stopped = max(statuses)
        if len(statuses) > 1:
            raise PeerStoppedError
        return [any(flags) for flags in zip(*(flags for _, flags in rows), strict=True)]
