"""Trace a train step to one fx graph, without changes of the caller's objects."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from dp_partition._shared.execution_check import RandomState, random_state_restored
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    make_fx,
    new_fake_mode,
    pytree,
    storage_key,
    symbolic_math,
    trace_options,
    without_looks_at_values,
    without_modes,
    without_onednn,
)
from dp_partition.capture.fakes import (
    REACHED,
    Returned,
    Sizes,
    check_memory,
    collect_outputs,
    flatten_inputs,
    installed,
    make_fakes,
    use_first_sizes,
)
from dp_partition.capture.inputs import CallArguments, changes_recorded
from dp_partition.capture.phases import TAG_GRAD, Phases, RandomReplay, gradients_tagging, mark_phases
from dp_partition.capture.state import StepState, keyless_state
from dp_partition.nodes import GraphValue, Hyperparameter, meta_of


@dataclass
class LiveNumbers:
    """Numbers that are inputs of a graph, as symbols of its trace."""

    guards: list[Any]  # decisions of the trace on them, as sympy expressions
    hyperparameters: dict[Hyperparameter, Any]
    arguments: dict[int, Any]  # those among the arguments, by position
    sizes: Sizes

    def allow(self, values: dict[tuple[Any, ...], float], numbers: tuple[float, ...]) -> bool:
        """Return True if these hyperparameters, arguments and sizes lead to each decision of the trace."""
        symbols = {symbol: values[hyper] for hyper, symbol in self.hyperparameters.items() if symbol is not None}
        symbols |= dict(zip((*self.arguments.values(), *self.sizes.values()), numbers, strict=True))
        return all(bool(guard.xreplace(symbols)) for guard in self.guards)


@dataclass
class Effects:
    """Changes that a step makes beside tensors, for a graph to repeat."""

    cleared: bool = False  # gradients were cleared before the first backward pass
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)  # modules in another mode than before, and that
    trained: dict[str, bool] = field(default_factory=dict)  # parameters with another `requires_grad`, and its value
    left: list[str] = field(default_factory=list)  # parameters with gradients left for the next call to clear


@dataclass
class Capture:
    """A traced train step."""

    module: fx.GraphModule  # the graph at full parameter shapes; placeholders are in the order of ``inputs``
    inputs: list[GraphValue]
    returned: Returned  # values returned and installed by the step, as outputs of the graph
    mode: FakeTensorMode  # the fake mode of the nodes' ``meta["val"]``
    live: LiveNumbers
    effects: Effects
    # names of parameters with gradients read by the step, and the number of backward passes to each
    gradients: Counter[str] = field(default_factory=Counter)
    # number of the optimizer and of the parameter group of a parameter, by its name
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Tracing:
    """One step on fake tensors; arguments and results as for `trace_step`. ``flat`` is in the order of the inputs."""

    returned: Returned
    modes: list[tuple[nn.Module, bool]]

    def __init__(
        self,
        function: Callable[..., Any],
        call: CallArguments,
        step_state: StepState,
        batch_of: Callable[[torch.Tensor], tuple[int, ...]] | None,
        device: str | None,
    ) -> None:
        self.function, self.step_state, self.call = function, step_state, call
        self.mode = new_fake_mode()
        tensors, live = call.tensors, {i: call.leaves[i] for i in sorted(call.live)}
        self.fakes = make_fakes(self.mode, step_state, tensors, batch_of, device, call.marked, live)
        self.live = LiveNumbers([], {}, {}, self.fakes.sizes)
        self.inputs, self.flat = flatten_inputs(self.fakes)
        self.phases = Phases()
        self.written = _WrittenTensors()  # restored after the trace

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "train_step")

    def record(self) -> fx.GraphModule:
        # oneDNN's recurrent layers keep a workspace that no graph can hold: torch's own operators are traced.
        is_recurrent = any(isinstance(m, nn.RNNBase) for _, root in self.step_state.modules for m in root.modules())
        kernels = without_onednn() if is_recurrent else contextlib.nullcontext()
        no_draws, casts = _no_other_draws(self.name), _without_cast_cache()
        with no_draws, self.mode, kernels, casts, without_looks_at_values(), symbolic_math():
            try:
                module: fx.GraphModule = make_fx(self.body, **trace_options())(*self.flat)
            finally:
                self.written.restore()
        return module

    def body(self, *tensors: Any) -> list[Any]:
        """Run the step as a function of its inputs; return its graph's values."""
        leaves = list(self.call.leaves)  # the step's own arguments, with the graph's inputs in place of tensors
        positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for position, value in zip(positions, tensors[len(tensors) - len(positions) :], strict=True):
            leaves[position] = value
        for position, scalar in self.fakes.live.items():
            number: Any = scalar.item()
            leaves[position], self.live.arguments[position] = number, number.node.expr
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        optimizers, modules = self.step_state.optimizers, [module for _, module in self.step_state.modules]
        recording = self.phases.recording(optimizers, modules)
        with installed(self.step_state, self.fakes) as self.live.hyperparameters, recording:
            tagging = gradients_tagging(dict(self.fakes.params))
            replay = RandomReplay(self.name, self.phases).installed()
            memory = [(t.untyped_storage(), storage_key(t)) for t in self.flat]  # held: no key is reused
            modes = [(part, part.training) for module in modules for part in module.modules()]
            with tagging, torch.enable_grad(), changes_recorded(optimizers) as changes, replay, self.written:
                result = self.function(*args, **kwargs)
            check_memory(self.inputs, self.flat, memory)
            if lost := keyless_state(optimizers):
                raise PlanError(lost, "an optimizer keeps state under keys that are no parameters")
            self.modes = [(part, part.training) for part, mode in modes if part.training != mode]
            values, self.returned = collect_outputs(result, self.step_state, self.fakes, self.phases, changes)
        return values


class _WrittenTensors(TorchDispatchMode):
    """Keeps the values of real tensors before a trace writes them. Its graph writes them again in each call.

    Such tensors are outside of the arguments, in a closure or an attribute, so no fake replaces them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for item in pytree.tree_leaves((args, kwargs)):
                if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor) and id(item) not in self.values:
                    with without_modes():
                        self.values[id(item)] = item, item.detach().clone()
        return func(*args, **(kwargs or {}))

    def restore(self) -> None:
        with without_modes(), torch.no_grad():
            for tensor, value in self.values.values():
                tensor.detach().copy_(value)


def trace_step(
    function: Callable[..., Any],
    call: CallArguments,
    step_state: StepState,
    batch_of: Callable[[torch.Tensor], tuple[int, ...]] | None = None,
    device: str | None = None,
) -> Capture:
    """Trace ``function``; tensors and live numbers among a call's arguments become inputs, other leaves are constants.

    Args:
        function: The train step, as written for one device.
        call: Its arguments.
        step_state: The modules and optimizers among them.
        batch_of: Traced shape of a tensor argument, from the given tensor; default its own.
        device: Apparent device of the tensors; default their own.

    Raises:
        PlanError: The step cannot be traced (code ``not-traceable``), passes gradients or Python state from one
            call to the next (``python-state``), changes hyperparameters
            (``hyperparameter-changed``), draws numbers that a graph would burn in (``random-replay``), or reads a
            number outside of its result (``value-kept``).
    """
    tracing = _Tracing(function, call, step_state, batch_of, device)
    try:
        module = tracing.record()
    except PlanError:  # it has its own problem
        raise
    except Exception as error:
        problem = trace_problem(tracing.name, error, tracing.phases.stepping)
        raise PlanError(problem, "the train step could not be traced") from error
    shape_env: Any = tracing.mode.shape_env
    tracing.live.guards = [guard.expr for guard in shape_env.guards]
    effects = Effects(tracing.phases.cleared, tracing.modes)
    capture = Capture(module, tracing.inputs, tracing.returned, tracing.mode, tracing.live, effects)
    fqn_of = {id(param): fqn for fqn, param in step_state.params.items()}
    for number, optimizer in enumerate(step_state.optimizers):  # for fused kernels, which take plain floats
        for index, group in enumerate(optimizer.param_groups):
            capture.groups |= {fqn_of[id(param)]: (number, index) for param in group["params"]}
    for name, param in tracing.fakes.params.items():
        if param.requires_grad != step_state.params[name].requires_grad:
            effects.trained[name] = param.requires_grad
        if param.grad is not None:
            effects.left.append(name)
    if capture.live.sizes:  # only a trace with symbols
        use_first_sizes(module.graph, tracing.mode)
    mark_phases(list(module.graph.nodes), tracing.phases)
    module.graph.set_codegen(fx.graph.CodeGen())
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, entry in zip(placeholders, capture.inputs, strict=True):
        node._rename("".join(c if c.isalnum() else "_" for c in entry.label))
        node.target = node.name  # fx uses it as the argument's name
        meta_of(node)["input"] = entry
    _check_graph(tracing.name, module, frozenset().union(*tracing.phases.optimizer))
    return capture


@contextlib.contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Disable autocast's cache of weight casts: a graph would miss those of another trace."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _no_other_draws(name: str) -> Iterator[None]:
    """Raise if the block draws from Python's or NumPy's generator, or seeds torch's. Put all of them back.

    Fakes draw nothing, so torch's generator changes only when it is seeded.

    Raises:
        PlanError: With every used generator (code ``random-replay``).
    """
    touched = {}
    with random_state_restored() as before:
        try:
            yield
        finally:
            now = RandomState()
            touched = {
                "Python's random numbers": now.python != before.python,
                "NumPy's random numbers": pickle.dumps(now.numpy) != pickle.dumps(before.numpy),  # holds an array
                "the seed of torch's generator": not torch.equal(now.cpu, before.cpu),
            }
    hint = "draw with torch in the step, or pass the number in a tensor"
    problems = [
        Problem("random-replay", name, found=f"a graph would reuse the first value of {what} in every call", hint=hint)
        for what, used in touched.items()
        if used
    ]
    if problems:
        raise PlanError(problems, "the step draws random numbers that a graph would burn in")


def trace_problem(name: str, error: Exception, optimizer: str = "") -> Problem:
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    if "Multiple dispatch failed" in text[0]:  # a parameter among fakes; the trace would burn its value in
        reason, hint = REACHED
        return Problem("parameter-in-closure", name, found=f"a parameter: {reason}{user_line(error)}", hint=hint)
    if "pickle" in text[0]:
        reason = "it pickles tensors, as torch.save does, which have no values while it is traced"
        return Problem(
            "not-traceable",
            name,
            found=reason + user_line(error),
            hint="save between two calls: with step.unsharded(): torch.save(model.state_dict(), path)",
        )
    if optimizer:
        return Problem(
            "not-traceable",
            name,
            found=f"the optimizer {optimizer} cannot be traced: {text[0][:300]}",
            hint="use an optimizer whose step depends on no value of its state: SGD, Adam, AdamW, NAdam, RMSprop, ...",
        )
    hint = "the step must not depend on the values of tensors (no if on a tensor, no nonzero, no number formatted)"
    if not asks_for_values(error):
        hint = "the step runs on tensors without values while it is traced; the error names the line that needs one"
    return Problem("not-traceable", name, found=" ".join(text[:3])[:600] + user_line(error), hint=hint)


def asks_for_values(error: Exception) -> bool:
    """Return True if a trace failed for lack of a value."""
    text = f"{type(error).__name__}: {error}"
    words = ("data-dependent", "DataDependent", "DynamicOutputShape", "unbacked", "Tensor-likes", "FakeTensor")
    return any(word in text for word in (*words, "symbolic"))


def user_line(error: BaseException | None = None) -> str:
    """Return the innermost line outside of torch and this package, of an error or of the present calls, as text."""
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    between = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(contextlib.__file__).parent))
    lines = [item for item in frames if item.filename[0] != "<"]
    lines = [item for item in lines if "site-packages" in item.filename or not item.filename.startswith(between[2])]
    lines = [item for item in lines if not item.filename.startswith(between[:2])]  # torch and this package
    return f" (at {lines[-1].filename}:{lines[-1].lineno}, {lines[-1].line!r})" if lines else ""


def defined_at(function: Callable[..., Any]) -> str:
    """Return the place of a function's first line, as text; empty for one without Python code."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f" (at {code.co_filename}:{code.co_firstlineno}, def {code.co_name})" if code is not None else ""


def _check_graph(name: str, module: fx.GraphModule, optimizer: frozenset[str]) -> None:
    """Refuse gradients beyond buckets, parameters as constants, which no graph trains, and numbers kept by the step."""
    problems = []
    for node in module.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default and not node.users:
            # A list or a log would get it only once. A hyperparameter may be without use in this step.
            if node.name not in optimizer and "input" not in meta_of(node.args[0]):
                problems.append(
                    Problem(
                        "value-kept",
                        name,
                        found=f"a number read with {node.target} leaves the step",
                        hint="return it from the step, and keep or print it outside",
                    )
                )
            continue
        value = getattr(module, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if node.target is TAG_GRAD and value.layout != torch.strided:
            problems.append(
                Problem(
                    "sparse-gradient",
                    str(node.args[1]),
                    found=f"{value.layout}",
                    hint="use dense gradients (sparse=False)",
                )
            )
        if node.op == "get_attr" and value.requires_grad and not isinstance(value, FakeTensor):
            problems.append(
                Problem(
                    "parameter-in-closure",
                    str(node.target),
                    found=f"a tensor of shape {tuple(value.shape)} that requires grad is reached through a closure",
                    hint="pass the module that holds it as an argument of the train step",
                )
            )
    if problems:
        raise PlanError(problems[:8], "the step cannot be a graph")
