"""Python values that a trace burns in: what modules keep beside their tensors, and what would not be traced at all.

A number, flag or name in an attribute of a module is a constant of the graph. It is part of what a trace depends on, so
that changing it between calls traces again; a step that changes it by itself is refused, because the graph would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dp_partition.capture.constants import PLAIN_TYPES, FunctionConstants, can_be_compared, frozen, names_of_forward
from dp_partition.problems import PlanError, Problem

if TYPE_CHECKING:
    from dp_partition.capture.subject import Subject

_PLAIN = (bool, int, float, complex, str, type(None))  # what a step must not put in place of another
_BARE = "pass the plain model, as it is before DDP, FSDP or tensor parallelism are applied to it"
_OF_TORCH = frozenset(vars(nn.Module()))


class Structure:
    """Modules, their hooks, and the names of their tensors and attributes.

    Args:
        roots: The modules that the step is given.

    Attributes:
        modules: The roots and all modules in them.
        current: What was seen last; hashable.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.roots = list(roots)
        self.modules: list[nn.Module] = []
        self.current: tuple[Any, ...] | None = None
        self.look()

    def look(self) -> bool:
        """Look again; whether anything is other than before."""
        if self._read() == self.current:  # with all children the same, these are all modules
            return False
        self.modules = [module for root in self.roots for module in root.modules()]
        self.current = self._read()
        return True

    def _read(self) -> tuple[Any, ...]:
        return tuple(
            [
                (
                    module,
                    len(vars(module)),
                    tuple(module._modules.values()),
                    tuple(module._parameters),
                    tuple(module._buffers),
                    tuple(module._forward_hooks),
                    tuple(module._forward_pre_hooks),
                    tuple(module._backward_hooks),
                )
                for module in self.modules
            ]
        )


class Attributes:
    """What modules keep beside parameters and buffers: numbers and names, functions, tensors, and containers of them.

    Args:
        structure: The modules.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.built: Any = None
        self.names: set[str] = set()
        self.places: list[tuple[Any, str]] = []
        self.hooks: list[FunctionConstants] = []

    def read(self) -> tuple[Any, ...]:
        """How the modules are built, and type and value of each attribute; a config that several share is read once."""
        if self.structure.current is not self.built:
            self.built = self.structure.current
            self.names = {name for kind in set(map(type, self.structure.modules)) for name in names_of_forward(kind)}
            self.places = [
                (vars(module), key)
                for module in self.structure.modules
                for key, value in vars(module).items()
                if key not in _OF_TORCH and self._counts(module, key, value)
            ]
            kinds_of_modules = dict.fromkeys(k for module in self.structure.modules for k in type(module).__mro__)
            self.places += [  # class attributes that forward reads
                (vars(kind), key)
                for kind in kinds_of_modules
                if issubclass(kind, nn.Module) and kind.__module__.split(".")[0] != "torch"
                for key in names_of_forward(kind)
                if type(vars(kind).get(key)) in PLAIN_TYPES
            ]
            self.hooks = [
                FunctionConstants(hook)
                for module in self.structure.modules
                for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
                for hook in table.values()
            ]
        values = [table.get(key) for table, key in self.places]
        kinds = tuple(map(type, values))
        known: dict[int, Any] = {}
        for value, kind in zip(values, kinds, strict=True):
            if kind not in PLAIN_TYPES and id(value) not in known:
                known[id(value)] = frozen(value, self.names)
        plain = [one if kind in PLAIN_TYPES else known[id(one)] for one, kind in zip(values, kinds, strict=True)]
        return self.built, kinds, tuple(plain), tuple([hook.read() for hook in self.hooks])

    def _counts(self, module: nn.Module, key: str, value: Any) -> bool:
        """Return whether it is plain, or can be compared and is named by the code of forward."""
        if isinstance(value, nn.Module) or not can_be_compared(value):
            return False
        return type(value) in PLAIN_TYPES or key == "forward" or key in names_of_forward(type(module))


@contextmanager
def attributes_kept(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """After the block every attribute of the modules is what it was before.

    Raises:
        PlanError: With every number, flag, name or tensor that the block replaced (code ``python-state``). What is
            only filled in, such as a cache that was None, is no state.
    """
    tables = [
        (".".join(part for part in (prefix, path) if part), vars(module), dict(vars(module)))
        for prefix, root in modules
        for path, module in root.named_modules()
    ]
    problems: list[Problem] = []
    try:
        yield
    finally:
        for base, table, before in tables:
            for key in [key for key in (*table, *before) if table.get(key) is not before.get(key)]:
                if key != "training":
                    problems += _state(f"{base}.{key}" if base else key, before.get(key), table.get(key))
                    _put_back(table, before, key)
    if problems:
        raise PlanError(problems, "the step changes attributes of its modules")


def _state(name: str, old: Any, new: Any) -> list[Problem]:
    if old is None or not isinstance(old, (*_PLAIN, torch.Tensor)) or (isinstance(old, _PLAIN) and old == new):
        return []
    told = "a tensor" if isinstance(old, torch.Tensor) else f"the Python value {old!r}"
    hint = "keep it in a buffer, or pass it to the step as an argument"
    found = f"the step replaces {told}, and a graph would not"
    return [Problem("python-state", name, found=found, hint=hint)]


def _put_back(table: dict[str, Any], before: dict[str, Any], key: str) -> None:
    if key in before:
        table[key] = before[key]
    else:
        table.pop(key, None)


def check_traceable(subject: Subject) -> None:
    """Raise for tensors whose meaning a trace would lose.

    Raises:
        PlanError: For hooks on parameters (``parameter-hooks``), parameters that are distributed already
            (``already-parallel``) and tensors that lie in one another's memory (``shared-memory``).
    """
    problems = [
        Problem("already-parallel", name, found="is wrapped in DistributedDataParallel", hint=_BARE)
        for prefix, root in subject.modules
        for name, module in root.named_modules(prefix=prefix)
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    for name, param in subject.params.items():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            hint = "remove the hook, and change p.grad in the step, between backward() and optim.step()"
            problems.append(
                Problem("parameter-hooks", name, found="has a gradient hook, which no trace sees", hint=hint)
            )
        if isinstance(param, DTensor):
            problems.append(Problem("already-parallel", name, found="is a DTensor", hint=_BARE))
    problems += _shared_memory({**subject.params, **subject.buffers})
    if problems:
        raise PlanError(problems, "the model cannot be placed")


def _shared_memory(tensors: dict[str, Any]) -> list[Problem]:
    """Different tensors with overlapping memory: they would come apart when they are placed."""
    owners: dict[int, list[tuple[str, int, int]]] = {}
    problems = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or not tensor.numel():
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        end = start + (last + 1) * tensor.element_size()
        known = owners.setdefault(tensor.untyped_storage()._cdata, [])
        for other, from_, to in known:
            if start < to and from_ < end:
                hint = "tie them by assigning the same Parameter, or give one of them a copy"
                problems.append(Problem("shared-memory", name, found=f"shares memory with {other}", hint=hint))
        known.append((name, start, end))
    return problems


__all__ = ["Attributes", "Structure", "attributes_kept", "check_traceable"]
