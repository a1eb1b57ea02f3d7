"""Fakes in place of a step's tensors during a trace; the tensors are restored afterwards."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._shared.stale_parameters import is_stale, mark_current, mark_stale
from dp_partition._torch_compat import FakeTensorMode, parameter_like, storage_key, symbolic_scalar
from dp_partition.capture.hyperparameters import Hyperparameter, read_optimizers
from dp_partition.capture.lengths import Sizes, marked_dims, symbolic_fake
from dp_partition.capture.state import StepState, choose_foreach, has_state, initial_state

REACHED = (
    "it is reached through a list or an attribute that the step does not get as an argument",
    "ask the module that is passed to the step: model.parameters()",
)


@dataclass(frozen=True)
class Input:
    """One placeholder: ``kind`` is param, buffer, state, hyper, number or arg. ``key`` that of a state entry."""

    kind: str
    name: str
    key: Any = None
    optimizer: int = 0
    hyper: Hyperparameter | None = None

    @property
    def label(self) -> str:
        if self.kind == "hyper":
            return self.name
        tail = "" if self.key is None else f"_{self.key}"
        return f"{self.kind}_{self.name}{tail}"


@dataclass
class Fakes:
    params: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    states: dict[tuple[int, str], dict[Any, Any]]
    hyperparameters: dict[Hyperparameter, torch.Tensor]
    numbers: dict[Hyperparameter, float]
    args: list[torch.Tensor]
    sizes: Sizes
    given: dict[int, torch.Tensor]


def make_fakes(
    mode: FakeTensorMode,
    step_state: StepState,
    tensors: list[torch.Tensor],
    batch_of: Callable[[torch.Tensor], tuple[int, ...]] | None,
    device: str | None = None,
    marked: tuple[int, ...] = (),
    given: Mapping[int, float] = MappingProxyType({}),
) -> Fakes:
    """Make a fake of every tensor read by the step.

    Args:
        mode: The fake mode.
        step_state: The modules and optimizers.
        tensors: The tensors among the step's arguments.
        batch_of: Traced shape of a tensor argument, from the given tensor; None: its own.
        device: Apparent device of fakes; None: the tensors' own.
        marked: Dims of the arguments with symbolic sizes.
        given: Numbers among the step's arguments that stay live, by position.
    """

    def fake(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        # Counters stay on the CPU, as in optimizers.
        there = tensor.device if device is None or (tensor.device.type == "cpu" and not tensor.ndim) else device
        with mode:
            if shape is None or shape == tuple(tensor.shape):
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=there)
            return torch.empty(shape, dtype=tensor.dtype, device=there)

    sizes: Sizes = {}

    def argument(index: int, tensor: torch.Tensor) -> torch.Tensor:
        if marked_dims(tensor, marked):
            return symbolic_fake(mode, tensor, index, marked, sizes, device or tensor.device)
        return fake(tensor, batch_of(tensor) if batch_of else None)

    params = {fqn: parameter_like(fake(param), param) for fqn, param in step_state.params.items()}
    states: dict[tuple[int, str], dict[Any, Any]] = {}
    fqn_of = {id(param): fqn for fqn, param in step_state.params.items()}
    for number, optimizer in enumerate(step_state.optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                fqn = fqn_of[id(param)]
                state = optimizer.state.get(param)
                if not has_state(state) and not param.requires_grad:
                    continue
                if not has_state(state):
                    with mode:
                        state = initial_state(optimizer, group, params[fqn])
                # Fresh fakes only: one made by torch.tensor() keeps its value and would be burnt in. Numbers are
                # hyperparameters, installed with those of the group.
                states[number, fqn] = {k: fake(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    numbers = {Hyperparameter(*place): value for place, value in read_optimizers(step_state.optimizers).values.items()}
    return Fakes(
        params,
        {fqn: fake(buffer) for fqn, buffer in step_state.buffers.items()},
        states,
        {hyper: symbolic_scalar(mode, number, hyper.label) for hyper, number in numbers.items()},
        numbers,
        [argument(index, tensor).requires_grad_(tensor.requires_grad) for index, tensor in enumerate(tensors)],
        sizes,
        {position: symbolic_scalar(mode, number, f"number{position}") for position, number in given.items()},
    )


def flatten_inputs(fakes: Fakes) -> tuple[list[Input], list[torch.Tensor]]:
    pairs: list[tuple[Input, torch.Tensor]] = [(Input("param", fqn), param) for fqn, param in fakes.params.items()]
    pairs += [(Input("buffer", fqn), buffer) for fqn, buffer in fakes.buffers.items()]
    for (number, fqn), state in fakes.states.items():
        entries = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        pairs += [(Input("state", fqn, key, number), value) for key, value in entries]
    pairs += [(Input("hyper", hyper.label, hyper=hyper), scalar) for hyper, scalar in fakes.hyperparameters.items()]
    pairs += [(Input("number", str(position)), scalar) for position, scalar in fakes.given.items()]
    pairs += [(Input("arg", str(index)), tensor) for index, tensor in enumerate(fakes.args)]
    return [entry for entry, _ in pairs], [tensor for _, tensor in pairs]


@contextlib.contextmanager
def installed(step_state: StepState, fakes: Fakes) -> Iterator[dict[Hyperparameter, Any]]:
    """Install the fakes in modules and optimizers; restore everything afterwards.

    Yields:
        The symbol of each hyperparameter.
    """
    with contextlib.ExitStack() as stack:
        for fqn, module, attribute, is_param in list(step_state.slots()):
            name = step_state.aliases.get(fqn, fqn)
            table: dict[str, Any] = module._parameters if is_param else module._buffers
            stack.callback(table.__setitem__, attribute, table[attribute])  # undone at the end of the trace
            table[attribute] = fakes.params[name] if name in fakes.params else fakes.buffers[name]
        stack.enter_context(_untraced(step_state.params.items()))
        symbols: dict[Hyperparameter, Any] = {}
        for number, optimizer in enumerate(step_state.optimizers):
            _install_optimizer(stack, number, optimizer, step_state, fakes, symbols)
        yield symbols


@contextlib.contextmanager
def _untraced(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Refuse within the block any use of a parameter instead of its fake. Other uses than `.grad` fail in torch."""
    marked = [(fqn, parameter) for fqn, parameter in parameters if not is_stale(parameter)]
    reason, hint = REACHED
    for fqn, parameter in marked:
        mark_stale(parameter, Problem("parameter-in-closure", fqn, found=reason, hint=hint))
    try:
        yield
    finally:
        for _, parameter in marked:
            mark_current(parameter)


def _install_optimizer(
    stack: contextlib.ExitStack,
    number: int,
    optimizer: Optimizer,
    step_state: StepState,
    fakes: Fakes,
    symbols: dict[Hyperparameter, Any],
) -> None:
    fqn_of = {id(param): fqn for fqn, param in step_state.params.items()}
    stack.callback(setattr, optimizer, "state", optimizer.state)
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)  # as torch's optimizers expect
    for (owner, fqn), entries in fakes.states.items():
        if owner == number and entries:
            state[fakes.params[fqn]] = dict(entries)
    optimizer.state = state
    for group in optimizer.param_groups:
        stack.callback(group.update, dict(group))  # undone at the end of the trace
    choose_foreach(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        names = [fqn_of[id(param)] for param in group["params"]]
        group["params"] = [fakes.params[name] for name in names]
        for hyper, scalar in fakes.hyperparameters.items():
            if (hyper.optimizer, hyper.group) != (number, index):
                continue
            if group.get("fused"):  # schemas with plain floats: normalize connects them to the inputs
                value: Any = fakes.numbers[hyper]
            else:
                value = scalar.item()
                symbols[hyper] = getattr(value, "node", None) and value.node.expr
            if hyper.param is not None:
                entries = fakes.states[number, names[hyper.param]]  # the step's values are compared with these
                state[group["params"][hyper.param]][hyper.key] = entries[hyper.key] = value
            elif hyper.element is None:
                group[hyper.key] = value
            else:
                group[hyper.key] = tuple(value if i == hyper.element else old for i, old in enumerate(group[hyper.key]))


def check_memory(inputs: list[Input], tensors: list[torch.Tensor], memory: list[tuple[Any, int]]) -> None:
    """Refuse ``param.data = value``: no operator writes, so a graph would leave it out."""
    hint = "write in place: param.data.mul_(...), param.data.copy_(...)"
    moved = [e for e, t, (_, key) in zip(inputs, tensors, memory, strict=True) if storage_key(t) != key]
    if moved:
        reason = "the step puts other memory in place with .data ="
        raise PlanError([Problem("parameter-replaced", entry.label, found=reason, hint=hint) for entry in moved])
