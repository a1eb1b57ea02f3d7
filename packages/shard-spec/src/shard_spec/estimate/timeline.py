"""Log of a simulated step: its allocations, collectives and products in their order, and the peak of live bytes.

A model repeats one block many times. The first and the last blocks of a kind run; where their parts of the log repeat,
those of the blocks between are written from them. In a step of 80 layers six run, the others hand on their input, and
:func:`expanded` writes their log.

Two blocks are alike if their classes, attributes, tensors and layouts are equal; an attribute that no forward reads may
be a block's number. A block in the middle has to be called as its peer was, with another hidden state of the same form.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise, takewhile
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec.estimate.step_options import block_names, replaced
from shard_spec.plan.resolve import Resolution

FIRST, LAST = 3, 3  # groups of alike blocks that run


@dataclass(eq=False)
class Allocation:
    """Memory of one rank, from its allocation until its last reference goes.

    Attributes:
        size: Bytes.
        stage: Pipeline stage of its rank.
        lasting: A gradient, which stays after the step: the exact count has it.
        gathered: Of FSDP2's groups.
        kept: Bytes that stay from forward to backward, and the stage that saved them.
    """

    size: int
    stage: int
    lasting: bool = False
    gathered: bool = False
    kept: tuple[int, int] = (0, 0)


# "+" or "-" with an allocation; "sent" with a collective and its stage; "flops" with their number and stage; "begin"
# with a moment; "block" with the FQN of a block that starts.
Log: TypeAlias = list[tuple[str, Any]]


class Timeline:
    """Log of one step as it runs, with the peak of live bytes."""

    def __init__(self) -> None:
        self.log: Log = []
        self.stage = 0  # pipeline stage that runs
        self._moments = {"forward"}

    def begin(self, moment: str) -> None:
        """Begin ``"loss"`` or ``"backward"``; the first time counts."""
        if moment not in self._moments:
            self._moments.add(moment)
            self.log.append(("begin", moment))

    def in_backward(self) -> bool:
        """Return True once backward of the model has begun."""
        return "backward" in self._moments

    def enter(self, stage: int) -> int:
        """Make ``stage`` the one that runs, and return the one before."""
        before, self.stage = self.stage, stage
        return before

    def allocate(self, size: int) -> Allocation:
        """Record an allocation of ``size`` bytes on the stage that runs."""
        allocation = Allocation(size, self.stage)
        self.log.append(("+", allocation))
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Record that an allocation is free again."""
        self.log.append(("-", allocation))

    def all(self, kind: str) -> list[Any]:
        """Return the entries of one kind."""
        return [value for each, value in self.log if each == kind]

    def peak(self, logits: Allocation | None, stage: int) -> tuple[int, str, tuple[int, int], float]:
        """Return a stage's most bytes beside gradients, their moment, and shares: loss with logits, gathered layers.

        Allocations from that of the logits until backward passes it belong to the loss. The last share is that of the
        gradients which are not there yet when most bytes are live, gradients among them.
        """
        events = [(value, 1 if kind == "+" else -1) for kind, value in self.log if kind in "+-"]
        begins, at = {"forward": 0}, 0  # moment -> its first event
        for kind, value in self.log:
            at += kind in "+-"
            if kind == "begin":
                begins[value] = at
        if logits is not None:
            begins["loss"] = min(begins["loss"], events.index((logits, 1)))
        end_of_loss = begins.get("backward", len(events))
        of_loss: set[Allocation] = set()
        live = [0, 0, 0]  # all, of the loss, gathered
        peak, at_peak = [0, 0, 0], 0
        gradients = most = 0  # gradients now; most live bytes with them
        for at, (allocation, sign) in enumerate(events):
            if allocation.stage != stage:
                continue
            if allocation.lasting:
                gradients += allocation.size * (sign > 0)
                most = max(most, live[0] + gradients)
                continue
            if logits is not None and sign > 0 and begins["loss"] <= at < end_of_loss and not allocation.gathered:
                of_loss.add(allocation)
            for part, counts in enumerate((True, allocation in of_loss, allocation.gathered)):
                live[part] += counts * sign * allocation.size
            most = max(most, live[0] + gradients)
            if live[0] > peak[0]:
                peak, at_peak = list(live), at  # the shares at the same event
        moment = max((begin, moment) for moment, begin in begins.items() if begin <= at_peak)[1]
        to_come = (peak[0] + gradients - most) / gradients if gradients else 0.0
        return peak[0], moment, (peak[1], peak[2]), to_come


# ---- blocks that repeat ----

Groups: TypeAlias = Sequence[tuple[str, ...]]  # FQNs of blocks; each block of a group is like its peers in the others
Item: TypeAlias = tuple[str, Any, Any]  # kind of an entry; what has to be equal in like parts of a log; the value
# "F" or "B" (forward, backward), the group, and the number of the allocation: from the start of forward, or from the
# end of backward, since the last group's parts hold the head at their other ends.
Place: TypeAlias = tuple[str, int, int]


def expanded(log: Log, groups: Groups) -> Log | None:
    """Return the log of a step in which all ``groups`` run, from that of a step without those in the middle.

    A part of the log in forward lasts from the start of a group to that of the next one. A part in backward begins
    where the first allocation of the group's forward is freed. None if parts differ that have to be alike, or something
    else frees an allocation of theirs. At the ends parts may differ: the first block reads an embedding, and the
    gradient that the last block gets was allocated by the head.
    """
    running, more = [*groups[:FIRST], *groups[-LAST:]], len(groups) - FIRST - LAST
    parts = _parts(log, [group[0] for group in running])
    if parts is None:
        return None
    places: dict[Allocation, Place] = {}
    for (half, group), entries in parts.items():
        born = [value for kind, value in entries if kind == "+"]
        start = _first_number(half, entries)
        places.update({each: (half, group, number) for number, each in enumerate(born, start)} if half else {})
    blocks = {name: (group, at) for group, names in enumerate(running) for at, name in enumerate(names)}
    items = {part: [_item(*entry, part[1], places, blocks) for entry in entries] for part, entries in parts.items()}
    for half, alike in ("F", range(1, len(running) - 1)), ("B", range(FIRST - 1, len(running) - 2)):
        first, *others = ([each[:2] for each in items[half, group]] for group in alike)
        if any(other != first for other in others):
            return None
    allocations: dict[Place, Allocation] = {}
    origins: dict[Allocation, Allocation] = {}
    result: Log = []
    between = range(FIRST, FIRST + more)
    *_, last = parts
    for half, group in parts:
        if (half, group) in (last, ("F", len(running) - 1)):
            ending = _with_copies(items[half, group], places, allocations, between, result)
            if ending is None:
                return None
            items[half, group] = ending
        position = group if group < FIRST else group + more
        result += _written(items[half, group], (half, position), groups, allocations, None)
        after = ("F", FIRST - 1), ("B", FIRST)  # parts that the groups in the middle follow
        for copied in () if (half, group) not in after else between if half == "F" else reversed(between):
            result += _written(items[half, FIRST - 1], (half, copied), groups, allocations, origins)
    return result if _is_consistent(log, result, origins) else None


def _parts(log: Log, firsts: list[str]) -> dict[tuple[str, int], Log] | None:
    """Return the parts of a log in their order: before the blocks, forward ("F") and backward ("B") of each group."""
    starts = [at for at, (kind, value) in enumerate(log) if kind == "block" and value in firsts]
    if [log[at][1] for at in starts] != firsts or ("begin", "backward") not in log:
        return None
    # What is freed after the last allocation changes no figure.
    end = max(at for at, (kind, _) in enumerate(log) if kind == "+")
    log = [entry for at, entry in enumerate(log) if at <= end or entry[0] != "-"]
    begin = log.index(("begin", "backward"))
    of_group = {
        value: group
        for group, (start, stop) in enumerate(pairwise([*starts, begin]))
        for kind, value in log[start:stop]
        if kind == "+"
    }
    cuts: dict[int, int] = {}
    for at, (kind, value) in enumerate(log[begin:], begin):
        if kind == "-" and value in of_group:
            cuts.setdefault(of_group[value], at)
    numbers = range(len(firsts))
    bounds = [0, *starts, *(cuts.get(group, -1) for group in reversed(numbers)), len(log)]
    if bounds != sorted(bounds):
        return None
    order = [("", 0), *(("F", group) for group in numbers), *(("B", group) for group in reversed(numbers))]
    return {part: log[start:stop] for part, (start, stop) in zip(order, pairwise(bounds), strict=True)}


def _is_consistent(log: Log, result: Log, origins: dict[Allocation, Allocation]) -> bool:
    """Return True if nothing is freed twice, and each allocation is freed if it or its origin was in ``log``."""
    *_, end = (at for at, (kind, _) in enumerate(log) if kind == "+")
    freed_before = {value for at, (kind, value) in enumerate(log) if kind == "-" and at < end}
    freed = Counter(value for kind, value in result if kind == "-")
    allocated = (value for kind, value in result if kind == "+")
    same = all((each in freed) == (origins.get(each, each) in freed_before) for each in allocated)
    return same and max(freed.values(), default=0) < 2


def _with_copies(
    items: list[Item], places: dict[Allocation, Place], allocations: dict[Place, Allocation], between: range, log: Log
) -> list[Item] | None:
    """Return the end of forward or of the step, which frees what was held of every group: a cache, casts of weights.

    None if there are allocations among it: when each copy was freed then changes a figure.
    """
    freed = {value for kind, value in log if kind == "-"}
    at_of = {places[value]: at for at, (kind, _, value) in enumerate(items) if kind == "-" and value in places}
    result: list[Item] = []
    for at, (kind, equal, value) in enumerate(items):
        result.append((kind, None if kind == "-" else equal, value))
        half, group, number = places.get(value, ("", -1, 0)) if kind == "-" else ("", -1, 0)
        if group == FIRST - 1:
            peer = at_of.get((half, FIRST, number), -1)
            if peer < 0 or any(kind == "+" for kind, *_ in items[min(at, peer) : max(at, peer)]):
                return None
            copies = (allocations[half, copied, number] for copied in between)
            result += [("-", None, each) for each in copies if each not in freed]
    return result


def _first_number(half: str, entries: Sequence[tuple[Any, ...]]) -> int:
    return -sum(1 for entry in entries if entry[0] == "+") if half == "B" else 0


def _item(
    kind: str, value: Any, group: int, places: dict[Allocation, Place], blocks: dict[str, tuple[int, int]]
) -> Item:
    """Return an entry with groups counted from its own."""
    equal = value
    if kind == "+":
        equal = value.size, value.stage, value.lasting, value.gathered, value.kept
    elif kind == "-" and value in places:
        half, at, number = places[value]
        equal = half, at - group, number
    elif kind == "block":
        equal = None
    elif kind == "sent":
        (axis, op, what, name, *rest), parts = value, value[3].split(".")
        inside = (".".join(parts[:at]) for at in range(len(parts), 0, -1))
        block = next((each for each in inside if each in blocks), None)
        if block is not None:
            at, place = blocks[block]
            equal = axis, op, what, (at - group, place, name.removeprefix(block)), *rest
    return kind, equal, value


def _written(
    items: Sequence[Item],
    part: tuple[str, int],
    groups: Groups,
    allocations: dict[Place, Allocation],
    origins: dict[Allocation, Allocation] | None,
) -> Log:
    """Return the entries of a part, which a group in the middle has copies of; ``origins`` are those of the copies."""
    log: Log = []
    (half, group), number = part, _first_number(part[0], items)
    for kind, equal, value in items:
        if kind == "+":
            if origins is not None:
                origin, value = value, replace(value)
                origins[value] = origin
            allocations[half, group, number] = value
            number += bool(half)
        elif kind == "-" and isinstance(equal, tuple):
            value = allocations.get((equal[0], group + equal[1], equal[2]), value)
        elif kind == "sent" and isinstance(equal[3], tuple):
            (axis, op, what, (distance, at, name), *rest) = equal
            value = axis, op, what, groups[group + distance][at] + name, *rest
        log.append((kind, value))
    return log


_LEAST = FIRST + LAST + 2  # groups that are worth a second look
_LONGEST = 6  # blocks in a group: five with a sliding window and one without, for example
_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)  # arguments that are compared by their values
_HIDDEN = object()  # in the place of a block's tensor

Tensors: TypeAlias = dict[str, list[Any]]  # FQN of a block to its tensors and their layouts, without the block's name


def repeated_groups(module: nn.Module, resolution: Resolution) -> list[Groups]:
    """Return groups of consecutive blocks, each like the group before it, in lists of many blocks."""
    siblings: dict[str, list[str]] = {}
    for name in block_names(resolution.metadata):
        siblings.setdefault(name.rpartition(".")[0], []).append(name)
    siblings = {path: names for path, names in siblings.items() if len(names) >= _LEAST}
    tensors: Tensors = {name: [] for names in siblings.values() for name in names}
    for tensor in resolution.metadata.tensors if tensors else ():
        for alias in tensor.aliases:
            parts = alias.split(".")
            block = next((each for at in range(len(parts)) if (each := ".".join(parts[:at])) in tensors), None)
            if block is not None:  # a tied tensor is in no other block
                like = replace(tensor, name=alias.removeprefix(block), aliases=("",))
                shared = tensor.name if len(tensor.aliases) > 1 else ""
                tensors[block].append((like, shared, resolution.layouts.get(tensor.name)))
    repeated: list[Groups] = []
    for names in siblings.values():
        blocks, at = [module.get_submodule(name) for name in names], 0
        while at <= len(names) - _LEAST:
            groups = (_groups_from(names, blocks, at, size, tensors) for size in range(1, _LONGEST + 1))
            first = next((each for each in groups if len(each) >= _LEAST), ())
            repeated += [first] if first else []
            at += sum(map(len, first)) or 1
    return repeated


def _groups_from(names: list[str], blocks: list[nn.Module], start: int, size: int, tensors: Tensors) -> Groups:
    """Return the groups of ``size`` blocks from ``start`` on that are alike."""

    def is_like_next(at: int) -> bool:
        after = at + size
        fits = after < len(names) and tensors[names[at]] == tensors[names[after]]
        return fits and _are_alike(blocks[at], blocks[after], size, frozenset(map(type, blocks[at].modules())))

    alike = size + sum(1 for _ in takewhile(is_like_next, count(start)))
    return [tuple(names[at : at + size]) for at in range(start, start + alike - size + 1, size)]


def _are_alike(block: nn.Module, other: nn.Module, distance: int, classes: frozenset[type]) -> bool:
    """Return True if two modules differ in no attribute but numbers that no forward reads, ``distance`` apart.

    Args:
        block: A block, or a module inside of it.
        other: Its peer.
        distance: Number of blocks from `block` to `other`.
        classes: Classes of the block's modules.
    """
    ours, theirs = vars(block), vars(other)
    if type(block) is not type(other) or ours.keys() != theirs.keys() or block._modules.keys() != other._modules.keys():
        return False
    if "forward" in ours:  # of this very module
        return False
    different = [name for name in ours if name not in _REGISTERED and not _is_equal(ours[name], theirs[name])]
    for name in different:
        numbers = type(ours[name]) is type(theirs[name]) is int and theirs[name] - ours[name] == distance
        if not numbers or any(reads_number(each, name) for each in classes):
            return False
    pairs = zip(block._modules.values(), other._modules.values(), strict=True)
    return all(
        first is second is None
        or (first is not None and second is not None and _are_alike(first, second, distance, classes))
        for first, second in pairs
    )


@functools.cache
def reads_number(kind: type, name: str) -> bool:
    """Return True if code of a module's class may depend on the attribute ``name``, a block's number.

    A cache gets a block's number in ``update``, for its own list, and a test for None tells no two numbers apart.
    """
    functions = (each for base in kind.__mro__ if base is not nn.Module for each in vars(base).values())
    for function in (each for each in functions if inspect.isfunction(each) and each.__name__ != "__init__"):
        try:
            source = textwrap.dedent(inspect.getsource(function))
            nodes = list(ast.walk(ast.parse(source))) if name in source else []
        except (OSError, TypeError, SyntaxError):  # no source: anything may be read
            return True
        calls = [each for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
        updates = [each for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "update"]
        harmless = {id(value) for call in updates for value in (*call.args, *(word.value for word in call.keywords))}
        tests = [each for each in nodes if isinstance(each, ast.Compare)]
        harmless |= {id(each.left) for each in tests if all(isinstance(op, ast.Is | ast.IsNot) for op in each.ops)}
        reads = [each for each in nodes if isinstance(each, ast.Attribute) and each.attr == name]
        if any(id(each) not in harmless for each in reads):
            return True
    return False


def _is_equal(value: Any, other: Any) -> bool:
    if value is other or type(value) is not type(other):
        return value is other
    if isinstance(value, partial):
        value, other = ((each.func, each.args, each.keywords) for each in (value, other))
    try:
        return bool(value == other)
    except Exception:  # tensors and arrays, for example
        return False


class SkippedBlocks:
    """Context of a step in which groups in the middle hand on their input; the others' starts are recorded.

    Args:
        module: The model of the step.
        repeated: Groups of alike blocks.
        timeline: Log of the step.
        axes_of: Model axes that shard a tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        repeated: list[Groups],
        timeline: Timeline,
        axes_of: Callable[[torch.Tensor], frozenset[str]],
    ) -> None:
        self._module, self._repeated, self._timeline, self._axes_of = module, repeated, timeline, axes_of
        self._calls: dict[str, list[Any]] = {}  # FQN of a block of the third group to what it was called with
        self._results: dict[str, tuple[Any, Any]] = {}  # and what it returned: without its tensor, and facts of that
        self._skipped: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for groups in self._repeated:
            for at, group in enumerate(groups):
                for peer, name in zip(groups[FIRST - 1], group, strict=True):
                    block = self._module.get_submodule(name)
                    if FIRST <= at < len(groups) - LAST:
                        block.__dict__["forward"] = partial(self._skip, name, peer)
                        continue
                    # Before other hooks, which may replace the input, and after those that may replace the output.
                    hook = block.register_forward_pre_hook
                    self._handles.append(hook(partial(self._start, name, at), with_kwargs=True, prepend=True))
                    if at == FIRST - 1:
                        self._handles.append(block.register_forward_hook(partial(self._return, name)))

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            self._module.get_submodule(name).__dict__.pop("forward", None)
        for handle in self._handles:
            handle.remove()

    @property
    def names(self) -> list[str]:
        """FQNs of the blocks that do not run, in their order."""
        return [name for groups in self._repeated for group in groups[FIRST:-LAST] for name in group]

    @property
    def is_complete(self) -> bool:
        """True if each of them was called once, in its order and as its peer was."""
        return self._skipped == self.names

    def _facts(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return what a block may tell two hidden states on the meta device apart by."""
        memory = tensor.storage_offset(), tensor.untyped_storage().nbytes(), self._axes_of(tensor)
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, *memory

    def _start(self, name: str, at: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._timeline.in_backward():  # a recomputation is no new start
            self._timeline.log.append(("block", name))
            if at == FIRST - 1:  # only weak references: the log shows when memory is freed
                self._calls[name] = list(map(self._form, _leaves((args, kwargs))))

    def _form(self, leaf: Any) -> tuple[Any, Any]:
        """Return what is identical or equal for equal arguments of two blocks, and facts of a tensor."""
        if isinstance(leaf, _PLAIN):
            return type(leaf), leaf
        return weakref.ref(leaf), self._facts(leaf) if isinstance(leaf, torch.Tensor) else None

    def _return(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor)]
        if len(tensors) == 1 and not self._timeline.in_backward():
            self._results[name] = replaced(output, tensors[0], _HIDDEN), self._facts(tensors[0])

    def _skip(self, name: str, peer: str, *args: Any, **kwargs: Any) -> Any:
        self._skipped.append(name)
        leaves = list(_leaves((args, kwargs)))
        result, facts = self._results[peer]
        pairs = zip(leaves, map(self._form, leaves), self._calls[peer], strict=True)
        # A weak reference is one object as long as its tensor lives: equality would compare the tensors.
        ((hidden, *forms),) = (each for each in pairs if each[1][0] is not each[2][0] or each[1][1] != each[2][1])
        if self._timeline.in_backward() or any(form[1] != facts for form in forms):
            raise ValueError(f"{name} is called otherwise than {peer}")
        return replaced(result, _HIDDEN, hidden)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lists, tuples and dicts hold, keys among it."""
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from (leaf for item in value.values() for leaf in _leaves(item))
    elif isinstance(value, list | tuple):
        yield from (leaf for item in value for leaf in _leaves(item))
    else:
        yield value
