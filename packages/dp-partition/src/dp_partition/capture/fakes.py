"""Inputs and outputs of a step's graph: fakes in place of its tensors, then its results and new tensors for old ones.

The tensors are restored after the trace.

Symbolic lengths: the sizes of marked dims are symbols while the step is traced, one trace for batches of other sizes.
Arithmetic on them becomes nodes of the graph, and each decision on them, by torch or the step, a guard. Passes work on
the sizes of the first batch: under local semantics they need sizes of parameters and gradients only. That none is left
in the graph is not argued but checked: every length is compared with the step in the first call that has it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._shared.stale_parameters import is_stale, mark_current, mark_stale
from dp_partition._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    parameter_like,
    pytree,
    storage_key,
    symbolic_scalar,
    symbolic_size,
)
from dp_partition.capture.fingerprint import marked_dims
from dp_partition.capture.inputs import SYMBOLS, close_arguments, open_result, read_optimizers
from dp_partition.capture.phases import Phases
from dp_partition.capture.reach import Reach
from dp_partition.capture.state import StepState, choose_foreach, has_state, initial_state
from dp_partition.nodes import GraphValue, Hyperparameter

REACHED = (
    "it is reached through a list or an attribute that the step does not get as an argument",
    "ask the module that is passed to the step: model.parameters()",
)

Sizes = dict[tuple[int, int], Any]
"""Symbol of each marked size, by position among the tensor arguments and by dim."""


@dataclass
class Fakes:
    params: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    states: dict[tuple[int, str], dict[Any, Any]]
    hyperparameters: dict[Hyperparameter, torch.Tensor]
    numbers: dict[Hyperparameter, float]
    args: list[torch.Tensor]
    sizes: Sizes
    live: dict[int, torch.Tensor]


def make_fakes(
    mode: FakeTensorMode,
    step_state: StepState,
    tensors: list[torch.Tensor],
    batch_of: Callable[[torch.Tensor], tuple[int, ...]] | None,
    device: str | None = None,
    marked: tuple[int, ...] = (),
    live: Mapping[int, float] = MappingProxyType({}),
) -> Fakes:
    """Make a fake of every tensor read by the step.

    Args:
        mode: The fake mode.
        step_state: The modules and optimizers.
        tensors: Those among the step's arguments; the sizes of their ``marked`` dims are symbols.
        batch_of: Traced shape of a tensor argument, from the given tensor; None: its own.
        device: Apparent device of fakes; None: the tensors' own.
        marked: See ``tensors``.
        live: Numbers among the step's arguments that stay live, by position.
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
        dims = marked_dims(tensor, marked)
        if not dims:
            return fake(tensor, batch_of(tensor) if batch_of else None)
        shape: list[Any] = list(tensor.shape)
        for dim in dims:
            shape[dim] = symbolic_size(mode, shape[dim], f"size_{index}_{dim}")
            sizes[index, dim] = shape[dim].node.expr
        with mode:
            if tensor.is_contiguous():  # strides of symbols
                return torch.empty(shape, dtype=tensor.dtype, device=device or tensor.device)
            return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)

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
        {position: symbolic_scalar(mode, number, f"number{position}") for position, number in live.items()},
    )


def flatten_inputs(fakes: Fakes) -> tuple[list[GraphValue], list[torch.Tensor]]:
    pairs: list[tuple[GraphValue, torch.Tensor]] = [
        (GraphValue("param", fqn), param) for fqn, param in fakes.params.items()
    ]
    pairs += [(GraphValue("buffer", fqn), buffer) for fqn, buffer in fakes.buffers.items()]
    for (number, fqn), state in fakes.states.items():
        entries = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        pairs += [(GraphValue("state", fqn, key, number), value) for key, value in entries]
    pairs += [(GraphValue("hyper", hyper.label, hyper), scalar) for hyper, scalar in fakes.hyperparameters.items()]
    pairs += [(GraphValue("number", str(position)), scalar) for position, scalar in fakes.live.items()]
    pairs += [(GraphValue("arg", str(index)), tensor) for index, tensor in enumerate(fakes.args)]
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
    own = {fqn: entries for (owner, fqn), entries in fakes.states.items() if owner == number and entries}
    state.update({fakes.params[fqn]: dict(entries) for fqn, entries in own.items()})
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


def check_memory(inputs: list[GraphValue], tensors: list[torch.Tensor], memory: list[tuple[Any, int]]) -> None:
    """Refuse ``param.data = value``: no operator writes, so a graph would leave it out."""
    hint = "write in place: param.data.mul_(...), param.data.copy_(...)"
    moved = [e for e, t, (_, key) in zip(inputs, tensors, memory, strict=True) if storage_key(t) != key]
    if moved:
        reason = "the step puts other memory in place with .data ="
        raise PlanError([Problem("parameter-replaced", entry.label, found=reason, hint=hint) for entry in moved])


def use_first_sizes(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Give ``meta["val"]`` the sizes of the traced batch, for passes that read numbers."""

    def first(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return int(value.node.hint)
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        geometry = (*value.shape, *value.stride(), value.storage_offset())
        if not any(isinstance(item, torch.SymInt) for item in geometry):
            return value
        with mode, torch.no_grad():
            shape, stride = map(first, value.shape), map(first, value.stride())
            filled = torch.empty_strided(tuple(shape), tuple(stride), dtype=value.dtype, device=value.device)
            filled = filled.conj() if value.is_conj() else filled
            return torch._neg_view(filled) if value.is_neg() else filled

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(first, node.meta["val"])


@dataclass(frozen=True)
class _Position:
    """Position in the flattened result of a value returned by the graph."""

    index: int


@dataclass(frozen=True)
class Returned:
    """The outputs of one call, without their values."""

    outputs: list[GraphValue]  # kind of each value returned by the graph
    # the step's result, flattened; tensors and symbols are replaced by their position in the outputs
    user_leaves: list[Any]
    user_spec: Any  # structure of the result
    # positions of the returned values that are means over micro-batches; others come from the mean of the gradients
    means: frozenset[int] = frozenset()

    def mean_leaves(self) -> frozenset[int]:
        """Return the positions in the flattened result of means over micro-batches."""
        places = enumerate(self.user_leaves)
        return frozenset(n for n, leaf in places if isinstance(leaf, _Position) and leaf.index in self.means)

    def result(self, values: tuple[Any, ...]) -> Any:
        leaves = [values[leaf.index] if isinstance(leaf, _Position) else leaf for leaf in self.user_leaves]
        return close_arguments(pytree.tree_unflatten(leaves, self.user_spec))


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
    leaves, spec = pytree.tree_flatten(open_result(result))
    values: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, nn.Module | Optimizer | torch.Tensor):
            hidden = [x for x in Reach(leaf).tensors if isinstance(x, FakeTensor)]
            if hidden:  # in a closure, a generator's frame
                raise PlanError(
                    Problem(
                        "unsupported-argument",
                        "result",
                        found=f"its result has a {type(leaf).__name__} that holds tensors, which no later call "
                        "would fill",
                        hint="return the tensors themselves, or in a dict, a dataclass or an object's attributes",
                    )
                )
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            leaves[position] = _Position(len(values))  # filled in after each run
            values.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    outputs = [GraphValue("user")] * len(values)
    new: list[tuple[Any, GraphValue]] = []
    for fqn, module, attribute, is_param in step_state.slots():
        table: dict[str, Any] = module._parameters if is_param else module._buffers
        name = step_state.aliases.get(fqn, fqn)
        old: Any = fakes.params[name] if name in fakes.params else fakes.buffers[name]
        if table[attribute] is old:  # unchanged, or updated in place
            continue
        if is_param:
            raise PlanError(Problem("parameter-replaced", fqn, found="the step puts a new parameter in place"))
        if table[attribute] is not None:
            new.append((table[attribute], GraphValue("buffer", fqn)))
    for number, optimizer in enumerate(step_state.optimizers):
        for fqn, param in fakes.params.items():
            before = fakes.states.get((number, fqn), {})
            for key, value in optimizer.state.get(param, {}).items():
                old = before.get(key)
                # A constant is right where it is the first value: the next call's graph has the number as an input.
                is_first = type(value) in (int, float) and (old is None or isinstance(old, SYMBOLS))
                if isinstance(value, (torch.Tensor, *SYMBOLS)) or is_first:
                    if value is not old:  # updates in place need no output
                        new.append((value, GraphValue("state", fqn, key, number)))
                elif value != old and not (old is None and value is None):
                    raise PlanError(
                        Problem(
                            "python-state",
                            fqn,
                            found=f"optimizer state {key!r} is a Python {type(value).__name__} that every step changes",
                            hint="keep what changes in tensors or numbers",
                        )
                    )
    new += [(value, GraphValue("hyper", key=hyper)) for hyper, value in written.items()]
    for module in step_state.reads.modules:
        left_there = [(key, value) for key, value in vars(module).items() if isinstance(value, FakeTensor)]
        new += [(value, GraphValue("attribute", key=(module, key))) for key, value in left_there]
    new += [
        (x.grad, GraphValue("argument", str(n))) for n, x in enumerate(fakes.args) if x.is_leaf and x.grad is not None
    ]
    values += [value.detach() if isinstance(value, torch.Tensor) else value for value, _ in new]
    return values, Returned([*outputs, *(output for _, output in new)], leaves, spec)
