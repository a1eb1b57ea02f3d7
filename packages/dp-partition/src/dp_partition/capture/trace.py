"""Trace a train step to one fx graph on fake tensors, leaving every object of the caller as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from dp_partition._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    make_fx,
    new_fake_mode,
    pytree,
    storage_key,
    without_onednn,
)
from dp_partition.capture.attributes import attributes_kept
from dp_partition.capture.effects import Results, check_repeatable, param_groups_kept, random_numbers_watched
from dp_partition.capture.fakes import Fakes, Input, check_memory, flatten_inputs, installed, make_fakes
from dp_partition.capture.hypers import Hyper
from dp_partition.capture.phases import Phases, mark_phases
from dp_partition.capture.subject import Subject
from dp_partition.capture.tagging import TAG_GRAD, gradients_tagging
from dp_partition.problems import PlanError, Problem


@dataclass(frozen=True)
class Output:
    """One value the graph returns: for the user, or a new buffer or state entry to put in place."""

    kind: str
    name: str = ""
    key: Any = None
    optimizer: int = 0


@dataclass
class Capture:
    """A traced train step.

    Attributes:
        module: The graph at full parameter shapes; placeholders stand in the order of ``inputs``.
        inputs: What each placeholder is.
        outputs: What each returned value is.
        user_leaves: The step's result, flattened; tensors and symbols are replaced by their position in the outputs.
        user_spec: How to unflatten it.
        guards: Conditions on hyperparameters under which the trace holds, as sympy expressions.
        symbols: The sympy symbol of each hyperparameter.
        mode: The fake mode that holds the nodes' ``meta["val"]``.
        cleared: Whether the step clears gradients before its first backward.
    """

    module: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    user_leaves: list[Any]
    user_spec: Any
    mode: FakeTensorMode
    guards: list[Any] = field(default_factory=list)
    symbols: dict[Hyper, Any] = field(default_factory=dict)
    cleared: bool = False


def trace_step(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    subject: Subject,
    batch_of: Callable[[torch.Tensor], tuple[int, ...]] | None = None,
) -> Capture:
    """Trace ``function(*args, **kwargs)``.

    Args:
        function: The train step, as written for one device.
        args: Its arguments; tensors among them become graph inputs, other leaves are constants of the trace.
        kwargs: Its keyword arguments.
        subject: The modules and optimizers among the arguments.
        batch_of: Shape at which a tensor argument is traced, from the tensor passed; default its own.

    Raises:
        PlanError: When the step cannot be traced (code ``not-traceable``) or carries gradients or Python state from one
            call to the next (``grads-carried-over``, ``python-state``).
    """
    name = getattr(function, "__name__", "train_step")
    mode = new_fake_mode()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fakes = make_fakes(mode, subject, [leaves[i] for i in positions], batch_of)
    inputs, flat = flatten_inputs(fakes)
    phases = Phases()
    record: dict[str, Any] = {}
    runs = [Results(flat), Results(flat)]  # of the trace, and of another call to compare with

    def body(*tensors: Any) -> list[Any]:
        count = len(tensors) - len(positions)
        call = list(leaves)
        for position, value in zip(positions, tensors[count:], strict=True):
            call[position] = value
        call_args, call_kwargs = pytree.tree_unflatten(call, spec)
        with installed(subject, fakes, record), phases.recording(subject.optimizers, [m for _, m in subject.modules]):
            tagging, kept = gradients_tagging(dict(fakes.params)), param_groups_kept(subject.optimizers)
            memory = [(tensor.untyped_storage(), storage_key(tensor)) for tensor in flat]  # held: no key comes again
            with tagging, torch.enable_grad(), kept, record["results"]:
                result = function(*call_args, **call_kwargs)
            check_memory(inputs, flat, memory)
            return _collect_outputs(result, subject, fakes, phases, record)

    def call_on_fakes(run: Callable[..., Any], results: Results) -> Any:
        record["results"] = results
        kept, watched = attributes_kept(subject.modules), random_numbers_watched(name)
        with kept, watched, mode, _recurrent_layers_taken_apart(subject), _casts_made_anew():
            made = run(*flat)
        for param in fakes.params.values():
            param.grad = None
        return made

    try:
        module = call_on_fakes(make_fx(body), runs[0])
        runs[0].check_gone(name, module.graph, frozenset().union(*phases.optimizer))
        shape_env: Any = mode.shape_env
        guards = [guard.expr for guard in shape_env.guards]
        mark_phases(list(module.graph.nodes), phases)
        returned = record["outputs"], record["user_leaves"], record["user_spec"]
        capture = Capture(module, inputs, *returned, mode, guards, record["symbols"], phases.cleared)
        with shape_env.ignore_fresh_unbacked_symbols():  # of numbers that no proxy binds; later passes use the mode
            call_on_fakes(body, runs[1])
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(_trace_problem(name, error), "the train step could not be traced") from error
    check_repeatable(name, runs, (capture.user_leaves, record["user_leaves"]))
    module.graph.set_codegen(fx.graph.CodeGen())
    _name_placeholders(module, inputs, _groups(subject))
    _check_constants(module)
    _check_gradients(module)
    return capture


def _recurrent_layers_taken_apart(subject: Subject) -> contextlib.AbstractContextManager[Any]:
    """Recurrent layers of oneDNN keep a workspace that no graph can hold: trace torch's own operators instead."""
    layers = any(isinstance(m, nn.RNNBase) for _, root in subject.modules for m in root.modules())
    return without_onednn() if layers else contextlib.nullcontext()


@contextlib.contextmanager
def _casts_made_anew() -> Iterator[None]:
    """Autocast remembers the casts of weights, but not while a graph is recorded: both calls go without."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _collect_outputs(result: Any, subject: Subject, fakes: Fakes, phases: Phases, record: dict[str, Any]) -> list[Any]:
    """Flatten what the step returned, then every buffer and state entry that it put in place of an old one."""
    left = [fqn for fqn, param in fakes.params.items() if param.grad is not None]
    if left and not phases.cleared and phases.backward:
        hint = "call optim.zero_grad() in the step, and pass the optimizer to it as an argument"
        raise PlanError(
            [Problem("grads-carried-over", fqn, found="gradient left for the next call", hint=hint) for fqn in left]
        )
    values: list[Any] = []
    outputs: list[Output] = []
    leaves, record["user_spec"] = pytree.tree_flatten(result)
    user_leaves: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            user_leaves.append(_Position(len(values)))
            values.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
            outputs.append(Output("user"))
        else:
            user_leaves.append(leaf)
    record["user_leaves"] = user_leaves
    for fqn, module, attribute, is_param in subject.slots():
        table: dict[str, Any] = module._parameters if is_param else module._buffers
        name = subject.aliases.get(fqn, fqn)
        old: torch.Tensor = fakes.params[name] if name in fakes.params else fakes.buffers[name]
        if table[attribute] is old:
            continue
        if is_param:
            raise PlanError(Problem("parameter-replaced", fqn, found="the step puts a new parameter in place"))
        if table[attribute] is not None:
            values.append(table[attribute].detach())
            outputs.append(Output("buffer", fqn))
    for number, optimizer in enumerate(subject.optimizers):
        _collect_states(number, optimizer, fakes, values, outputs)
    record["outputs"] = outputs
    return values


def _collect_states(number: int, optimizer: Optimizer, fakes: Fakes, values: list[Any], outputs: list[Output]) -> None:
    for fqn, param in fakes.params.items():
        before = fakes.states.get((number, fqn), {})
        for key, value in optimizer.state.get(param, {}).items():
            old = before.get(key)
            if isinstance(value, torch.Tensor):
                if value is not old:
                    values.append(value.detach())
                    outputs.append(Output("state", fqn, key, number))
            elif value != old and not (old is None and value is None):
                hint = "keep counters in tensors, as torch.optim does"
                found = f"optimizer state {key!r} is a Python {type(value).__name__} that every step changes"
                raise PlanError(Problem("python-state", fqn, found=found, hint=hint))


@dataclass(frozen=True)
class _Position:
    """Stands in the flattened result for a value the graph returns."""

    index: int


def fill_result(capture: Capture, values: tuple[Any, ...]) -> Any:
    """The step's result, from the graph's outputs."""
    leaves = [values[leaf.index] if isinstance(leaf, _Position) else leaf for leaf in capture.user_leaves]
    return pytree.tree_unflatten(leaves, capture.user_spec)


def _trace_problem(name: str, error: Exception) -> Problem:
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    optimizer = _optimizer_in(error)
    if optimizer is not None:
        hint = "use an optimizer whose step depends on no value of its state: SGD, Adam, AdamW, NAdam, RMSprop, ..."
        found = f"the optimizer {optimizer} cannot be traced: {text[0][:300]}"
        return Problem("optimizer-not-traceable", name, found=found, hint=hint)
    hint = "the step must not depend on the values of tensors (no if on a tensor, no nonzero, no number formatted)"
    return Problem("not-traceable", name, found=" ".join(text[:3])[:600], hint=hint)


def _optimizer_in(error: Exception) -> str | None:
    """The class of the optimizer in whose step the error was raised."""
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Optimizer) and trace.tb_frame.f_code.co_name == "step":
            found = type(owner).__name__
        trace = trace.tb_next
    return found


def _groups(subject: Subject) -> dict[str, tuple[int, int]]:
    """The optimizer and parameter group of every parameter that has one."""
    fqn_of = {id(param): fqn for fqn, param in subject.params.items()}
    return {
        fqn_of[id(param)]: (number, index)
        for number, optimizer in enumerate(subject.optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }


def _name_placeholders(module: fx.GraphModule, inputs: list[Input], groups: dict[str, tuple[int, int]]) -> None:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, entry in zip(placeholders, inputs, strict=True):
        name = "".join(c if c.isalnum() else "_" for c in entry.label)
        node._rename(name)
        node.target = node.name
        node.meta["input"] = entry
        if entry.kind == "param" and entry.name in groups:
            node.meta["group"] = groups[entry.name]


def _check_gradients(module: fx.GraphModule) -> None:
    """Gradients that no bucket can hold are refused."""
    problems = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.target is TAG_GRAD and isinstance(value, torch.Tensor) and value.layout != torch.strided:
            hint = "use dense gradients (sparse=False)"
            problems.append(Problem("sparse-gradient", str(node.args[1]), found=f"{value.layout}", hint=hint))
    if problems:
        raise PlanError(problems)


def _check_constants(module: fx.GraphModule) -> None:
    """A parameter that the trace met as a constant would never be trained, so it is refused."""
    problems = []
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(module, str(node.target))
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not isinstance(tensor, FakeTensor):
            hint = "pass the module that holds it as an argument of the train step"
            found = f"a tensor of shape {tuple(tensor.shape)} that requires grad is reached through a closure"
            problems.append(Problem("parameter-in-closure", str(node.target), found=found, hint=hint))
    if problems:
        raise PlanError(problems)
