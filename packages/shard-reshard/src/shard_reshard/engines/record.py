"""Record a loader: the boxes of checkpoint tensors that it copies to this rank.

Checkpoint tensors are on meta, so torch itself computes every view of them. A dispatch mode sees the loader's copies to
the model's memory, and writes nothing there. Operators that are neither views nor copies are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import prod
from operator import mul, sub
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from shard_spec import Box

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.problems import PlanError, Problem, raise_problems
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
from shard_reshard.engines.strided import Landing, StridedCopy, divide, landings, merge_landings, visible
from shard_reshard.group import group_info
from shard_reshard.layout.boxes import BoxShardMap
from shard_reshard.layout.shard_map import Index, by_key
from shard_reshard.lowering import is_contiguous
from shard_reshard.state_dict.plan import Part

aten = torch.ops.aten
_NEW_MEMORY = {aten.clone, aten._to_copy, aten.cat, aten.stack, aten.lift_fresh, aten.flip, aten.constant_pad_nd}
# Of the kind of a weight, without its values, and what they are filled with.
_FILLED_WITH = {aten.empty_like: None, aten.new_empty: None, aten.zeros_like: 0, aten.new_zeros: 0}
# They only move elements, if numbers in them are constants.
_MOVING = {
    aten.cat,
    aten.stack,
    aten.repeat,
    aten.roll,
    aten.index,
    aten.index_select,
    aten.index_put_,
    aten.index_copy_,
}
_WIDE = (torch.float32, torch.float64)
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
        raise_problems(
            Problem(
                "layout-mismatch",
                name,
                found="another shape, other strides, or no longer tied as it was",
                hint="record the loader again: its record was made with other tensors",
            )
            for name, (owner, place) in self._places.items()
            if name not in held or owner not in held or _in_memory(held[name], held[owner]) != place
        )
        return held

    @property
    def filled(self) -> tuple[str, ...]:
        """Names of this rank's parameters and buffers that the loader fills, at least in part."""
        views = [*self._views.values(), *(view for view, _ in self._constants)]
        return tuple(sorted({view.tensor for view in views}))

    def fill_constants(self) -> None:
        """Repeat the loader's constants (padding) in new memory; loaded elements are not changed."""
        held = self._held()
        with torch.no_grad():
            for view, value in self._constants:
                view.of(held).fill_(value)


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
    resolved: _ResolvedWrites | None = None
    problems: tuple[Problem, ...] = ()
    metas: dict[str, torch.Tensor] = {}
    try:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        metas = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in pairs}
        if model is not None:
            recorder = _Recorder(model, metas)
            own = getattr(model, "load_weights", None) or (lambda pairs: model.load_state_dict(dict(pairs)))
            recorder.run(load or own)
            resolved = _ResolvedWrites(recorder)
    except Exception as error:
        problems = problems_of(error)
        if recorder is not None and recorder.problems:
            problems = tuple(recorder.problems)
    shapes = {name: tuple(value.shape) for name, value in metas.items()}
    table = {} if resolved is None else resolved.table()  # a failed rank still joins the gather
    mine = shapes, {name: [view.box for view in views] for name, views in table.items()}, problems
    gathered, rank = [(mine, strict)], 0
    if dist.is_available() and dist.is_initialized():
        members = group_info(group)
        gathered, rank = gathered * members.size, members.rank
        dist.all_gather_object(gathered, (mine, strict), group=members.group)
    everyone = [metadata for metadata, _ in gathered]
    destinations = _destinations(everyone)
    layouts: dict[str, BoxShardMap] = {}
    views: dict[str, _View] = {}
    key_map: dict[str, list[Part] | None] = {name: None for shapes_of, _, _ in everyone for name in shapes_of}
    lost = [name for name in key_map if name not in destinations] if any(asked for _, asked in gathered) else []
    reason, hint = "a tensor that no rank's loader takes", "leave it out, if the model can do without it"
    raise_problems(Problem("unknown-name", name, found=reason, hint=hint) for name in lost)  # the same on every rank
    for name, numbered in destinations.items():
        names = [name if number == 1 else f"{name} ({number})" for number in range(1, len(numbered) + 1)]
        key_map[name] = [Part(target) for target in names]
        for target, (layout, number) in zip(names, numbered, strict=True):
            layouts[target] = layout
            if rank in layout.rank_set:
                views[target] = table[name][number]
    key_map = {name: to for name, to in key_map.items() if to is None or len(to) > 1}
    if resolved is not None:
        recorded = RecordedLayouts(
            layouts, key_map, tuple(resolved.unfilled), model, views, tuple(resolved.constants), resolved.places()
        )
        recorded.fill_constants()
        return recorded
    return RecordedLayouts(layouts, key_map, (), None, views)


def _tensors(model: torch.nn.Module, once: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters and buffers; of DTensors the local tensors, a loader's targets."""
    tensors = [*model.named_buffers(remove_duplicate=once), *model.named_parameters(remove_duplicate=once)]
    return {name: value if (local := dtensor_local(value)) is None else local for name, value in tensors}


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
    writes: list[tuple[torch.Tensor, Any]]  # destination view, source view or a number; the last one counts


class _View(NamedTuple):
    """A box of a checkpoint tensor, and its strided view of a model's tensor."""

    tensor: str
    box: Box | None  # None: a constant
    sizes: Index
    strides: Index
    offset: int  # from the tensor's start

    def of(self, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the view of the present memory of ``held``. Classes of an engine's parameters are left off."""
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
            output = func(*args, **(kwargs or {}))
        if isinstance(output, list | tuple) and not isinstance(output, torch.Size):
            return type(output)(map(cls.recorder.without_values, output))
        return cls.recorder.without_values(output)


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
        self.writes: dict[str, list[tuple[torch.Tensor, Any]]] = {}  # into the model, as into memories
        self.read: set[int] = set()

    def run(self, loader: Callable[[Any], object]) -> None:
        before = {name: storage_key(value) for name, value in self.held.items()}
        try:
            with self:
                loader(self._pairs())
        except PlanError:
            raise
        except Exception as error:
            self.refuse(
                self.current,
                f"{type(error).__name__}: {error}",
                "a loader is recorded on tensors that have no values, see the error above",
            )
            raise
        for name, value in _tensors(self.model).items():
            if storage_key(value) in self.memories or before.get(name, storage_key(value)) != storage_key(value):
                self.refuse(name, "memory that the loader replaces", "copy into the parameter instead")
        if self.problems:  # an error caught by the loader
            raise PlanError(self.problems)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.weights.items():
            self.current = name
            yield name, value
        self.current = "load"

    def _track(
        self, value: torch.Tensor, name: str | None = None, writes: Sequence[tuple[torch.Tensor, Any]] = ()
    ) -> None:
        order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
        shape = tuple(value.shape[dim] for dim in order)
        full = value.untyped_storage().nbytes() // value.element_size()  # `value` may be a view of some rows
        if prod(shape) != full or not is_contiguous(shape, tuple(value.stride(dim) for dim in order)):
            shape = (full,)
        self.memories[storage_key(value)] = _Memory(name, shape, value.dtype, list(writes))
        self.alive.append(value)

    def without_values(self, value: Any) -> Any:
        """Return a tensor of tracked memory as one of our class; other values unchanged."""
        ours = type(value) is torch.Tensor and storage_key(value) in self.memories
        return value.as_subclass(self.kind) if ours else value

    def stop_at(self, found: str, hint: str) -> None:
        """Refuse an operation that needs values, even if the loader catches the error."""
        self.refuse(self.current, found, hint)
        raise PlanError(self.problems)

    def refuse(self, name: str, found: str, hint: str) -> None:
        self.problems.append(Problem("not-recordable", name, found=found, hint=hint))

    def _stop(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        keys = [storage_key(tensor) for tensor in tensors]
        names = [self.memories[key].name or "a copy of a weight" for key in keys if key in self.memories]
        names += [self.owners[key] for key in keys if key in self.owners]
        self.refuse(
            ", ".join(dict.fromkeys(names)),
            str(func),
            "a recorded loader may view, copy, concatenate, pad and cast; compute with weights before or after it",
        )
        raise PlanError(self.problems)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = tensor_leaves((args, kwargs))
        is_recorded = [storage_key(tensor) in self.memories for tensor in tensors]
        written = written_tensors(func, args, kwargs)
        if not any(is_recorded) and not any(storage_key(tensor) in self.owners for tensor in written):
            output = func(*args, **kwargs)
            if self._reads_loaded(packet.__name__, tensors, tensor_leaves(output), written):
                self._stop(func, tensors)
            return output
        if packet is aten.copy_ and is_recorded[1] and not is_wrapper(args[0]):
            target, source, dtype = args[0], args[1], self.memories[storage_key(args[1])].dtype
            owner = self.owners.get(storage_key(target))
            if owner is not None and target.dtype is source.dtype is not dtype is self.held[owner].dtype:
                with suppress(RuntimeError):  # bits of whole elements are copied as elements
                    target, source = target.view(dtype), source.view(dtype)
            source = source.expand(target.shape)
            self.read.add(storage_key(source))
            if owner is not None:
                if target.dtype is not self.held[owner].dtype or target.is_conj() or target.is_neg():
                    self.stop_at(f"a write as {target.dtype} or negated", "write to it as it is")
                self.writes.setdefault(owner, []).append((target.detach(), source))
                return args[0]
            if storage_key(target) not in self.memories:
                self._track(target, writes=_only_value(target))
            # Copies are followed back at the end: what was read must not change afterwards.
            if self._is_unread_copy(target):
                self.memories[storage_key(target)].writes.append((target, source))
                return target
        if packet in (aten.fill_, aten.zero_) and len(tensors) == 1:
            target, value = args[0], args[1] if len(args) > 1 else 0
            owner = self.owners.get(storage_key(target))
            if owner is not None and target.dtype is self.held[owner].dtype:
                self.writes.setdefault(owner, []).append((target.detach(), value))
                return target
            if owner is None and self._is_unread_copy(target):
                self.memories[storage_key(target)].writes.append((target, value))
                return target
        if packet in _MOVING:
            moved = self._by_copies(packet, args, kwargs)
            if moved is not None:
                return moved
        if written or (packet in (aten.cat, aten.stack) and not all(is_recorded)):
            self._stop(func, tensors)
        if packet is aten._to_copy:
            kwargs = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
        elif packet in _FILLED_WITH:
            kwargs = {key: value for key, value in kwargs.items() if key == "dtype"}
        elif len({tensor.is_meta for tensor in tensors}) > 1:
            self._stop(func, tensors)
        output = func(*args, **kwargs)
        results = tensor_leaves(output)
        shared = {storage_key(tensor) for tensor in tensors}
        if results and all(storage_key(result) in shared for result in results):
            return output  # views
        if packet not in _NEW_MEMORY and packet not in _FILLED_WITH:
            self._stop(func, tensors)
        (result,) = results
        if packet in _FILLED_WITH:
            self._track(result, writes=[] if _FILLED_WITH[packet] is None else [(result, _FILLED_WITH[packet])])
            return output
        self.read.update(shared)
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
        elif packet is aten.flip:
            if prod(result.shape[dim] for dim in args[1]) > _MAX_BOXES:
                self.stop_at("a flip along a long dim", "flip weights elsewhere")
            for place in product(*(range(result.shape[dim]) for dim in args[1])):
                into, taken = result, tensors[0]
                for dim, at in zip(args[1], place, strict=True):
                    into, taken = into.narrow(dim, at, 1), taken.narrow(dim, result.shape[dim] - 1 - at, 1)
                writes.append((into, taken))
        elif packet is aten.constant_pad_nd:
            writes += [(result, args[2] if len(args) > 2 else 0), _padded(result, tensors[0], args[1])]
        else:
            writes.append((result, tensors[0]))
        return output

    def _by_copies(self, packet: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Carry out an operator that only moves elements, as copies of slices. None: with these arguments it does more.

        ``w[[2, 0, 1]]`` picks three experts by constant numbers, ``param[[2, 0, 1]] = w`` puts them there, and
        ``torch.cat([w, zeros])`` has a constant beside a weight.
        """
        if packet in (aten.cat, aten.stack):
            return self._joined_with_constants(packet, args, kwargs)
        if kwargs:
            return None
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        source: torch.Tensor = args[0]
        result: torch.Tensor
        if packet is aten.repeat:
            taken = source[(None,) * (len(args[1]) - source.dim())]
            result = source.new_empty([n * size for n, size in zip(args[1], taken.shape, strict=True)])
            if prod(args[1]) > _MAX_BOXES:
                return None
            for repetition in product(*map(range, args[1])):
                into = result
                for dim, at in enumerate(repetition):
                    into = into.narrow(dim, at * taken.shape[dim], taken.shape[dim])
                copies.append((into, taken))
        elif packet is aten.roll:
            if len(args[1]) != 1 or len(args) < 3 or len(args[2]) != 1:
                return None
            dim, size, result = args[2][0], source.shape[args[2][0]], torch.empty_like(source)
            shift = args[1][0] % max(size, 1)
            for at, low, length in ((shift, 0, size - shift), (0, size - shift, shift)):
                copies.append((result.narrow(dim, at, length), source.narrow(dim, low, length)))
        else:
            picked = self._constant_index(packet, args)
            if picked is None:
                return None
            dim, places = picked
            if packet in (aten.index_put_, aten.index_copy_):
                values = args[2] if packet is aten.index_put_ else args[3]
                slices = source.select(dim, 0).shape if places else ()
                values = values.expand([*slices[:dim], len(places), *slices[dim:]])
                for at, place in enumerate(places):
                    self.__torch_dispatch__(aten.copy_.default, (), (source.select(dim, place), values.select(dim, at)))
                return source
            result = source.new_empty([*source.shape[:dim], len(places), *source.shape[dim + 1 :]])
            copies = [(result.select(dim, at), source.select(dim, place)) for at, place in enumerate(places)]
        self.read.add(storage_key(source))
        self._track(result, writes=copies)
        return result

    def _constant_index(self, packet: Any, args: Any) -> tuple[int, list[int]] | None:
        """Return dim and numbers of an operator that indexes one dim by a constant list of different numbers."""
        target = args[0]
        if packet in (aten.index, aten.index_put_):
            indexed = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
            if len(indexed) != 1 or (packet is aten.index_put_ and len(args) > 3 and args[3]):
                return None
            dim, index = indexed[0]
        else:
            dim, index = args[1] % target.dim(), args[2]
        recorded = storage_key(index) in self.memories or storage_key(index) in self.owners
        is_integer = index.dtype in (torch.int64, torch.int32)
        if recorded or index.is_meta or index.dim() != 1 or not is_integer or index.numel() > _MAX_BOXES:
            return None
        places = [place + target.shape[dim] * (place < 0) for place in index.tolist()]
        writes = packet in (aten.index_put_, aten.index_copy_)
        values = args[-1] if packet is aten.index_copy_ else args[2] if writes else target
        if writes and (len(set(places)) < len(places) or storage_key(values) not in self.memories):
            return None
        return (dim, places) if all(0 <= place < target.shape[dim] for place in places) else None

    def _joined_with_constants(self, packet: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Join weights with tensors of one value each. None if all are weights, or another has several values."""
        parts = []
        for part in args[0]:
            if storage_key(part) not in self.memories:
                value = [] if storage_key(part) in self.owners else _only_value(part)
                if not value:
                    return None
                constant = torch.empty(part.shape, dtype=part.dtype, device="meta")
                self._track(constant, writes=[(constant, value[0][1])])
                part = constant
            parts.append(part)
        if all(part is original for part, original in zip(parts, args[0], strict=True)):
            return None
        joined: torch.Tensor = self.__torch_dispatch__(packet.default, (), (parts, *args[1:]), kwargs)
        return joined

    def _is_unread_copy(self, target: torch.Tensor) -> bool:
        memory = self.memories[storage_key(target)]
        return memory.name is None and memory.dtype is target.dtype and storage_key(target) not in self.read

    def _reads_loaded(
        self, name: str, read: list[torch.Tensor], results: list[torch.Tensor], written: list[torch.Tensor]
    ) -> bool:
        """Return True for an operator that would see old values. Recorded writes do not reach the model."""
        loaded = {self.owners[storage_key(tensor)] for tensor in read if storage_key(tensor) in self.owners}
        if not loaded & self.writes.keys():
            return False
        if name.endswith("_like") or name.startswith("new_"):  # uses the metadata only
            return False
        keys = set(map(storage_key, read))
        return bool(written) or not results or not all(storage_key(result) in keys for result in results)


def _only_value(tensor: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
    """Return a loader's own memory with its value before the first write, if one."""
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    with suppress(RuntimeError):  # not every dtype can be compared
        if not flat.is_meta and flat.numel() and bool((flat == flat[0]).all()):
            return [(flat, flat[0].item())]
    return []


def _padded(result: torch.Tensor, source: torch.Tensor, pad: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of a padded tensor that has values, and these. Negative numbers cut off."""
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = result.dim() - 1 - number
        size = source.shape[dim] + min(before, 0) + min(after, 0)
        source = source.narrow(dim, max(-before, 0), size)
        result = result.narrow(dim, max(before, 0), size)
    return result, source


# ---- destinations ----------------------------------------------------------------------------------------------


class _ResolvedWrites:
    """The writes of a recorded loader, followed back to boxes of checkpoint tensors.

    Attributes:
        landed: Model's tensor, checkpoint tensor, and the box with its place.
        constants: Views of the model that the loader fills with a number.
        unfilled: Names of tensors that it does not fill completely.
    """

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder
        self.landed: list[tuple[str, str, Landing]] = []
        self.constants: list[tuple[_View, Any]] = []
        self.unfilled: list[str] = []
        for owner in dict.fromkeys(recorder.owners.values()):
            self._resolve(owner)
        if recorder.problems:
            raise PlanError(recorder.problems)

    def _resolve(self, owner: str) -> None:
        """Follow a tensor's writes back to boxes of checkpoint tensors, the last one first."""
        recorder, held = self.recorder, self.recorder.held[owner]
        most = len(self.landed) + len(self.constants) + _MAX_BOXES * len(recorder.writes.get(owner, ()))
        start = int(held.storage_offset())
        hidden = torch.zeros(held.untyped_storage().nbytes() // held.element_size(), dtype=torch.bool, device="cpu")
        for target, source in reversed(recorder.writes.get(owner, [])):
            region = hidden.as_strided(target.shape, target.stride(), target.storage_offset())
            if bool(region.all()):  # later ones have replaced it
                continue
            copy = StridedCopy.of(source if isinstance(source, torch.Tensor) else target, target, -start)
            covered = 0
            for origin, landing, dtypes in self._origins(owner, source, copy):
                covered += prod(landing.sizes)
                # By way of float32 or float64 nothing shorter is rounded: no float, no whole number.
                exact = {target.dtype, *dtypes[:1], *(t for t in _WIDE if dtypes and dtypes[0].itemsize < t.itemsize)}
                rounded = [dtype for dtype in dtypes if dtype not in exact]
                if rounded and origin != 0:
                    name = origin if isinstance(origin, str) else owner
                    recorder.refuse(name, f"a cast by way of {rounded[0]}", "cast to the parameter's dtype at once")
                # Of the box of a checkpoint tensor, or of a constant, what no later write has replaced.
                seen = hidden.as_strided(landing.sizes, landing.strides, landing.offset + start)
                for part in visible(landing, seen):
                    if isinstance(origin, str):
                        self.landed.append((owner, origin, part))
                    else:
                        self.constants.append((_View(owner, None, *part[1:]), origin))
                    if len(self.landed) + len(self.constants) > most:
                        recorder.refuse(
                            owner, f"more than {_MAX_BOXES} boxes", "record a loader that copies larger regions"
                        )
                        raise PlanError(recorder.problems)
            if covered != target.numel() and not recorder.problems:
                recorder.refuse(
                    owner, "values that no checkpoint tensor has", "fill them in with fill_(), beside the copies"
                )
            region.fill_(True)
        for name, value in recorder.held.items():
            if recorder.owners[storage_key(value)] == owner:
                marks = hidden.as_strided(value.shape, value.stride(), value.storage_offset())
                self.unfilled += [] if bool(marks.all()) else [name]

    def _origins(self, owner: str, source: Any, copy: StridedCopy) -> Iterator[tuple[Any, Landing, list[torch.dtype]]]:
        """Yield the boxes of a copy, each with a checkpoint tensor's name or a number, and the dtypes on its way."""
        if not isinstance(source, torch.Tensor):
            sizes, strides = tuple(dim[0] for dim in copy.dims), tuple(dim[2] for dim in copy.dims)
            yield source, Landing((0,) * len(sizes), sizes, strides, copy.target), []
            return
        memory = self.recorder.memories[storage_key(source)]
        if source.dtype is not memory.dtype or source.is_conj() or source.is_neg():
            self.recorder.refuse(
                memory.name or owner, f"bits read as {source.dtype}, or negated", "copy weights as they are"
            )
            return
        wanted = list(landings(copy, memory.shape))
        if memory.name is not None:
            yield from ((memory.name, landing, [memory.dtype]) for landing in wanted)
            return
        for target, inner in reversed(memory.writes):
            # Boxes of the copy's memory that were written, with where their values came from.
            values = inner if isinstance(inner, torch.Tensor) else target
            for filled in landings(StridedCopy.of(target, values), memory.shape):
                rest: list[Landing] = []
                for landing in wanted:
                    inside, outside = divide(landing, filled)
                    rest += outside
                    if inside is not None:  # both copies as one
                        at = sum(map(mul, map(sub, inside.start, filled.start), filled.strides))
                        dims = tuple(zip(inside.sizes, filled.strides, inside.strides, strict=True))
                        part = StridedCopy(dims, filled.offset + at, inside.offset)
                        for origin, first, dtypes in self._origins(owner, inner, part):
                            yield origin, first, [*dtypes, memory.dtype]
                wanted = rest

    def table(self) -> dict[str, list[_View]]:
        """Return the destinations by checkpoint name, as few strided views."""
        by_pair = by_key(((name, owner), landing) for owner, name, landing in self.landed)
        views: dict[str, list[_View]] = {}
        for (name, owner), landed in by_pair.items():
            views.setdefault(name, []).extend(
                _View(owner, Box(landing.start, landing.sizes), *landing[1:]) for landing in merge_landings(landed)
            )
        return views

    def places(self) -> dict[str, tuple[str, object]]:
        """Return the places in memory of all loaded or filled tensors, by every name."""
        held = _tensors(self.recorder.model, False)
        owners = {name: self.recorder.owners.get(storage_key(value), "") for name, value in held.items()}
        return {
            name: (at, _in_memory(held[name], held[at])) for name, at in owners.items() if at in self.recorder.writes
        }


# ---- one answer for all ranks ---------------------------------------------------------------------------------


def _destinations(everyone: Sequence[Any]) -> dict[str, list[tuple[BoxShardMap, int]]]:
    """Return, for each checkpoint tensor, as few destinations as cover those on all ranks.

    A destination is a layout, and the number of the view on each of its ranks. The problems of all ranks are raised.
    """
    problems = [problem for _, _, layouts in everyone for problem in layouts]
    shapes: dict[str, Index] = {}
    for rank, (metadata, _, _) in enumerate(everyone):
        for name, shape in metadata.items():
            if shapes.setdefault(name, shape) != shape:
                differs = f"rank {rank}: shape {shape}, before: {shapes[name]}"
                problems.append(
                    Problem("ranks-disagree", name, found=differs, hint="pass the same weights on all ranks")
                )
    raise_problems(dict.fromkeys(problems))
    destinations: dict[str, list[tuple[BoxShardMap, int]]] = {}
    for name, shape in shapes.items():
        held = {rank: table[name] for rank, (_, table, _) in enumerate(everyone) if name in table}
        for number in range(max(map(len, held.values()), default=0)):
            views = {rank: of_rank[number] for rank, of_rank in held.items() if number < len(of_rank)}
            # One destination for all ranks; where their boxes overlap, one for each.
            for groups in [list(views)], [[rank] for rank in views]:
                with suppress(PlanError):
                    boxes = [{rank: [views[rank]] for rank in group} for group in groups]
                    destinations.setdefault(name, []).extend([(BoxShardMap(shape, b, True), number) for b in boxes])
                    break
    return destinations
