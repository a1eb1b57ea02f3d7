"""Phases of a step (forward, backward, optimizer), names and tags of its gradients, and draws beyond a graph.

Activation checkpointing saves the state of torch's generators in forward and restores it for recomputation. A graph
cannot restore a state: it would draw another mask than forward's. A recomputation without draws needs none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dp_partition._shared.execution_check import is_random
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import TorchDispatchMode, current_trace_nodes, is_in_backward
from dp_partition.nodes import is_op, kind_of, meta_of


@dataclass
class Phases:
    """Names of nodes, as recorded while tracing."""

    backward: list[frozenset[str]] = field(default_factory=list)  # the nodes of each backward pass
    # the nodes of each call of ``torch.autograd.grad``; it adds to no gradient
    grads: list[frozenset[str]] = field(default_factory=list)
    optimizer: list[frozenset[str]] = field(default_factory=list)  # the nodes of each optimizer step
    cleared: bool = False  # gradients were cleared before the first backward pass
    stepping: str = ""  # class of the optimizer whose step is running, or has raised

    @contextmanager
    def recording(self, optimizers: list[Optimizer], modules: list[torch.nn.Module]) -> Iterator[None]:
        """Record the calls of ``backward``, ``step`` and ``zero_grad`` made within the block."""
        with ExitStack() as stack:
            for name, calls in (("backward", self.backward), ("grad", self.grads)):
                timed = self._timed(getattr(torch.autograd, name), calls)
                stack.enter_context(patch.object(torch.autograd, name, timed))
            for optimizer in optimizers:
                step = self._timed(optimizer.step, self.optimizer, type(optimizer).__name__)
                stack.enter_context(patch.object(optimizer, "step", step))
            owners: list[Any] = [*optimizers, *modules]
            for owner in owners:

                def clearing(*args: Any, call: Any = owner.zero_grad, **kwargs: Any) -> Any:
                    self.cleared = self.cleared or not self.backward
                    return call(*args, **kwargs)

                stack.enter_context(patch.object(owner, "zero_grad", clearing))
            yield

    def _timed(self, call: Callable[..., Any], calls: list[frozenset[str]], stepping: str = "") -> Callable[..., Any]:
        @wraps(call)  # a scheduler looks for its mark on an optimizer's step
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = current_trace_nodes()
            around, self.stepping = self.stepping, stepping or self.stepping
            result = call(*args, **kwargs)
            self.stepping = around  # unchanged if the call raises
            calls.append(frozenset(current_trace_nodes()) - frozenset(before))
            return result

        return timed


def mark_phases(nodes: list[fx.Node], phases: Phases) -> None:
    """Write the phase on the nodes of a graph. All nodes after the last backward pass are the optimizer's."""
    backward = frozenset[str]().union(*phases.backward, *phases.grads)
    last = max((position for position, node in enumerate(nodes) if node.name in backward), default=len(nodes))
    for position, node in enumerate(nodes):
        if node.name in backward:
            meta_of(node)["phase"] = "backward"
        else:
            meta_of(node)["phase"] = "optimizer" if position > last else "forward"


_new_library: Any = torch.library.Library  # its methods are not typed
library: Any = _new_library("dp_partition", "DEF")
library.define("tag_grad(Tensor(a) self, str name='') -> Tensor(a)")


def _same_tensor(grad: torch.Tensor, name: str = "") -> torch.Tensor:
    if grad.layout != torch.strided:
        return grad  # refused by name afterwards
    # Another object: autograd may pass this tensor on to other inputs (of a sum); their gradient is not the average.
    return torch.ops.aten.alias.default(grad)  # type: ignore[no-any-return]


library.impl("tag_grad", _same_tensor, "CompositeExplicitAutograd")

TAG_GRAD = torch.ops.dp_partition.tag_grad.default


@contextmanager
def gradients_tagging(params: dict[str, torch.Tensor]) -> Iterator[None]:
    """Tag every gradient of a parameter within the block with the parameter's name.

    Safe to trace: the tags become nodes of the graph, from which `build_data_parallel_strategies` removes them.

    Args:
        params: Parameters by name; the step may thaw frozen ones.
    """

    def tag(name: str, grad: torch.Tensor) -> torch.Tensor:
        apply: Any = _DifferentiableTag.apply
        tagged: torch.Tensor = apply(grad, name) if grad.requires_grad else TAG_GRAD(grad, name)
        return tagged

    handles = [hook_gradient(param, partial(tag, name)) for name, param in params.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hook_gradient(param: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    """Register a hook, on a frozen parameter too; return its handle."""
    if not (param.is_floating_point() or param.is_complex()):
        return RemovableHandle(OrderedDict())
    trained = param.requires_grad
    handle: Any = param.requires_grad_(True).register_hook(hook)
    param.requires_grad_(trained)
    return handle


class _DifferentiableTag(torch.autograd.Function):
    """Tag of a gradient that is differentiated again: the identity, with the identity as derivative."""

    @staticmethod
    def forward(context: Any, grad: torch.Tensor, name: str) -> torch.Tensor:
        return TAG_GRAD(grad, name)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class RandomReplay(TorchDispatchMode):
    """Refuses draws of torch's default generators in backward, restored states elsewhere, and c10d's collectives."""

    def __init__(self, name: str, phases: Phases) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.phases = name, phases

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
        if func.namespace == "c10d":  # in place, and waited for by a handle that no graph holds
            stepping = self.phases.stepping
            caller = f"the optimizer {stepping}" if stepping else "it"
            reason = f"{caller} runs torch.distributed's {func.name()}, for which a graph would not wait"
            hint = "pass an optimizer that does not communicate" if stepping else "reduce before or after the step"
            raise PlanError(Problem("not-traceable", self.name, found=reason, hint=hint))
        if is_in_backward() and is_random(func, args, kwargs) and kwargs.get("generator") is None:
            raise self._refused(f"recomputes {func}, which draws")
        return func(*args, **kwargs)

    def _refused(self, found: str) -> PlanError:
        return PlanError(
            Problem("random-replay", self.name, found=found, hint="draw outside of the checkpointed block")
        )


def carried_names(node: fx.Node, depth: int = 12) -> Iterable[str]:
    """Yield names of parameters with values or gradients that reach a node through packing alone."""
    name = parameter_of(node)
    if name is not None:
        yield name
        return
    operator = str(node.target).split(".")[1] if is_op(node) else ""
    if operator in _PACKING and depth:
        sources = node.all_input_nodes if operator in ("cat", "_chunk_cat") else node.all_input_nodes[:1]
        for source in sources:
            yield from carried_names(source, depth - 1)


_PACKING = frozenset([
    "cat", "_chunk_cat", "reshape", "view", "constant_pad_nd", "contiguous", "transpose", "slice", "clone", "_to_copy",
    "wait_tensor", "reduce_scatter_tensor", "all_reduce_",  # on the way to a second collective
    "div", "add",  # the average over micro-batches
])  # fmt: skip


def parameter_of(node: fx.Node) -> str | None:
    """Return the name of the parameter that a node is, or whose gradient it is; else None."""
    if node.target is TAG_GRAD:
        return str(node.args[1])
    if "gradient" in meta_of(node):
        return meta_of(node)["gradient"]
    return meta_of(node)["input"].name if kind_of(node) == "param" else None
