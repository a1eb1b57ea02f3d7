"""Units of data parallelism: what they send, and the memory of FSDP2's schedule.

In a step on the meta device FSDP2's buffers are allocated when FSDP2 allocates them.

A *unit* is a module that ``fully_shard`` wraps, with its parameters as one group. Forward of a unit receives its
parameters in a buffer, copies them out (the *full* parameters), and frees them afterwards; backward gathers them again,
the unit before ahead of time, and sends full gradients from another buffer.

Data-parallel ranks gather and scatter the parameters of a unit together, as ``fully_shard`` does. A unit is a wrapped
module with the parameters that no unit inside of it has; the root takes the rest. One unit is one all-gather for each
use and one reduction of its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import map_tensors
from shard_spec.estimate.step_options import (
    StepOptions,
    check_effects,
    check_options,
    expert_modules,
    policy_of,
    role,
)
from shard_spec.layout.placements import SpecialShard, StageShard
from shard_spec.plan.axis_roles import AxisRoles
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata
from shard_spec.plan.resolve import Resolution


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
    elif isinstance(value, list | tuple | Mapping):
        for item in value if isinstance(value, list | tuple) else value.values():
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


def replaced(value: Any, old: object, new: object) -> Any:
    """Return a container with ``new`` in place of ``old``. No closure that calls itself: its circle would keep both."""
    return new if value is old else mapped(value, lambda each: replaced(each, old, new))


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind for one tensor or unit in a step.

    Attributes:
        axis: Mesh axis of the communicating groups.
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"p2p"`` (to the next stage).
        what: Kind of content: ``"parameters"``, ``"gradients"`` or ``"activations"``.
        name: FQN of the tensor or of the unit's module; ``""`` is the root.
        full_bytes: Bytes of the full buffer of one group: after a gather, before a scatter, in a reduction.
        count: Number of collectives in a step.
        group_size: Ranks in a group.
        stage: Pipeline stage whose ranks send; None for all.
    """

    axis: str
    op: str
    what: str
    name: str
    full_bytes: int
    count: int
    group_size: int
    stage: int | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by each rank in the step, at a ring's minimum."""
        if self.op == "p2p":
            return float(self.count * self.full_bytes)
        passes = 2 if self.op == "all_reduce" else 1  # reduce-scatter, then all-gather
        return self.count * passes * self.full_bytes * (self.group_size - 1) / self.group_size


def block_names(metadata: ModelMetadata) -> list[str]:
    """Return FQNs of the repeated blocks: children of outermost `ModuleList`s of several modules."""
    children: dict[str, list[str]] = {}
    for name in metadata.modules:  # in the order of the modules: outer ones first
        if name and metadata.modules.get(name.rpartition(".")[0]) == "ModuleList":
            children.setdefault(name.rpartition(".")[0], []).append(name)
    blocks: dict[str, None] = {}
    for name in (name for names in children.values() if len(names) > 1 for name in names):
        if not any(name[:at] in blocks for at in range(len(name)) if name[at] == "."):
            blocks[name] = None
    return list(blocks)


def units_of(metadata: ModelMetadata, units: Iterable[str] | None) -> dict[str, list[TensorMetadata]]:
    """Return the parameters of each unit by the FQN of its module. ``""`` is the root.

    ``units`` are FQNs or patterns of wrapped modules beside the root. By default they are the repeated blocks.
    """
    names = block_names(metadata)
    if units is not None:
        patterns = [Pattern(text) for text in ([units] if isinstance(units, str) else units)]
        names = [name for name in metadata.modules if name and any(each.matches(name) for each in patterns)]
        unused = [each.text for each in patterns if not any(each.matches(name) for name in metadata.modules)]
        if unused:
            raise PlanError(
                [
                    Problem(
                        "unmatched-pattern",
                        text,
                        found="no module",
                        hint="FQNs of modules that fully_shard wraps, or patterns of them",
                    )
                    for text in unused
                ]
            )
    members: dict[str, list[TensorMetadata]] = {name: [] for name in (*names, "")}
    for tensor in metadata.parameters:
        above = [name for name in names if tensor.name.startswith(f"{name}.")]
        members[max(above, key=len, default="")].append(tensor)
    return members


def unit_transfers(resolution: Resolution, roles: AxisRoles, options: StepOptions) -> list[Transfer]:
    """Return each unit's collectives along data axes, in the order of the units.

    The root is gathered once a batch, since FSDP2 frees it at the end alone; other units for forward and for backward.

    Raises:
        PlanError: For options that are wrong, or of no effect on this plan.
    """
    check_options(options)
    units, policy = options.get("units"), policy_of(options)
    compute, accumulate = policy["param_dtype"] or options.get("dtype"), options.get("accumulate", 1)
    reduce = policy["reduce_dtype"] or compute
    in_backward = options.get("reshard_after_forward", True)
    mesh, data_axes = resolution.one_mesh, roles.data
    mesh_at = {axis: at for at, axis in enumerate(mesh.axis_names)}
    experts = expert_modules(resolution.metadata.parameters)
    transfers: list[Transfer] = []
    for unit, tensors in units_of(resolution.metadata, units).items():
        sums: dict[tuple[str, str, str, int | None], int] = {}
        for tensor in tensors:
            layout = resolution.layouts.get(tensor.name)
            if layout is None:  # a Sharder's
                continue
            # Of plain chunks rank 0 has the most elements.
            special = any(isinstance(spec, SpecialShard) and not isinstance(spec, StageShard) for spec in layout.specs)
            first = prod(layout.local_shape(layout.first_rank, tensor.shape))
            stage = next(iter(layout.stages.values()), None)
            numel = max(map(prod, layout.local_shapes(tensor.shape))) if special else first
            # experts stay on their expert axis: tokens travel
            stays = roles.axes("expert") if tensor.name.rpartition(".")[0] in experts else ()
            for axis in data_axes:
                if mesh.axis_size(axis) == 1 or (axis in stays and role(tensor, layout, axis) != "whole"):
                    continue
                trains, is_whole = tensor.requires_grad and tensor.is_floating, role(tensor, layout, axis) == "whole"
                size = tensor.bytes_of(numel, compute)
                reduced = tensor.bytes_of(numel, reduce)
                if is_whole and trains and not tensor.sparse_grad:
                    key = axis, "all_reduce", "gradients", stage
                    sums[key] = sums.get(key, 0) + reduced
                if is_whole:
                    continue
                # Other data axes that shard the tensor are gathered first, from the last axis to the first.
                later = [other for other in data_axes if other not in stays and mesh_at[other] >= mesh_at[axis]]
                pieces = prod(mesh.axis_size(other) for other in later if role(tensor, layout, other) != "whole")
                moved = (("all_gather", "parameters", size), ("reduce_scatter", "gradients", reduced))
                for op, what, own in moved if trains else moved[:1]:
                    sums[axis, op, what, stage] = sums.get((axis, op, what, stage), 0) + own * pieces
        for (axis, op, what, stage), size in sums.items():
            uses = accumulate * (1 + (bool(unit) and in_backward)) if op == "all_gather" else accumulate
            uses = 1 if op != "all_gather" and options.get("sync") == "last" else uses
            transfers.append(Transfer(axis, op, what, unit, size, uses, mesh.axis_size(axis), stage))
    check_effects(
        options,
        shards=any(each.op == "all_gather" for each in transfers),
        replicates=any(mesh.axis_size(axis) > 1 for axis in data_axes),
    )
    return transfers


def unit_bytes(
    resolution: Resolution, transfers: Iterable[Transfer], units: Iterable[str] | None, dtype: str | None
) -> dict[str, UnitBytes]:
    """Return the bytes of each unit that is gathered along data axes, by its FQN."""
    full: dict[tuple[str, str], int] = {}
    for each in transfers:  # the outermost axis gathers what inner ones have gathered
        full[each.name, each.op] = max(full.get((each.name, each.op), 0), each.full_bytes)
    members = units_of(resolution.metadata, units)
    sizes = {}
    for unit in (unit for unit, op in full if op == "all_gather"):
        trained = [each for each in members[unit] if each.requires_grad and each.name in resolution.layouts]
        shards = 0
        for tensor in trained:
            layout = resolution.layouts[tensor.name]
            shards += tensor.bytes_of(prod(layout.local_shape(layout.first_rank, tensor.shape)), dtype)
        sizes[unit] = UnitBytes(full[unit, "all_gather"], full.get((unit, "reduce_scatter"), 0), shards)
    return sizes
