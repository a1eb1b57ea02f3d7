"""Memory of FSDP2's schedule in a step on the meta device: its buffers are allocated when FSDP2 allocates them.

A *unit* is a module that ``fully_shard`` wraps, with its parameters as one group. Forward of a unit receives its
parameters in a buffer, copies them out (the *full* parameters), and frees them afterwards; backward gathers them again,
the unit before ahead of time, and sends full gradients from another buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shard_spec._torch_compat import map_tensors


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit.

    Attributes:
        gathered: Of its parameters, in the dtype of compute.
        reduced: Of its full gradients, in the dtype of the reduction.
        sharded: Of its gradients' shards on one rank.
    """

    gathered: int
    reduced: int
    sharded: int


@dataclass(frozen=True)
class Schedule:
    """Options of the schedule; see `StepOptions`.

    Attributes:
        reshard_after_forward: Units are freed between forward and backward.
        holds_full: Full gradients of earlier batches are held, which no reduction has freed.
        input_dtype: Dtype of units' floating inputs; None: as they are.
        output_dtype: Dtype of units' floating outputs; None: as they are.
    """

    reshard_after_forward: bool = True
    holds_full: bool = False
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


class FullyShard:
    """Context of a step: receive buffers, gathered parameters, and full gradients until they are sent.

    Args:
        model: The model of the step.
        units: FQN of each unit to its bytes.
        parameters: FQN of each unit to its parameters on meta.
        schedule: Options.
        allocate: Allocates a buffer of so many bytes, recorded as gathered.
        lasting: Records so many bytes that stay until the end of the step (shards of gradients).
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, UnitBytes],
        parameters: Mapping[str, list[torch.Tensor]],
        schedule: Schedule,
        allocate: Callable[[int], torch.Tensor],
        lasting: Callable[[int], None],
    ) -> None:
        self._model, self._schedule = model, schedule
        self._units = {name: (sizes, parameters[name]) for name, sizes in units.items()}
        self._allocate, self._lasting = allocate, lasting
        self._full: dict[str, torch.Tensor] = {}  # parameters by unit
        self._held: dict[str, torch.Tensor] = {}  # gradients of earlier batches by unit
        self._received: tuple[str, torch.Tensor | None] = ("", None)  # unit and buffer of the last all-gather
        self._sent: torch.Tensor | None = None  # buffer of the last reduce-scatter
        self._order: list[str] = []  # of forward
        self._in_backward = False
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, (sizes, owned) in self._units.items():
            unit = self._model.get_submodule(name)
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self._handles.append(unit.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(unit.register_forward_hook(after))
            if self._schedule.holds_full:
                self._held[name] = self._allocate(sizes.reduced)
                # A new gradient is added to the one held, and freed: at once, or after its unit in another dtype.
                for parameter in owned if sizes.reduced == sizes.gathered else ():
                    hook: Any = parameter.register_post_accumulate_grad_hook
                    self._handles.append(hook(lambda each: setattr(each, "grad", None)))

    def __exit__(self, *error: object) -> None:
        for name in list(self._full):  # the root, and units whose inputs ask for no gradient
            self._scatter(name)
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._in_backward:  # recomputation, within a unit that is gathered
            return None
        # A buffer is kept until the next unit is copied out, so that the copy out of it and that gather overlap.
        received = name, self._allocate(self._units[name][0].gathered)
        self._full[name] = self._allocate(self._units[name][0].gathered)
        self._received = received
        dtype = self._schedule.input_dtype

        def entered(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return mapped(value, entered)
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            if name and value.requires_grad:  # the root is scattered at the end
                # The output of the unit before has a hook too, which has to come after this one.
                value = value.view_as(value)
                value.register_hook(lambda grad: self._scatter(name))
            return value

        return entered(args), entered(kwargs)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if self._in_backward:
            return None
        if not name:
            self._received = "", None
        elif self._schedule.reshard_after_forward:
            del self._full[name]
        self._order.append(name)
        for tensor in tensors_of(output, set()):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._gather_again(name))
        dtype = self._schedule.output_dtype
        if dtype is None:
            return None
        return map_tensors(output, lambda each: each.to(dtype) if each.is_floating_point() else each)

    def _gather_again(self, name: str) -> None:
        self._in_backward = True
        if name not in self._order:
            return
        *before, _ = self._order[: self._order.index(name) + 1]
        self._order.remove(name)
        if not self._schedule.reshard_after_forward:
            self._received = "", None  # everything is there
            return
        if name:
            if self._received[0] != name:
                self._received = name, self._allocate(self._units[name][0].gathered)
            self._full[name] = self._allocate(self._units[name][0].gathered)
        self._received = "", None
        if before:
            self._received = before[-1], self._allocate(self._units[before[-1]][0].gathered)  # gathered ahead

    def _scatter(self, name: str) -> None:
        if self._full.pop(name, None) is not None:
            self._sent = None
            if name in self._held:  # first added to the gradients held, then sent
                self._drop_gradients(name)
            self._sent = self._allocate(self._units[name][0].reduced)
            self._held.pop(name, None)
            self._drop_gradients(name)
            self._lasting(self._units[name][0].sharded)

    def _drop_gradients(self, name: str) -> None:
        for parameter in self._units[name][1]:
            parameter.grad = None


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors of a container; with ``seen`` also from attributes of its objects (a key-value cache)."""
    if isinstance(value, torch.Tensor):
        # A sparse gradient's memory is that of its indices and values.
        yield from (value._indices(), value._values()) if value.layout == torch.sparse_coo else (value,)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item, seen)
    elif seen is not None and hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))  # objects may refer to each other in circles
        yield from tensors_of(vars(value), seen)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to each item of a list, tuple or dict; other values pass unchanged."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(function, value)) if type(value) in (list, tuple) else value
    return value
