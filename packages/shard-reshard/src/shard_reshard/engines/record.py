"""Record a loader: the boxes of checkpoint tensors that a model's loading code copies to this rank.

Checkpoint tensors are on meta, so torch itself computes every view of them. A dispatch mode sees the loader's copies to
the model's memory, and writes nothing there. Operators that are neither views nor copies are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from shard_spec import Box

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import (
    DispatchMode,
    as_plain_tensors,
    dtensor_local,
    is_wrapper,
    refuse_addresses,
    storage_key,
    tensor_leaves,
    written_tensors,
)
from shard_reshard.engines.strided import Landing, StridedCopy, intersect, join_along, landings, merge_landings
from shard_reshard.execution.exchange import INTEGERS
from shard_reshard.group import group_info
from shard_reshard.layout.boxes import BoxShardMap, FusedShardMap
from shard_reshard.layout.shard_map import Index
from shard_reshard.lowering.memory_layout import is_contiguous
from shard_reshard.state_dict.plan import Part

aten = torch.ops.aten
_NEW_MEMORY = {aten.clone, aten._to_copy, aten.cat, aten.stack, aten.empty_like, aten.new_empty, aten.lift_fresh}
_MAX_BOXES = 4096  # of one tensor on one rank


@dataclass(frozen=True)
class RecordedLayouts:
    """Destinations of a model's own loader: arguments of `StateDictResharder` and `reshard_state_dict`.

    Attributes:
        layouts: Layout by destination name, the same on every rank: ``dst_layouts``. A checkpoint tensor is a
            destination of its own name; a second or separate destination has a number appended.
        key_map: Checkpoint names with several destinations, or with none: ``key_map``.
        unfilled: Names of this rank's parameters and buffers that the loader does not fill completely.
    """

    layouts: dict[str, BoxShardMap]
    key_map: dict[str, Any]
    unfilled: tuple[str, ...]
    _model: torch.nn.Module | None = field(repr=False)
    _views: dict[str, _View] = field(repr=False)
    _constants: tuple[tuple[_View, Any], ...] = field(default=(), repr=False)
    _places: dict[str, tuple[str, object]] = field(default_factory=dict, repr=False)

    @property
    def out(self) -> dict[str, torch.Tensor]:
        """Views of the model's present memory by destination name: ``out``.

        Raises:
            PlanError: ``layout-mismatch``: shapes, strides or ties of tensors have changed since the loader ran.
        """
        held = self._held()
        return {name: view.of(held) for name, view in self._views.items()}

    def _held(self) -> dict[str, torch.Tensor]:
        held = {} if self._model is None else _tensors(self._model, False)
        hint = "record the loader again: what it brings where is known of other tensors"
        found = "another shape, other strides, or no longer tied as it was"
        problems = [
            Problem("layout-mismatch", name, found=found, hint=hint)
            for name, (owner, place) in self._places.items()
            if name not in held or owner not in held or _in_memory(held[name], held[owner]) != place
        ]
        if problems:
            raise PlanError(problems)
        return held

    @property
    def filled(self) -> tuple[str, ...]:
        """Names of this rank's parameters and buffers that the loader fills, at least in part."""
        views = [*self._views.values(), *(view for view, _ in self._constants)]
        return tuple(sorted({view.tensor for view in views}))

    def fill_constants(self) -> None:
        """Repeat the loader's constants (padding) in new memory; loaded elements are not changed."""
        held = self._held()
        for view, value in self._constants:
            own, target = held[view.tensor], view.of(held)
            if target.is_meta:
                continue
            loaded = torch.zeros(own.untyped_storage().nbytes() // own.element_size(), dtype=torch.bool)
            for other in self._views.values():
                if other.tensor == view.tensor:
                    place = own.storage_offset() + other.offset
                    loaded.as_strided(other.sizes, other.strides, place).fill_(True)
            mask = ~_of_storage(loaded, target).to(target.device)
            bits = INTEGERS.get(target.itemsize, target.dtype)  # masked_fill_ supports fewer dtypes than fill_
            with torch.no_grad():
                target.view(bits).masked_fill_(mask, target.new_empty(()).fill_(value).view(bits))


def record_layouts(
    model: torch.nn.Module | None,
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    load: Callable[[Any], object] | None = None,
    group: dist.ProcessGroup | None = None,
    strict: bool = False,
) -> RecordedLayouts:
    """Record the destinations of each checkpoint tensor in a model's own loading code; a collective.

    The loader runs on tensors without storage; the model's memory is unchanged, except that the loader's constants
    beside its copies (padding) are filled in.

    Args:
        model: This rank's model; None on ranks without one.
        weights: Checkpoint tensors by name, on any device: shapes and dtypes are used, values are not read.
        load: The loader, called with pairs of name and tensor. None: the model's ``load_weights`` if it has one, else
            its ``load_state_dict``.
        group: The union group of senders and receivers; None is the default group, or this process alone.
        strict: Report checkpoint tensors that no rank's loader takes, on all ranks if any of them sets it; False leaves
            such tensors out.

    Raises:
        PlanError: On every rank: ``not-recordable`` with the tensor's name for arithmetic, reads of values, casts that
            round twice, and replaced memory; ``unknown-name`` with ``strict=True``.
    """
    recorder: _Recorder | None = None
    problems: tuple[Problem, ...] = ()
    metas: dict[str, torch.Tensor] = {}
    try:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        metas = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in pairs}
        if model is not None:
            recorder = _Recorder(model, metas)
            own = getattr(model, "load_weights", None) or (lambda pairs: model.load_state_dict(dict(pairs)))
            recorder.run(load or own)
    except Exception as error:
        problems = problems_of(error)
        if recorder is not None and recorder.problems:
            problems = tuple(recorder.problems)
    shapes = {name: tuple(value.shape) for name, value in metas.items()}
    table = {} if recorder is None or problems else recorder.table()  # a failed rank still joins the gather
    mine = shapes, {name: [view.boxes for view in found] for name, found in table.items()}, problems
    gathered, rank = [(mine, strict)], 0
    if dist.is_available() and dist.is_initialized():
        members = group_info(group)
        gathered, rank = gathered * members.size, members.rank
        dist.all_gather_object(gathered, (mine, strict), group=members.group)
    everyone = [known for known, _ in gathered]
    destinations = _destinations(everyone)
    layouts: dict[str, BoxShardMap] = {}
    views: dict[str, _View] = {}
    key_map: dict[str, list[Part] | None] = {name: None for known, _, _ in everyone for name in known}
    lost = [name for name in key_map if name not in destinations] if any(asked for _, asked in gathered) else []
    if lost:  # the same on every rank
        found, hint = "a tensor that no rank's loader takes", "leave it out, if the model can do without it"
        raise PlanError([Problem("unknown-name", name, found=found, hint=hint) for name in lost])
    for name, numbered in destinations.items():
        names = [name if number == 1 else f"{name} ({number})" for number in range(1, len(numbered) + 1)]
        key_map[name] = [Part(target) for target in names]
        for target, destination in zip(names, numbered, strict=True):
            layouts[target] = destination.layout
            if rank in destination.views:
                views[target] = table[name][destination.views[rank]]
    key_map = {name: to for name, to in key_map.items() if to is None or len(to) > 1}
    if recorder is not None:
        recorded = RecordedLayouts(
            layouts, key_map, recorder.unfilled(), model, views, recorder.constant_views(), recorder.places()
        )
        recorded.fill_constants()
        return recorded
    return RecordedLayouts(layouts, key_map, (), None, views)


def _tensors(model: torch.nn.Module, once: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters and buffers; of DTensors the local tensors, a loader's targets."""
    found = [*model.named_buffers(remove_duplicate=once), *model.named_parameters(remove_duplicate=once)]
    return {name: value if (local := dtensor_local(value)) is None else local for name, value in found}


def _in_memory(tensor: torch.Tensor, owner: torch.Tensor) -> object:
    """Return a tensor's shape, strides, and offset from a tensor of the same memory."""
    shift = int(tensor.storage_offset()) - int(owner.storage_offset())
    return tuple(tensor.shape), tensor.stride(), storage_key(tensor) == storage_key(owner), shift


# ---- recording ------------------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    """Memory without values: of a checkpoint tensor, or of a loader's copy."""

    name: str | None
    shape: Index  # dims in memory order
    dtype: torch.dtype
    writes: list[tuple[torch.Tensor, torch.Tensor]]  # destination view, source view


class _View(NamedTuple):
    """Boxes of a checkpoint tensor with one strided view of a model's tensor as destination."""

    tensor: str
    boxes: tuple[Box, ...]
    dim: int
    sizes: Index
    strides: Index
    offset: int  # from the tensor's start

    def of(self, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the view of the present memory of ``held``; without the classes of an engine's parameters."""
        own = held[self.tensor].detach().as_subclass(torch.Tensor)
        return own.as_strided(self.sizes, self.strides, own.storage_offset() + self.offset)


class _WithoutValues(torch.Tensor):
    """A checkpoint tensor on meta, or a result of one; refuses addresses and other threads.

    A dispatch mode sees neither: on meta every address is 0, and other threads have modes of their own.
    """

    recorder: ClassVar[_Recorder]  # each recorder has a class of its own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.current_thread() is not cls.recorder.thread:
            cls.recorder.stop_at(f"{func.__name__} in another thread", "load in the thread that records")
        if func is torch.Tensor.data_ptr:
            cls.recorder.stop_at("data_ptr() of a weight", "compare names, or tensors by `is`")
        with as_plain_tensors():
            found = func(*args, **(kwargs or {}))
        if isinstance(found, list | tuple) and not isinstance(found, torch.Size):
            return type(found)(map(cls.recorder.without_values, found))
        return cls.recorder.without_values(found)


class _Recorder(DispatchMode):
    def __init__(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.model, self.problems, self.current = model, list[Problem](), "load"
        self.thread = threading.current_thread()
        self.kind: Any = type("WithoutValues", (_WithoutValues,), {"recorder": self})
        self.held = {name: value for name, value in _tensors(model).items() if not is_wrapper(value)}
        self.owners: dict[int, str] = {}
        for name, value in self.held.items():
            self.owners.setdefault(storage_key(value), name)
        self.memories: dict[int, _Memory] = {}
        self.alive: list[torch.Tensor] = []  # keeps storages alive: their identities may be reused
        for name, value in weights.items():
            refuse_addresses(value)  # its storage refuses too
            self._track(value, name)
        self.weights = {name: self.without_values(value) for name, value in weights.items()}
        self.writes: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # into the model
        self.constants: list[tuple[str, torch.Tensor, Any]] = []
        self.read: set[int] = set()
        # By tensor and position: a later write to one position replaces the earlier one.
        self.landed: dict[tuple[str, object], tuple[str, Landing]] = {}

    def run(self, loader: Callable[[Any], object]) -> None:
        before = {name: storage_key(value) for name, value in self.held.items()}
        try:
            with self:
                loader(self._pairs())
        except PlanError:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            self._refuse(
                self.current, found, "a loader is recorded on tensors that have no values, see the error above"
            )
            raise
        for name, value in _tensors(self.model).items():
            if storage_key(value) in self.memories or before.get(name, storage_key(value)) != storage_key(value):
                self._refuse(name, "memory that the loader replaces", "copy into the parameter instead")
        if self.problems:  # an error caught by the loader
            raise PlanError(self.problems)
        for owner, target, source in self.writes:
            self._resolve(owner, target, source)
        if self.problems:
            raise PlanError(self.problems)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.weights.items():
            self.current = name
            yield name, value
        self.current = "load"

    def _track(self, value: torch.Tensor, name: str | None = None) -> None:
        order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
        shape = tuple(value.shape[dim] for dim in order)
        full = value.untyped_storage().nbytes() // value.element_size()  # `value` may be a view of some rows
        if prod(shape) != full or not is_contiguous(shape, tuple(value.stride(dim) for dim in order)):
            shape = (full,)
        self.memories[storage_key(value)] = _Memory(name, shape, value.dtype, [])
        self.alive.append(value)

    def without_values(self, value: Any) -> Any:
        """Return a tensor of tracked memory as one of our class; other values unchanged."""
        ours = type(value) is torch.Tensor and storage_key(value) in self.memories
        return value.as_subclass(self.kind) if ours else value

    def stop_at(self, found: str, hint: str) -> None:
        """Refuse an operation that needs values, even if the loader catches the error."""
        self._refuse(self.current, found, hint)
        raise PlanError(self.problems)

    def _refuse(self, name: str, found: str, hint: str) -> None:
        self.problems.append(Problem("not-recordable", name, found=found, hint=hint))

    def _stop(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        keys = [storage_key(tensor) for tensor in tensors]
        names = [self.memories[key].name or "a copy of a weight" for key in keys if key in self.memories]
        names += [self.owners[key] for key in keys if key in self.owners]
        hint = "a loader is recorded where it takes views, copies, concatenates and casts; transform weights elsewhere"
        self._refuse(", ".join(dict.fromkeys(names)), str(func), hint)
        raise PlanError(self.problems)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = tensor_leaves((args, kwargs))
        known = [storage_key(tensor) in self.memories for tensor in tensors]
        written = written_tensors(func, args, kwargs)
        if not any(known) and not any(storage_key(tensor) in self.owners for tensor in written):
            found = func(*args, **kwargs)
            if self._reads_loaded(packet.__name__, tensors, tensor_leaves(found), written):
                self._stop(func, tensors)
            return found
        if packet is aten.copy_ and known[1] and not is_wrapper(args[0]):
            target, source = args[0], args[1].expand(args[0].shape)
            self.read.add(storage_key(source))
            owner = self.owners.get(storage_key(target))
            if owner is not None:
                self.writes.append((owner, target.detach(), source))
                return target
            if storage_key(target) not in self.memories:
                self._track(target)
            memory = self.memories[storage_key(target)]
            # Copies are traced back at the end: read copies must not change, nor positions be written twice.
            if memory.name is None and storage_key(target) not in self.read and not _written(memory, target):
                memory.writes.append((target, source))
                return target
        if packet in (aten.fill_, aten.zero_) and not any(known):
            owner, value = self.owners[storage_key(args[0])], args[1] if len(args) > 1 else 0
            if not bool(_of_storage(self._marked(owner), args[0]).any()):
                self.constants.append((owner, args[0].detach(), value))
                return args[0]
        if written or (packet in (aten.cat, aten.stack) and not all(known)):
            self._stop(func, tensors)
        if packet is aten._to_copy:
            kwargs = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
        elif packet in (aten.empty_like, aten.new_empty):
            kwargs = {key: value for key, value in kwargs.items() if key == "dtype"}
        elif len({tensor.is_meta for tensor in tensors}) > 1:
            self._stop(func, tensors)
        found = func(*args, **kwargs)
        results = tensor_leaves(found)
        shared = {storage_key(tensor) for tensor in tensors}
        if results and all(storage_key(result) in shared for result in results):
            return found  # views
        if packet not in _NEW_MEMORY:
            self._stop(func, tensors)
        self.read.update(shared)
        (result,) = results
        self._track(result)
        writes = self.memories[storage_key(result)].writes
        if packet is aten.cat:
            dim, at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)), 0
            for tensor in tensors:
                if tensor.numel():
                    writes.append((result.narrow(dim, at, tensor.shape[dim]), tensor))
                    at += tensor.shape[dim]
        elif packet is aten.stack:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            writes += [(result.select(dim, at), tensor) for at, tensor in enumerate(tensors)]
        elif packet not in (aten.empty_like, aten.new_empty):
            writes.append((result, tensors[0]))
        return found

    def _reads_loaded(
        self, name: str, read: list[torch.Tensor], results: list[torch.Tensor], written: list[torch.Tensor]
    ) -> bool:
        """Return True for an operator that would see old values: recorded writes do not reach the model."""
        loaded = {self.owners[storage_key(tensor)] for tensor in read if storage_key(tensor) in self.owners}
        if not loaded & {owner for owner, *_ in [*self.writes, *self.constants]}:
            return False
        if name.endswith("_like") or name.startswith("new_"):  # uses the metadata only
            return False
        keys = set(map(storage_key, read))
        return bool(written) or not results or not all(storage_key(result) in keys for result in results)

    # ---- destinations -----------------------------------------------------------------------------------------

    def _resolve(self, owner: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Trace a write back to boxes of checkpoint tensors."""
        start, covered, boxes = self.held[owner].storage_offset(), 0, 0
        copy = StridedCopy.of(source, target, -start)
        for name, landing, dtypes in self._origins(owner, source, copy):
            ends = dtypes[0], target.dtype
            rounded = [dtype for dtype in dtypes if dtype not in ends and not _has_values_of(dtype, dtypes[0])]
            if rounded:
                self._refuse(name, f"a cast by way of {rounded[0]}", "cast to the parameter's dtype at once")
            if target.dtype is not self.held[owner].dtype or target.is_conj() or target.is_neg():
                self._refuse(owner, f"a write as {target.dtype} or negated", "write to it as it is")
            self.landed[owner, landing.target] = name, landing
            covered, boxes = covered + prod(landing.sizes), boxes + 1
            if boxes > _MAX_BOXES:
                self._refuse(name, f"more than {_MAX_BOXES} boxes", "record a loader that copies larger regions")
                return
        if covered != target.numel() and not self.problems:
            self._refuse(owner, "values that no checkpoint tensor has", "fill them in with fill_(), beside the copies")

    def _origins(
        self, owner: str, source: torch.Tensor, copy: StridedCopy
    ) -> Iterator[tuple[str, Landing, list[torch.dtype]]]:
        memory = self.memories[storage_key(source)]
        if source.dtype is not memory.dtype or source.is_conj() or source.is_neg():
            self._refuse(memory.name or owner, f"bits read as {source.dtype}, or negated", "copy weights as they are")
            return
        if memory.name is not None:
            for landing in landings(copy, memory.shape):
                yield memory.name, landing, [memory.dtype]
            return
        wanted = list(landings(copy, memory.shape))
        for target, inner in memory.writes:
            # Written boxes of the copy's memory, with the sources of their values.
            for filled in landings(StridedCopy.of(target, inner), memory.shape):
                for landing in wanted:
                    part = intersect(filled, landing)
                    if part is not None:
                        for name, found, dtypes in self._origins(owner, inner, part):
                            yield name, found, [*dtypes, memory.dtype]

    def table(self) -> dict[str, list[_View]]:
        """Return the destinations by checkpoint name, as few strided views."""
        by_pair: dict[tuple[str, str], list[Landing]] = {}
        for (owner, _), (name, landing) in self.landed.items():
            by_pair.setdefault((name, owner), []).append(landing)
        found: dict[str, list[_View]] = {}
        for (name, owner), landed in by_pair.items():
            found.setdefault(name, []).extend(_View(owner, *view) for view in join_along(merge_landings(landed)))
        return found

    def _marked(self, owner: str, constants: bool = False) -> torch.Tensor:
        """Mark the elements of an owner's storage that are loaded, or also filled with constants."""
        held = self.held[owner]
        marks = torch.zeros(held.untyped_storage().nbytes() // held.element_size(), dtype=torch.bool)
        written = [(at, target) for at, target, _ in [*self.writes, *(self.constants if constants else ())]]
        for at, target in written:
            if at == owner:
                _of_storage(marks, target).fill_(True)
        return marks

    def constant_views(self) -> tuple[tuple[_View, Any], ...]:
        """Return the views filled with constants, and the constants."""
        found = []
        for owner, target, value in self.constants:
            offset = int(target.storage_offset()) - int(self.held[owner].storage_offset())
            found.append((_View(owner, (), 0, tuple(target.shape), tuple(target.stride()), offset), value))
        return tuple(found)

    def places(self) -> dict[str, tuple[str, object]]:
        """Return the memory layout of loaded or filled tensors, by all of their names."""
        filled = {owner for owner, *_ in [*self.writes, *self.constants]}
        held = _tensors(self.model, False)
        owners = {name: self.owners.get(storage_key(value), "") for name, value in held.items()}
        return {name: (at, _in_memory(held[name], held[at])) for name, at in owners.items() if at in filled}

    def unfilled(self) -> tuple[str, ...]:
        """Return names of tensors with elements that are neither loaded nor filled."""
        by_owner: dict[str, list[str]] = {}
        for name, value in self.held.items():
            by_owner.setdefault(self.owners[storage_key(value)], []).append(name)
        found: list[str] = []
        for owner, names in by_owner.items():
            marks = self._marked(owner, constants=True)
            found += [name for name in names if not bool(_of_storage(marks, self.held[name]).all())]
        return tuple(found)


def _has_values_of(dtype: torch.dtype, source: torch.dtype) -> bool:
    """Return True if ``dtype`` represents every value of ``source``."""
    if not dtype.is_floating_point or source.is_complex:
        return False
    wide = torch.finfo(dtype)
    if not source.is_floating_point:
        return source is torch.bool or torch.iinfo(source).max <= 2 / wide.eps
    small = torch.finfo(source)
    return wide.eps <= small.eps and wide.max >= small.max and wide.tiny * wide.eps <= small.tiny * small.eps


def _of_storage(marks: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the marks of a view's elements."""
    return marks.as_strided(view.shape, view.stride(), view.storage_offset())


def _written(memory: _Memory, target: torch.Tensor) -> bool:
    """Return True if a copy was written to some of these elements before."""
    new = list(landings(StridedCopy.of(target, target), memory.shape))
    return any(
        intersect(one, other) is not None
        for before, _ in memory.writes
        for one in landings(StridedCopy.of(before, before), memory.shape)
        for other in new
    )


# ---- consensus ------------------------------------------------------------------------------------------------


class _Destination(NamedTuple):
    layout: BoxShardMap
    views: dict[int, int]  # rank -> index of its view


def _destinations(everyone: Sequence[Any]) -> dict[str, list[_Destination]]:
    """Return, for each checkpoint tensor, as few destinations as cover those on all ranks.

    Raises:
        PlanError: With the problems of all ranks.
    """
    problems = [problem for _, _, told in everyone for problem in told]
    shapes: dict[str, Index] = {}
    for rank, (known, _, _) in enumerate(everyone):
        for name, shape in known.items():
            if shapes.setdefault(name, shape) != shape:
                differs = f"rank {rank}: shape {shape}, before: {shapes[name]}"
                hint = "pass the same weights on all ranks"
                problems.append(Problem("ranks-disagree", name, found=differs, hint=hint))
    if problems:
        raise PlanError(dict.fromkeys(problems))
    found: dict[str, list[_Destination]] = {}
    for name, shape in shapes.items():
        held = {rank: table[name] for rank, (_, table, _) in enumerate(everyone) if name in table}
        for number in range(max(map(len, held.values()), default=0)):
            here = {rank: views[number] for rank, views in held.items() if number < len(views)}
            joined = _joined(shape, here)
            if joined is not None:
                found.setdefault(name, []).append(_Destination(joined, dict.fromkeys(here, number)))
                continue
            for rank, boxes in here.items():
                _place(found.setdefault(name, []), shape, rank, number, boxes)
    return found


def _place(numbered: list[_Destination], shape: Index, rank: int, number: int, boxes: tuple[Box, ...]) -> None:
    for at, (layout, views) in enumerate(numbered):
        if rank not in views and (joined := _joined(shape, {**layout.boxes, rank: boxes})) is not None:
            numbered[at] = _Destination(joined, {**views, rank: number})
            return
    alone = _joined(shape, {rank: boxes})
    assert alone is not None
    numbered.append(_Destination(alone, {rank: number}))


def _joined(shape: Index, boxes: Mapping[int, Sequence[Box]]) -> BoxShardMap | None:
    """Return the layout of each rank's boxes in one tensor; None if they overlap or do not join."""
    dims = range(len(shape)) if any(len(found) > 1 for found in boxes.values()) else (None,)
    for dim in dims:
        try:
            if dim is None:
                return BoxShardMap(shape, boxes, holes=True)
            return FusedShardMap(shape, boxes, dim, holes=True)
        except PlanError:
            continue
    return None
