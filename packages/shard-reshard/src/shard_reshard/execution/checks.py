"""Checks of local tensors before transfers, and guards for replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from operator import attrgetter, mul
from typing import Any

import torch

from shard_reshard._shared.problems import Problem, refusal
from shard_reshard._torch_compat import (
    PLAIN_TYPES,
    CompiledGuards,
    is_fake,
    is_transforming,
    is_wrapper,
    modes,
    waited_for,
)
from shard_reshard.layout.shard_map import shortened
from shard_reshard.plan import Plan

Shards = torch.Tensor | Sequence[torch.Tensor] | None


def as_list(shards: Shards) -> list[torch.Tensor]:
    """Return local tensors as a list."""
    if shards is None:
        return []
    if isinstance(shards, torch.Tensor):
        return [shards if type(shards) in PLAIN_TYPES else waited_for(shards)]
    item: Any = shards  # of any type
    listed = list(item) if isinstance(item, Iterable) else [item]
    for value in listed:
        if not isinstance(value, torch.Tensor):
            raise refusal(
                "wrong-type",
                found=f"a {type(value).__qualname__}",
                hint="pass a tensor, a list of tensors for several boxes, or None",
            )
    return [value if type(value) in PLAIN_TYPES else waited_for(value) for value in listed]


def as_result(shapes: Sequence[object], tensors: Sequence[torch.Tensor]) -> Shards:
    """Return one tensor as itself, none as None, several as a list."""
    if len(shapes) == 1:
        return tensors[0]
    return list(tensors) if shapes else None


def local_problems(plan: Plan, rank: int, tensors: Sequence[torch.Tensor], side: str = "src") -> list[Problem]:
    """Return the differences between local tensors of ``rank`` and the plan's ``side``."""
    layout, dtype = (plan.src, plan.dtype) if side == "src" else (plan.dst, plan.out_dtype)
    shapes = layout.local_shapes(rank)
    where = f"rank {rank}, {'source' if side == 'src' else 'out'}"
    if len(shapes) != len(tensors):
        reason = f"{len(tensors)} local tensors, the layout has {len(shapes)}"
        if rank not in layout.rank_set:
            reason += f" here: it is on ranks {shortened(layout.ranks)}"
        return [Problem("argument-count", where, found=reason, hint=f"one tensor for each box, of shapes {shapes}")]
    problems: list[Problem] = []

    def add(code: str, found: str, hint: str) -> None:
        problems.append(Problem(code, which, found=found, hint=hint))

    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        which = where if len(shapes) == 1 else f"{where} {number}"
        if tensor.is_nested:  # it has neither a shape nor strides to look at
            add("unsupported-tensor", "a nested tensor", "pass a padded tensor, or its values() by a plan of their own")
            continue
        if tuple(tensor.shape) != shape:
            hint = "pass the local tensor, and the global shape with shape="
            add("shape-mismatch", f"shape {tuple(tensor.shape)}, the layout of {plan.shape} needs {shape}", hint)
        if str(tensor.dtype) != f"torch.{dtype}":
            hint = "plan for this dtype, or pass dtype= to cast on the way"
            add("dtype-mismatch", f"{tensor.dtype}, the plan is for {dtype}", hint)
        if hasattr(tensor, "device_mesh"):
            add("unsupported-tensor", "a DTensor", "pass its to_local(), or use redistribute()")
        elif type(tensor) not in PLAIN_TYPES and is_wrapper(tensor):
            hint = "pass the tensors that it wraps, each by a plan of its own"
            add("unsupported-tensor", f"a {type(tensor).__qualname__}, which wraps other tensors", hint)
        if type(tensor) not in PLAIN_TYPES and is_fake((tensor,)) and not is_fake(()):
            hint = "run the call under the FakeTensorMode too, on all ranks; or pass real tensors"
            add("no-data", "a fake tensor where no fake mode is on", hint)
        elif tensor.is_meta:
            add("no-data", *_META)
        elif not has_memory(tensor):
            add("no-data", *FREED)
        if tensor.layout != torch.strided:
            add("unsupported-tensor", f"a {tensor.layout} tensor", "only dense tensors can be moved")
    return problems


ONE_MEMORY_HINT = "two values cannot stay in one memory; leave one of them out (key_map={name: None}), or untie them"
# What was found, and the remedy.
_META = "a tensor on the meta device", "give it memory first: to_empty(), or the values of a checkpoint"
FREED = (
    "a tensor whose storage was freed or shrunk",
    "call it while the memory is there: inside of what gathers or loads the parameter",
)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return False if the storage ends before the tensor. Sharded data parallelism frees it between uses."""
    if not tensor.numel() or tensor.layout != torch.strided or type(tensor) not in PLAIN_TYPES or is_fake((tensor,)):
        return True
    strides = tensor.stride()  # no Python loop: every replay calls this
    last = sum(map(mul, tensor.shape, strides)) - sum(strides)
    return int(tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def destination_problems(
    outs: Sequence[torch.Tensor], names: Sequence[str], sources: Sequence[torch.Tensor], in_place: bool = True
) -> list[Problem]:
    """Return the reasons that the destinations ``names`` of a call cannot be filled.

    ``in_place``: they are filled while sources are still read; else at the end, by copies.
    """
    problems: list[Problem] = []

    def add(code: str, found: str, hint: str) -> None:
        problems.append(Problem(code, name, found=found, hint=hint))

    for tensor, name in zip(outs, names, strict=True):  # noqa: B007  # read in `add`
        if tensor.is_meta:  # what is written there is lost, without an error
            add("no-data", *_META)
        elif not has_memory(tensor):
            add("no-data", *FREED)
        if overlaps_itself(tensor):
            hint = "an expanded tensor has one place for several elements; pass a tensor of its own"
            add("invalid-out", f"strides {tensor.stride()}", hint)
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            hint = "write to it under torch.inference_mode(), or pass its clone()"
            add("invalid-out", "a tensor made in inference mode", hint)
        if in_place and (tensor.is_conj() or tensor.is_neg()):
            hint = "its memory holds other values than it shows; pass a tensor of its own"
            add("invalid-out", "a view that conjugates or negates on reading", hint)
        if tensor.requires_grad and torch.is_grad_enabled():
            # Torch refuses in-place writes to a leaf; any other tensor would keep the graph of its old values.
            hint = "write into parameters under torch.no_grad(); pass the detach() of what was computed"
            add("invalid-out", f"a {'leaf' if tensor.is_leaf else 'result'} that requires grad", hint)
    if is_fake((*outs, *sources)) or problems:
        return problems
    for first, second in sharing(outs, sources if in_place else ()):
        if second < len(outs):
            reason = f"memory of {names[first]}" if names[first] != names[second] else "memory of another one"
            problems.append(Problem("invalid-out", names[second], found=reason, hint=ONE_MEMORY_HINT))
        else:
            hint = "the source is still read while out is written; pass other memory"
            problems.append(Problem("invalid-out", names[first], found="memory of a source", hint=hint))
    return list(dict.fromkeys(problems))


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; for a fake one a number of its own."""
    return id(tensor) if is_fake((tensor,)) else tensor.data_ptr()


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the key shared by tensors of one memory and one view of it."""
    return address(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements share memory, as in expanded tensors and sliding windows."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if tensor.numel() else ():
        if size > 1 and stride <= reach:
            starts, length = _runs(tensor)
            return bool((starts.diff() < length).any())
        reach += stride * (size - 1)
    return False  # every stride exceeds the reach of smaller ones


def sharing(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> list[tuple[int, int]]:
    """Return the pairs with common bytes: two of ``tensors``, or one of each list.

    Pairs of positions, the smaller one first; ``others`` are counted after ``tensors``.
    """
    everything, spans = [*tensors, *others], []
    for at, tensor in enumerate(everything):
        if tensor.numel():
            last = sum(map(mul, tensor.shape, tensor.stride())) - sum(tensor.stride())
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), str(tensor.device), at))
    pairs: list[tuple[int, int]] = []
    reaching: list[tuple[int, int, str, int]] = []
    for span in sorted(spans):
        reaching = [other for other in reaching if other[1] > span[0]]
        for other in reaching:
            first, second = sorted((other[3], span[3]))
            if first < len(tensors) and other[2] == span[2]:
                (starts, length), (others_starts, others_length) = _runs(everything[first]), _runs(everything[second])
                # Runs of the second that begin before one of the first ends, minus those that end before it begins:
                # spans may overlap in gaps only.
                before = torch.searchsorted(others_starts, starts - others_length, right=True)
                if bool((torch.searchsorted(others_starts, starts + length) > before).any()):
                    pairs.append((first, second))
        reaching.append(span)
    return sorted(pairs)


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the addresses of a tensor's contiguous runs, ascending, and their length in bytes."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    length = 1  # in elements
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    starts = torch.zeros(1, dtype=torch.int64, device="cpu")  # one per run, not per element
    for stride, size in dims:
        starts = (starts.unsqueeze(-1) + torch.arange(size, device="cpu") * stride).view(-1)
    return starts.sort().values * tensor.element_size() + tensor.data_ptr(), length * tensor.element_size()


def not_transformed(what: str) -> None:
    """Refuse ``what`` under a transformation of torch.func: not even an error header could be sent."""
    if is_transforming():
        raise refusal(
            "not-differentiable",
            what,
            found="a transformation of torch.func",
            hint="call it outside of vmap, grad and their like",
        )


_STRIDED = {torch.strided}
_is_nested = attrgetter("is_nested")
_data_ptr = torch.Tensor.data_ptr


class Match(IntEnum):
    """Result of comparing the tensors of a call with a guard."""

    NONE = 0
    METADATA = 1  # types, shapes, strides, dtypes, devices, flags, modes, ties: checks of single tensors stay valid
    MEMORY = 2  # memory too: views and overlap checks stay valid


class TensorGuards:
    """Guards on all tensors of a call, built by `record_guards`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._modes = modes()
        self._pointers = list(map(_data_ptr, tensors))
        first: dict[int, int] = {}  # torch's guards reject duplicates
        self._twins = [(at, other) for at, t in enumerate(tensors) if (other := first.setdefault(id(t), at)) != at]
        self._firsts = list(first.values())
        firsts = [tensors[at] for at in self._firsts]
        self._alike = CompiledGuards(*firsts, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def match(self, tensors: Sequence[torch.Tensor]) -> Match:
        """Compare the tensors of a call, under the current modes.

        A view that negates or conjugates on reading has the address of its base, but other dispatch keys.
        """
        if len(tensors) != len(self._pointers) or modes() != self._modes:
            return Match.NONE
        if True in map(_is_nested, tensors):
            return Match.NONE  # torch's guards read sizes; for a nested tensor that aborts the process
        once = tensors  # without duplicates
        if self._twins:
            if any(tensors[a] is not tensors[b] for a, b in self._twins):
                return Match.NONE
            once = [tensors[at] for at in self._firsts]
        if not self._alike(*once):
            return Match.NONE
        pointers = list(map(_data_ptr, tensors))
        if pointers == self._pointers:
            return Match.MEMORY
        # The same tensors are tied: addresses of both calls correspond one to one.
        pairs = set(zip(pointers, self._pointers, strict=True))
        tied_alike = len(pairs) == len(set(pointers)) == len(set(self._pointers))
        return Match.METADATA if tied_alike else Match.NONE


def record_guards(tensors: Sequence[torch.Tensor]) -> TensorGuards | None:
    """Return guards on these tensors. None if some have no memory or no strides to compare."""
    if not PLAIN_TYPES.issuperset(map(type, tensors)) or is_fake(tensors) or True in map(_is_nested, tensors):
        return None
    return TensorGuards(tensors) if {tensor.layout for tensor in tensors} <= _STRIDED else None
