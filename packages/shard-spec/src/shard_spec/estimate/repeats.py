"""Blocks of a model that are alike, and a step in which those in the middle hand on their input.

A model of 80 layers runs six of them; :func:`shard_spec.estimate.timeline.expanded` writes the log of the others. Two
blocks are alike if their classes, attributes, tensors and layouts are equal; an attribute that no forward reads may be
a block's number. A block in the middle has to be called as its peer was, with another hidden state of the same form.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec.estimate.fully_shard import block_names, replaced
from shard_spec.estimate.timeline import FIRST, LAST, Groups, Timeline
from shard_spec.plan.resolve import Resolution

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
