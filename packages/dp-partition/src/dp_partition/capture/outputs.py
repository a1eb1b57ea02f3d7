"""Outputs of a step's graph: its results, and new tensors for old ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.capture.fakes import Fakes
from dp_partition.capture.hyperparameters import Hyperparameter
from dp_partition.capture.phases import Phases
from dp_partition.capture.state import StepState

_SYMBOLS = (torch.SymInt, torch.SymFloat)


@dataclass(frozen=True)
class Output:
    """One value returned by the graph: for the user, or to install.

    ``kind`` is user, buffer, state, hyper (``key`` is the `Hyperparameter`), or argument: the gradient left by backward
    on a tensor argument.
    """

    kind: str
    name: str = ""
    key: Any = None
    optimizer: int = 0


@dataclass(frozen=True)
class _Position:
    """Position in the flattened result of a value returned by the graph."""

    index: int


@dataclass(frozen=True)
class Returned:
    """The outputs of one call, without their values.

    Attributes:
        outputs: Kind of each value returned by the graph.
        user_leaves: The step's result, flattened; tensors and symbols are replaced by their position in the outputs.
        user_spec: Structure of the result.
    """

    outputs: list[Output]
    user_leaves: list[Any]
    user_spec: Any

    def result(self, values: tuple[Any, ...]) -> Any:
        leaves = [values[leaf.index] if isinstance(leaf, _Position) else leaf for leaf in self.user_leaves]
        return pytree.tree_unflatten(leaves, self.user_spec)


def collect_outputs(
    result: Any, step_state: StepState, fakes: Fakes, phases: Phases, written: dict[Hyperparameter, Any]
) -> tuple[list[Any], Returned]:
    """Return the step's result, then its new buffers, state entries, hyperparameters and gradients of arguments.

    Raises:
        PlanError: ``python-state`` for remaining gradients, ``parameter-replaced``, and ``python-state`` for
            optimizer state with other changing Python values than numbers.
    """
    left = [fqn for fqn, param in fakes.params.items() if param.grad is not None]
    if left and not phases.cleared and phases.backward:
        reason = "gradient left for the next call"
        hint = "call optim.zero_grad() in the step, and pass the optimizer to it as an argument"
        raise PlanError([Problem("python-state", fqn, found=reason, hint=hint) for fqn in left])
    leaves, spec = pytree.tree_flatten(result)
    values: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            leaves[position] = _Position(len(values))  # filled in after each run
            values.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    outputs = [Output("user")] * len(values)
    hypers = [(value, Output("hyper", key=hyper)) for hyper, value in written.items()]
    of_arguments = [(x.grad, Output("argument", str(n))) for n, x in enumerate(fakes.args) if x.is_leaf]
    gradients = [(value, output) for value, output in of_arguments if value is not None]
    for value, output in chain(_new_buffers(step_state, fakes), _new_states(step_state, fakes), hypers, gradients):
        values.append(value.detach() if isinstance(value, torch.Tensor) else value)
        outputs.append(output)
    return values, Returned(outputs, leaves, spec)


def _new_buffers(step_state: StepState, fakes: Fakes) -> Iterator[tuple[torch.Tensor, Output]]:
    for fqn, module, attribute, is_param in step_state.slots():
        table: dict[str, Any] = module._parameters if is_param else module._buffers
        name = step_state.aliases.get(fqn, fqn)
        old: torch.Tensor = fakes.params[name] if name in fakes.params else fakes.buffers[name]
        if table[attribute] is old:  # unchanged, or updated in place
            continue
        if is_param:
            raise PlanError(Problem("parameter-replaced", fqn, found="the step puts a new parameter in place"))
        if table[attribute] is not None:
            yield table[attribute], Output("buffer", fqn)


def _new_states(step_state: StepState, fakes: Fakes) -> Iterator[tuple[Any, Output]]:
    for number, optimizer in enumerate(step_state.optimizers):
        for fqn, param in fakes.params.items():
            before = fakes.states.get((number, fqn), {})
            for key, value in optimizer.state.get(param, {}).items():
                old = before.get(key)
                # A constant is right where it is the first value: the next call's graph has the number as an input.
                is_first = type(value) in (int, float) and (old is None or isinstance(old, _SYMBOLS))
                if isinstance(value, (torch.Tensor, *_SYMBOLS)) or is_first:
                    if value is not old:  # updates in place need no output
                        yield value, Output("state", fqn, key, number)
                elif value != old and not (old is None and value is None):
                    hint = "keep what changes in tensors or numbers"
                    reason = f"optimizer state {key!r} is a Python {type(value).__name__} that every step changes"
                    raise PlanError(Problem("python-state", fqn, found=reason, hint=hint))
