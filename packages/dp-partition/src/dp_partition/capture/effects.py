"""What a step does beside its tensors, which a graph of it would leave out or burn in.

The Python of a step runs while it is traced and not again. A counter in a closure, a number from `random`, a scheduler
that is stepped, a list that collects losses: each would silently stop, so each is looked for and refused.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from dp_partition._torch_compat import FakeTensor, TorchDispatchMode, latest_trace_node, pytree
from dp_partition.problems import PlanError, Problem

_SENTINEL = 0x5EED_5EED  # a seed that no caller means
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


# ---- hyperparameters ------------------------------------------------------------------------------------------------


@contextmanager
def param_groups_kept(optimizers: list[Optimizer]) -> Iterator[None]:
    """Raise if the block changes a parameter group: schedulers belong between steps.

    Raises:
        PlanError: With every value that is another one (code ``hyperparameter-changed``).
    """
    groups = [
        (f"optim{n}.param_groups[{i}]", g) for n, o in enumerate(optimizers) for i, g in enumerate(o.param_groups)
    ]
    before = [dict(group) for _, group in groups]
    yield
    hint = "call the scheduler, or change the value, between steps: it is read again at every call"
    problems = [
        Problem("hyperparameter-changed", f"{name}[{key!r}]", found="the step changes it", hint=hint)
        for (name, group), old in zip(groups, before, strict=True)
        for key in sorted(old.keys() | group.keys())
        if group.get(key) is not old.get(key)
    ]
    if problems:
        raise PlanError(problems, "the step changes hyperparameters")


# ---- random numbers of other makers ---------------------------------------------------------------------------------


@contextmanager
def random_numbers_watched(name: str) -> Iterator[None]:
    """Raise if the block draws from Python's or NumPy's generator, or seeds torch's; put all three back.

    Raises:
        PlanError: With every generator that was touched (code ``python-random``).
    """
    numpy: Any = sys.modules.get("numpy")
    python_before = random.getstate()
    numpy_before = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SENTINEL)
        torch_before = torch.get_rng_state()
        try:
            yield
        finally:
            touched = {
                "Python's random numbers": random.getstate() != python_before,
                "NumPy's random numbers": numpy is not None and _differ(numpy.random.get_state(), numpy_before),
                "the seed of torch's generator": not torch.equal(torch.get_rng_state(), torch_before),
            }
            random.setstate(python_before)
            if numpy is not None:
                numpy.random.set_state(numpy_before)
    hint = "draw with torch in the step (rng= says from which stream), or pass the number in a tensor"
    problems = [
        Problem("python-random", name, found=f"the step uses {what}, once and for all", hint=hint)
        for what, used in touched.items()
        if used
    ]
    if problems:
        raise PlanError(problems, "the step draws random numbers that a graph would burn in")


def _differ(one: tuple[Any, ...], other: Any) -> bool:
    return any(bool((a != b).any()) if hasattr(a, "any") else a != b for a, b in zip(one, other, strict=True))


# ---- values that leave the step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """A value that an operator made: its tensor or symbol, not held, and its node."""

    value: weakref.ref[Any]
    node: str
    what: str


class Results(TorchDispatchMode):
    """Remembers the operators of a step, and without holding them the values that they make.

    Args:
        inputs: The tensors that the step starts with.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = {id(tensor): f"input {number}" for number, tensor in enumerate(inputs)}
        self.operators: list[str] = []
        self.constants: list[torch.Tensor] = []
        self.tensors: list[_Made] = []
        self.numbers: list[_Made] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        self.operators.append(f"{func}({', '.join([self._shown(leaf) for leaf in leaves])})")
        given = {id(value) for value in leaves}  # what is written in place was made before
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and id(value) not in given:
                made = f"a tensor of shape {tuple(value.shape)}"
                self.tensors.append(_Made(weakref.ref(value), "", f"{made} made by {func}"))
            elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                node = latest_trace_node()  # the number itself is wrapped ever anew; its symbol lasts
                self.numbers.append(_Made(weakref.ref(value.node), node, f"a number read with {func}"))
        return result

    def _shown(self, value: Any) -> str:
        """An argument, such that the same call shows the same: numbers by value, the step's inputs by their place."""
        if not isinstance(value, torch.Tensor):
            return repr(value) if isinstance(value, _PLAIN) else type(value).__name__  # a repr may hold an address
        if not isinstance(value, FakeTensor):  # a constant: its values are compared once tracing is over
            self.constants.append(value)
        return self.inputs.get(id(value)) or f"{value.dtype}{tuple(value.shape)}"

    def check_gone(self, name: str, graph: fx.Graph, optimizer: frozenset[str]) -> None:
        """Raise if something leaves the step beside its result: a list or a cache keeps it, a log shows it.

        Args:
            name: The step's.
            graph: What was traced; a number that it uses lives for that.
            optimizer: The nodes of optimizers' steps, whose numbers may be nobody's.

        Raises:
            PlanError: With up to three of the values (code ``value-kept``).
        """
        used = optimizer.union(node.name for node in graph.nodes if node.users)
        made = [*self.tensors, *(number for number in self.numbers if number.node not in used)]
        if any(one.value() is not None for one in made):
            gc.collect()  # what only cycles hold is nobody's
        hint = "return it from the step, and keep or print it outside"
        problems = [
            Problem("value-kept", name, found=f"{one.what} leaves the step", hint=hint)
            for one in made
            if one.value() is not None
        ]
        if problems:
            raise PlanError(problems[:3], "the step keeps values of its own, which a graph would not renew")


# ---- what another run would do otherwise ----------------------------------------------------------------------------


def check_repeatable(name: str, runs: Sequence[Results], returned: Sequence[Any]) -> None:
    """Raise unless two calls of a step, one after the other, did the same.

    Args:
        name: The step's.
        runs: What each call did.
        returned: The flattened Python values that each returned.

    Raises:
        PlanError: With the first place where they part (code ``python-state``).
    """
    first, second = ([*run.operators, f"return {leaves}"] for run, leaves in zip(runs, returned, strict=True))
    parted = next((f"first {one}, then {other}" for one, other in zip(first, second, strict=False) if one != other), "")
    pairs = zip(*(run.constants for run in runs), strict=False)
    if not parted and not all(one is other or torch.equal(one, other) for one, other in pairs):
        parted = "a tensor that it makes from Python numbers has other values"
    if parted:
        hint = "keep what changes from step to step in a buffer, or pass it to the step in a tensor"
        problem = Problem("python-state", name, found=f"called twice it does two things: {parted}", hint=hint)
        raise PlanError(problem, "the step depends on Python state, which a graph would burn in")
