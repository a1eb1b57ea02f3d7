"""The graphs of a compiled step: its traces, by everything that they depend on."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import global_hooks, uncompiled
from dp_partition.capture.fakes import REACHED
from dp_partition.capture.fingerprint import FunctionReads, fingerprint, leaf_key
from dp_partition.capture.inputs import CallArguments, OptimizerReads, closing, read_optimizers
from dp_partition.capture.reach import PythonState, Reach
from dp_partition.capture.state import StepState, named_leaves
from dp_partition.capture.tracer import asks_for_values, defined_at, trace_problem, user_line
from dp_partition.pipeline import build_program
from dp_partition.plan.placements import warn_on_first
from dp_partition.plan.plan import PartitionPlan, Settings
from dp_partition.runtime.consensus import announce
from dp_partition.runtime.program import Program

MANY_TRACES = 8  # after as many a warning names the way on, as torch.compile's limit does
MOST_PROGRAMS = 64  # to keep


class Traces:
    """The programs of one step, each found by its key, with the numbers that are inputs of its graph."""

    def __init__(self, function: Callable[..., Any], mesh: DeviceMesh, settings: Settings) -> None:
        self.original, self.mesh, self.settings = uncompiled(function), mesh, settings
        self.function = closing(self.original)
        self.name = getattr(self.function, "__name__", type(self.function).__name__)
        self.reads = FunctionReads(self.original)
        self.programs: dict[Any, list[Program]] = {}
        # Python values among the arguments of the last trace, by structure of the arguments and position
        self.values: dict[Any, dict[int, Any]] = {}
        # positions of those that are inputs of later graphs; None where no trace was possible with them
        self.live: dict[Any, frozenset[int] | None] = {}
        self.latest: Program | None = None  # the program of the last call
        self.num_traces = 0
        # dims of tensor arguments whose sizes are symbols of a trace; none once that has failed
        self.marked = settings.dynamic

    def clear(self) -> None:
        """Drop all programs: the model is no longer placed."""
        self.latest = None
        self.programs.clear()
        self.values.clear()

    def build(
        self, step_state: StepState, plan: PartitionPlan, call: CallArguments, device: str | None = None
    ) -> Program:
        """Trace and partition for the present arguments.

        Raises:
            PlanError: The step cannot be a graph; with the line of the caller's code, and the way on.
        """
        try:
            return self.attempt(step_state, plan, call, device)
        except PlanError as error:
            where = user_line(error) or defined_at(self.original)
            way_on = "" if self.settings.needs_graph() else "; dp_partition.distribute runs the step as it is written"
            problems = [
                replace(
                    problem, found=problem.found + where * (" (at " not in problem.found), hint=problem.hint + way_on
                )
                for problem in error.problems
            ]
            raise PlanError(problems, error.summary).with_traceback(error.__traceback__) from error.__cause__

    def attempt(self, step_state: StepState, plan: PartitionPlan, call: CallArguments, device: str | None) -> Program:
        """Trace with symbols for lengths and numbers; without them where that fails."""
        while call.marked or call.live:
            try:
                return self.trace(step_state, plan, call, device)
            except Exception as error:  # of any rule, kernel or code in need of a number: the next trace has one
                if call.marked:
                    self.marked = call.marked = ()
                    reason = str(error).strip().splitlines()[-1]
                    text = f"{self.name} takes a trace for each length, in spite of mark_dynamic: {reason}"
                    warn_on_first(self.mesh, text, stacklevel=2)
                else:
                    self.live[call.spec], call.live = None, frozenset()
        try:
            return self.trace(step_state, plan, call, device)
        except PlanError as error:
            numbers = frozenset(at for at, leaf in self.values.get(call.spec, {}).items() if type(leaf) in (int, float))
            if call.live or not numbers or {problem.code for problem in error.problems} != {"hyperparameter-changed"}:
                raise
            call.live = numbers  # the step may set a learning rate by its number of the call
            try:
                program = self.trace(step_state, plan, call, device)
            except Exception:
                call.live = frozenset()
                raise error from None
            self.live[call.spec] = numbers
            return program

    def trace(
        self, step_state: StepState, plan: PartitionPlan, call: CallArguments, device: str | None = None
    ) -> Program:
        if step_state.optimizers and any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in call.leaves):
            raise PlanError(
                Problem(
                    "unsupported-argument",
                    self.name,
                    found="a tensor with a grad_fn: its backward pass would leave the step",
                    hint="pass tensor.detach(), or run what makes it in the step",
                )
            )
        self.num_traces += 1
        self.check_reach(call)
        step_state.reads.clear()
        self.reads = FunctionReads(self.original)  # globals and objects may be others than at the last trace
        step_state.reads.follow(self.reads.names)
        before = self.key_of(step_state, call)
        contents = PythonState(self.function, call.args, call.kwargs)
        try:
            program = build_program(self.function, call, step_state, plan, self.mesh, self.settings, device)
            changes = contents.changes()
            contents.restore_modules()  # before the key is computed again: a cache in an attribute is no state
            self.check_python_state(before, self.key_of(step_state, call), changes)
            outputs = program.capture.returned.outputs
            step_state.reads.leave(entry.key for entry in outputs if entry.kind == "attribute")
        except Exception as error:
            contents.restore()
            if isinstance(error, PlanError) or not asks_for_values(error):
                raise
            raise PlanError(trace_problem(self.name, error), "a shape depends on values of tensors") from error
        return program

    def check_reach(self, call: CallArguments) -> None:
        """Raise for objects within the step's reach that a trace would use up, or not find again.

        Raises:
            PlanError: ``unsupported-argument`` for an iterator, ``not-traceable`` for a table of parameters by
                identity, ``parameter-in-closure`` for parameters among the arguments, beside their model.
        """
        problems: list[Problem] = []
        reach = Reach(self.original, call.args, call.kwargs)
        if reach.iterators:
            problems.append(
                Problem(
                    "unsupported-argument",
                    self.name,
                    found=f"a trace would take a value of its own from a {reach.iterators[0]}, for every call",
                    hint="call next() outside of the step, and pass what it gives",
                )
            )
        if reach.identities(reach.parameters.values(), (dict, set, frozenset)):
            reason = "a container looks parameters up by identity, and a trace has others in their place"
            problems.append(Problem("not-traceable", self.name, found=reason, hint="use names of parameters as keys"))
        ids = {id(p) for module in reach.modules for p in module.parameters()}
        if not ids.isdisjoint(map(id, call.leaves)):
            reason = "parameters are among its arguments, beside the model"
            problems.append(Problem("parameter-in-closure", self.name, found=reason, hint=REACHED[1]))
        if problems:
            raise PlanError(problems)

    def key_of(self, step_state: StepState, call: CallArguments, optimizers: OptimizerReads | None = None) -> Any:
        """Return everything that a trace for this call depends on, as it is now."""
        return program_key(step_state, call, self.reads, optimizers or read_optimizers(step_state.optimizers))

    def check_python_state(self, before: Any, after: Any, changes: list[str]) -> None:
        """Raise if running the step changed what it reads, or a counter of an object. Its graph would not."""
        if before != after or changes:
            names = ", ".join(changes) or "a counter, a flag, an entry of a list or dict"
            raise PlanError(
                Problem(
                    "python-state",
                    self.name,
                    found=f"running it changes Python values that it reads: {names}",
                    hint="keep what changes from step to step in a buffer, or pass it to the step in a tensor",
                )
            )

    def find_program(
        self, step_state: StepState, plan: PartitionPlan, call: CallArguments, optimizers: OptimizerReads, label: str
    ) -> Program:
        """Return the program with valid guards for these arguments; trace one if there is none.

        ``label`` is a text for a trace in this call, common to all ranks, to announce it.
        """
        for program in self.programs.get(self.key_of(step_state, call, optimizers), []):
            numbers: tuple[float, ...] = ()
            if program.capture.numbers or program.capture.sizes:
                numbers = (*program.numbers_of(call.leaves), *program.sizes_of(call.leaves).values())
            if program.guards_hold(optimizers.values, numbers):
                self.latest = program
                return program
        announce(label, dist.get_rank())
        self.note_values(call)
        program = self.latest = self.build(step_state, plan, call)
        program.is_new = True
        # The key is computed here: a trace with symbols may have been replaced by one without.
        self.programs.setdefault(self.key_of(step_state, call, optimizers), []).append(program)
        if self.num_traces == MANY_TRACES + 1:
            warn_on_first(
                self.mesh,
                f"{self.name} was traced {self.num_traces} times: each new shape, and each new Python value among its "
                "arguments, takes a trace. Where lengths change, pass mark_dynamic=1 to compile, or the dim that they "
                "are in, or pad batches to few lengths; pass numbers that change in tensors",
                stacklevel=4,
            )
        while sum(map(len, self.programs.values())) > MOST_PROGRAMS:
            del self.programs[next(iter(self.programs))]  # the oldest
        return program

    def note_values(self, call: CallArguments) -> None:
        """Let numbers among the arguments be inputs of the graph from their second value on. Name a second text."""
        values = {at: leaf for at, leaf in enumerate(call.leaves) if type(leaf) in (int, float, str)}
        before, live = self.values.get(call.spec, {}), self.live.get(call.spec, frozenset())
        self.values[call.spec] = values
        changed = [at for at, leaf in values.items() if type(before.get(at)) is type(leaf) and before[at] != leaf]
        texts = [at for at in changed if type(values[at]) is str]
        if live is not None and self.settings.accumulate == 1:  # a micro-batch's graph passes tensors alone
            self.live[call.spec] = call.live = live | frozenset(changed) - frozenset(texts)
        if texts and self.num_traces == 1:
            old, new = before[texts[0]], values[texts[0]]
            leaves = named_leaves(self.original, call.args, call.kwargs)  # in the order of the signature
            name = next((name for name, leaf in leaves if leaf is new), "")
            text = f"{self.name} is traced again for argument {name}, {old!r} and then {new!r}; each takes a trace"
            warn_on_first(self.mesh, f"{text}: keep a text that no line reads outside of the step", stacklevel=5)


def program_key(step_state: StepState, call: CallArguments, reads: FunctionReads, optimizers: OptimizerReads) -> Any:
    """Return all dependencies of a trace, hashable."""
    training = tuple([module.training for module in step_state.reads.modules])
    params = step_state.params.values()
    trained = tuple(map(operator.attrgetter("requires_grad"), params))
    # Attributes set by users (`p.no_decay`): a step may branch on them. A DTensor has one of torch's.
    marks = [own for own in map(vars, params) if len(own) > ("_is_param" in own)]
    attributes = fingerprint(marks) if marks else ()
    autocast = tuple([torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on) for on in ("cpu", "cuda")])
    buffers = tuple([(b.shape, b.dtype, b.stride()) for b in step_state.buffers.values()])
    placed = {id(module) for _, module in step_state.modules} if step_state.is_reached else ()
    constants = (autocast, global_hooks(), step_state.reads.read(), reads.read(placed), buffers, attributes)
    keyed = call.leaves
    if call.live:  # of these the type alone counts
        keyed = [type(leaf) if at in call.live else leaf for at, leaf in enumerate(keyed)]
    leaves = tuple(map(leaf_key, keyed, itertools.repeat(call.marked)))
    return leaves, call.spec, training, trained, optimizers.key, constants
