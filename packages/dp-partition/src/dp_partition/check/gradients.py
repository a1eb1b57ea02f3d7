"""Average the reference's gradients over the ranks, as the graph does: after each backward pass.

The order is that of parameters, not of arrival: ranks with batches on other code paths would
otherwise fill each other's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._shared.consensus import all_gather_objects
from dp_partition.capture.phases import hook_gradient
from dp_partition.passes.bucketing import division
from dp_partition.plan.placements import all_groups
from dp_partition.plan.plan import CommConfig

RUNNING, FINISHED, OUT_OF_MEMORY, FAILED = range(4)


class PeerStoppedError(BaseException):
    """Another rank's reference has stopped. Not an `Exception`: the step's own handlers must not catch it."""


class NotComparableError(BaseException):
    """The reference is not comparable with the graph; holds the reason."""


class GradientAverage:
    """Work on gradients at the end of a backward pass of the reference."""

    def __init__(self, params: dict[str, nn.Parameter], mesh: DeviceMesh, comm: CommConfig, averages: bool) -> None:
        self.params = {name: p for name, p in params.items() if p.is_floating_point() or p.is_complex()}
        self.mesh, self.comm = mesh, comm
        self.averages, self.of_grad = averages, True  # average over the ranks; also what torch.autograd.grad returns
        self.meets = averages and (mesh.size() > 1 or comm.reduce_dtype is not None)
        self.stopped: int | None = None  # reason against any further communication; None while all ranks run
        self.depth = self.passes = 0
        self.fired: set[str] = set()  # parameters with a gradient in this pass
        self.micro_batches, self.is_last = 1, True
        self.sums: list[dict[str, torch.Tensor]] = []
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
            self.passes, self.fired = 0, set()
            yield
            if self.fired and self.averages:
                raise NotComparableError("takes gradients past torch.autograd.backward and torch.autograd.grad")

    def _around(self, call: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
        def outermost(*args: Any, **kwargs: Any) -> Any:
            if self.depth:  # re-entrant checkpointing calls backward within backward
                return call(*args, **kwargs)
            before: dict[str, torch.Tensor | None] = dict.fromkeys(self.params)
            if self.micro_batches > 1:
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
        asked = [names.get(id(one)) for one in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)]
        if not self.averages or not self.of_grad or not any(asked):
            self.fired.clear()
            return result
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(self.params)
        gradients |= {name: one for name, one in zip(asked, result, strict=True) if name is not None}
        reduced = self._reduced(gradients, dict.fromkeys(self.params))
        self._note_complete({name: one for name, one in reduced.items() if name in asked})
        self.fired.clear()
        return tuple(one if name is None else reduced.get(name, one) for name, one in zip(asked, result, strict=True))

    def _note_complete(self, gradients: dict[str, torch.Tensor | None]) -> None:
        if not self.is_last:
            return
        for name in self.fired:
            one = gradients.get(name)
            self.noted[name] = None if one is None or name in self.noted else one.detach().clone()

    @torch.no_grad()
    def _reduced(
        self, gradients: dict[str, torch.Tensor | None], before: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        if any(one is not None and one.is_sparse for one in gradients.values()):
            raise NotComparableError("has sparse gradients")
        if self.micro_batches > 1:
            gradients = self._over_micro_batches(gradients, before)
            if not self.is_last:
                return {}
        if not self.meets:
            return {name: one for name, one in gradients.items() if one is not None}
        present = self.meet(RUNNING, [one is not None for one in gradients.values()])  # on any rank
        full = {  # zeros if only other ranks have one
            name: torch.zeros_like(self.params[name]) if one is None else one
            for (name, one), anywhere in zip(gradients.items(), present, strict=True)
            if anywhere
        }
        result: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(one.dtype for one in full.values()):
            names = [name for name, one in full.items() if one.dtype == dtype]
            flat = torch.cat([full[name].reshape(-1) for name in names])
            sent = flat if self.comm.reduce_dtype is None else flat.to(self.comm.reduce_dtype)
            halves = sent.dtype is torch.float16 and flat.dtype is not torch.float16
            first, second = division(self.mesh.size()) if halves else (1.0, 1.0)
            sent = sent / first if halves else sent  # within float16's range
            for group in all_groups(self.mesh):  # the average of each axis, as in the graph's collectives
                dist.all_reduce(sent, group=group)
                sent = sent if halves else sent / dist.get_world_size(group)
            flat = (sent / second if halves else sent).to(flat.dtype)
            parts = flat.split([full[name].numel() for name in names])  # views of one reduced buffer
            for name, part in zip(names, parts, strict=True):
                like = full[name]
                result[name] = torch.empty_like(like).copy_(part.view(like.shape))
        return result

    def _over_micro_batches(
        self, gradients: dict[str, torch.Tensor | None], before: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor | None]:
        """Return the mean over the micro-batches of this pass's addition to the gradients."""
        if self.passes == len(self.sums):
            self.sums.append({})  # this pass runs for the first time
        sums = self.sums[self.passes]
        self.passes += 1
        mean: dict[str, torch.Tensor | None] = {}
        for name, gradient in gradients.items():
            old = before[name]
            added = gradient if gradient is None or old is None else gradient - old
            if added is not None:
                sums[name] = sums[name] + added if name in sums else added.clone()
            total = sums.get(name)
            mean[name] = old if total is None else total / self.micro_batches + (0 if old is None else old)
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
        statuses = {one for one, _ in rows}
        if statuses != {RUNNING}:
            self.stopped = max(statuses)
        if len(statuses) > 1:
            raise PeerStoppedError
        return [any(flags) for flags in zip(*(flags for _, flags in rows), strict=True)]
