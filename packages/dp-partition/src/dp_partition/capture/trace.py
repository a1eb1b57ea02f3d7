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
from dp_partition.capture.fakes import Input, check_memory, flatten_inputs, installed, make_fakes
from dp_partition.capture.hypers import Hyper
from dp_partition.capture.outputs import Output, Returned, collect_outputs
from dp_partition.capture.phases import Phases, mark_phases
from dp_partition.capture.random_state import RandomReplay
from dp_partition.capture.subject import Subject
from dp_partition.capture.tagging import TAG_GRAD, gradients_tagging
from dp_partition.problems import PlanError, Problem


@dataclass
class Capture:
    """A traced train step.

    Attributes:
        module: The graph at full parameter shapes; placeholders stand in the order of ``inputs``.
        inputs: What each placeholder is.
        returned: What the step returned and put in place, as outputs of the graph.
        guards: Conditions on hyperparameters under which the trace holds, as sympy expressions.
        symbols: The sympy symbol of each hyperparameter.
        mode: The fake mode that holds the nodes' ``meta["val"]``.
        cleared: Whether the step clears gradients before its first backward.
    """

    module: fx.GraphModule
    inputs: list[Input]
    returned: Returned
    mode: FakeTensorMode
    guards: list[Any] = field(default_factory=list)
    symbols: dict[Hyper, Any] = field(default_factory=dict)
    cleared: bool = False

    @property
    def outputs(self) -> list[Output]:
        """What each returned value is."""
        return self.returned.outputs


class _Tracing:
    """One step on fake tensors, which is called twice: recorded as a graph, and again to compare with.

    Args:
        function: The train step, as written for one device.
        call: Its arguments and keyword arguments.
        subject: The modules and optimizers among them.
        batch_of: Shape at which a tensor argument is traced, from the tensor passed; None: its own.

    Attributes:
        mode: The fake mode.
        inputs: What each input of the graph is.
        flat: The fake tensors in the order of the inputs.
        phases: Which operators are forward, backward and optimizer.
        returned: What the latest call returned.
        symbols: The symbols of its hyperparameters.
    """

    returned: Returned
    symbols: dict[Hyper, Any]

    def __init__(
        self,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        subject: Subject,
        batch_of: Callable[[torch.Tensor], tuple[int, ...]] | None,
    ) -> None:
        self.function, self.subject = function, subject
        self.leaves, self.spec = pytree.tree_flatten(call)
        self.positions = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.mode = new_fake_mode()
        self.fakes = make_fakes(self.mode, subject, [self.leaves[i] for i in self.positions], batch_of)
        self.inputs, self.flat = flatten_inputs(self.fakes)
        self.phases = Phases()

    @property
    def name(self) -> str:
        """Name of the step."""
        return getattr(self.function, "__name__", "train_step")

    def call(self, run: Callable[..., Any], results: Results) -> Any:
        """Run the step, or its recording, on the fakes; watch what it does beside its tensors."""
        self.results = results
        kept, watched = attributes_kept(self.subject.modules), random_numbers_watched(self.name)
        with kept, watched, self.mode, _recurrent_layers_taken_apart(self.subject), _casts_made_anew():
            made = run(*self.flat)
        for tensor in (*self.fakes.params.values(), *self.fakes.args):
            tensor.grad = None
        return made

    def body(self, *tensors: Any) -> list[Any]:
        """The step as a function of its inputs; returns what its graph returns."""
        args, kwargs = self._arguments(tensors)
        optimizers, modules = self.subject.optimizers, [module for _, module in self.subject.modules]
        recording = self.phases.recording(optimizers, modules)
        with installed(self.subject, self.fakes) as self.symbols, recording:
            tagging, kept = gradients_tagging(dict(self.fakes.params)), param_groups_kept(optimizers)
            memory = [(t.untyped_storage(), storage_key(t)) for t in self.flat]  # held: no key comes again
            with tagging, torch.enable_grad(), kept, self.results, RandomReplay(self.name).installed():
                result = self.function(*args, **kwargs)
            check_memory(self.inputs, self.flat, memory)
            values, self.returned = collect_outputs(result, self.subject, self.fakes, self.phases)
        return values

    def _arguments(self, tensors: tuple[Any, ...]) -> Any:
        """The step's own arguments, with the graph's inputs in the places of tensors."""
        call = list(self.leaves)
        for position, value in zip(self.positions, tensors[len(tensors) - len(self.positions) :], strict=True):
            call[position] = value
        return pytree.tree_unflatten(call, self.spec)

    def guards(self) -> list[Any]:
        """The conditions on hyperparameters that were decided so far."""
        shape_env: Any = self.mode.shape_env
        return [guard.expr for guard in shape_env.guards]


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
    tracing = _Tracing(function, (args, kwargs), subject, batch_of)
    name = tracing.name
    first, second = Results(tracing.flat), Results(tracing.flat)
    try:
        module = tracing.call(make_fx(tracing.body), first)
        first.check_gone(name, module.graph, frozenset().union(*tracing.phases.optimizer))
        mark_phases(list(module.graph.nodes), tracing.phases)
        made = (tracing.inputs, tracing.returned, tracing.mode, tracing.guards(), tracing.symbols)
        capture = Capture(module, *made, tracing.phases.cleared)
        shape_env: Any = tracing.mode.shape_env
        with shape_env.ignore_fresh_unbacked_symbols():  # of numbers that no proxy binds; later passes use the mode
            tracing.call(tracing.body, second)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(_trace_problem(name, error), "the train step could not be traced") from error
    check_repeatable(name, [first, second], (capture.returned.user_leaves, tracing.returned.user_leaves))
    module.graph.set_codegen(fx.graph.CodeGen())
    _name_placeholders(module, capture.inputs, _groups(subject))
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
