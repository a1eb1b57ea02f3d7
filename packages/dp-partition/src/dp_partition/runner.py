"""Behind a `CompiledStep`: `Traces` has its graphs, `Runner` its calls. The first call traces and places."""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dp_partition._shared.consensus import all_gather_objects, capture_errors, ranks_of
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import global_hooks, without_autocast
from dp_partition.capture.fakes import REACHED
from dp_partition.capture.fingerprint import FunctionReads, fingerprint, leaf_key
from dp_partition.capture.inputs import CallArguments, OptimizerReads, closing, read_arguments, read_optimizers
from dp_partition.capture.reach import PythonState, Reach
from dp_partition.capture.state import (
    StepState,
    check_traceable,
    find_step_state,
    named_leaves,
    rename,
    without_data,
)
from dp_partition.capture.tracer import asks_for_values, defined_at, trace_problem, user_line
from dp_partition.check.checked_call import CheckedCall, StepRunner
from dp_partition.pipeline import build_program
from dp_partition.plan.placements import name_of, num_replicas, shard_world, warn_on_first, without_compiler
from dp_partition.plan.plan import PartitionPlan, Settings, TensorInfo, not_placed, plan_placements
from dp_partition.runtime.consensus import (
    HINT,
    agree_on,
    announce,
    are_all_announced,
    collectives_digest,
    compare_values,
    largest_of,
)
from dp_partition.runtime.program import Program, bind_inputs, check_no_gradients, reconcile, store_outputs
from dp_partition.runtime.state import (
    REPLACED,
    Binding,
    HeldMemory,
    ModelChangedError,
    guarded,
    release,
    with_current_parameters,
)

MANY_TRACES = 8  # after as many a warning names the way on, as torch.compile's limit does
MOST_PROGRAMS = 64  # to keep


class Traces:
    """The programs of one step, each found by its key, with the numbers that are inputs of its graph."""

    def __init__(self, function: Callable[..., Any], mesh: DeviceMesh, settings: Settings) -> None:
        self.original, self.mesh, self.settings = without_compiler(function, mesh), mesh, settings
        self.function = closing(self.original)
        self.name = name_of(self.function)
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
                    warn_on_first(
                        self.mesh,
                        f"{self.name} takes a trace for each length, in spite of mark_dynamic: {reason}",
                        stacklevel=2,
                    )
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
            problems.append(
                Problem(
                    "not-traceable",
                    self.name,
                    found="a container looks parameters up by identity, and a trace has others in their place",
                    hint="use names of parameters as keys",
                )
            )
        ids = {id(p) for module in reach.modules for p in module.parameters()}
        if not ids.isdisjoint(map(id, call.leaves)):
            problems.append(
                Problem(
                    "parameter-in-closure",
                    self.name,
                    found="parameters are among its arguments, beside the model",
                    hint=REACHED[1],
                )
            )
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
            if program.capture.live.arguments or program.capture.live.sizes:
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


class Runner(StepRunner):
    """State of a step between calls."""

    token = ""

    def __init__(
        self, function: Callable[..., Any], mesh: DeviceMesh, settings: Settings, share: Runner | None = None
    ) -> None:
        self.traces = Traces(function, mesh, settings)
        super().__init__(self.traces.function, mesh, settings)
        self.share = share  # another runner; its placed parameters are used
        self.sharers: list[Runner] = []  # other runners with this one's placed parameters
        if share is not None:
            share.owner.sharers.append(self)
        self.binding: Binding | None = None  # the placed model and optimizers; None before the first call
        self.agreed: list[Mapping[str, str]] = []  # what ranks have compared of their programs

    def checks(self) -> str:
        """Return the checked calls as text for the plan."""
        if self.settings.check == "never":
            return "unchecked: check='never'"
        text = f"{self.schedule.num_checked} of {self.schedule.calls} calls checked against the eager step"
        return "; unchecked: ".join([text, *self.schedule.unchecked])

    def due_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        binding = self.binding
        if binding is None:
            call = read_arguments(self.name, args, kwargs)
            call.marked = self.traces.marked
            binding, program, facts = agree_on(self.mesh, self.name, lambda: self.prepare(call))
            if self.share is None:  # only after success on every rank
                binding.place()
            else:
                binding.memory = HeldMemory(binding.step_state.params)
            self.binding = binding
            if self.mesh.size() > 1 and not self.token:  # for traces that all ranks make in one call
                self.token = all_gather_objects(self.mesh, secrets.token_hex(8), self.name)[0]
            self.agreed.append(facts)  # later traces of one rank alone must equal it
            optimizers = reconcile(binding)
            self.traces.programs[self.traces.key_of(binding.step_state, call, optimizers)] = [program]
            self.traces.latest = program
        else:
            later = self.later_call(binding, args, kwargs)
            if later is None:  # the caller has changed the model, on all ranks: it is placed anew
                self.release(Reach(self.function, args, kwargs).optimizers)  # a new one may hold state in shards
                return self.due_call(args, kwargs, is_checked)
            call, program, optimizers, is_new = later
            is_checked = is_checked or (is_new and self.settings.check != "never")
            program.is_new = False
        if is_checked:
            result = CheckedCall(self, binding, program, call).run()
        else:
            result = self.run(binding, program, call, optimizers)
        calls = self.schedule.calls
        if not calls & (calls - 1) and program.communicates and self.settings.check != "never":  # a power of two
            compare_values(self.mesh, binding.replicated(), calls)
        return result

    def run(
        self,
        binding: Binding,
        program: Program,
        call: CallArguments,
        optimizers: OptimizerReads,
        gradients: dict[str, Any] | None = None,
    ) -> Any:
        """Run the graph and store new state; add gradients to a given dict."""
        check_no_gradients(binding.step_state, program.capture.effects.cleared)
        leaves = call.leaves
        if self.settings.accumulate > 1 or self.settings.semantics == "global":
            # Traced with another number of rows, so on a contiguous tensor; views of a strided one may not exist.
            leaves = [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inputs = bind_inputs(binding, program, leaves, optimizers)
        originals, buffers = ({label: inputs[position] for label, position in row} for row in program.written)
        with torch.no_grad(), without_autocast(), guarded(self.subject, originals, buffers):
            if gradients is None:
                values = program.run(inputs)
            else:
                values, noted = program.run_noting_gradients(inputs)
                gradients.update(noted)
        store_outputs(binding, program, values, call.leaves)
        return program.capture.returned.result(values)

    @property
    def owner(self) -> Runner:
        """The runner with the placed parameters: this one, unless it shares another's."""
        return self if self.share is None else self.share.owner

    def bound(self) -> Binding:
        """Return the placed model and optimizers; raise ``not-sharded`` before the first call."""
        if self.binding is None:
            raise not_placed(self.name)
        return self.binding

    def release(self, others: Iterable[Optimizer] = ()) -> None:
        """Restore model and optimizers, ``others`` of its parameters too, and drop all programs.

        Raises:
            PlanError: ``model-changed`` for a step that shares another's parameters.
        """
        if self.share is not None:
            raise PlanError(
                Problem(
                    "model-changed",
                    self.name,
                    found="shares what another step placed",
                    hint=f"call release() on {self.owner.name}, or let go of this step",
                )
            )
        bound = [sharer for sharer in self.sharers if sharer.binding is not None]
        shared = [optimizer for sharer in bound for optimizer in sharer.bound().step_state.optimizers]
        release(self.bound(), [*shared, *others])
        for runner in (self, *bound):
            runner.binding = None
            runner.traces.clear()
            runner.agreed.clear()

    def prepare(self, call: CallArguments) -> tuple[tuple[Binding, Program, Mapping[str, str]], Mapping[str, str]]:
        """Plan, trace and partition without communication; return metadata to compare between ranks too."""
        base = None if self.share is None else self.share.bound()
        with_current_parameters(leaf for leaf in call.leaves if isinstance(leaf, Optimizer))
        step_state = find_step_state(self.traces.function, call.args, call.kwargs)
        if base is None:
            if empty := without_data(step_state.params):
                raise PlanError(empty, "the model cannot be placed")
            check_traceable(step_state)
            plan = self.plan_for(step_state, shard_world(self.mesh))
        else:
            foreign = [name for name, param in step_state.params.items() if id(param) not in base.names]
            if foreign:
                raise PlanError(
                    Problem(
                        "model-changed",
                        self.name,
                        found=f"parameter {foreign[0]} is not placed by it",
                        hint="pass the models of the step it shares with, and optimizers of their parameters",
                    )
                )
            rename(step_state, base.names)
            plan = base.plan
        self.traces.note_values(call)
        program = self.traces.build(step_state, plan, call)
        check_no_gradients(step_state, program.capture.effects.cleared)
        facts = self.facts(plan, program, call.leaves)
        return (Binding(step_state, plan, self.mesh), program, facts), facts

    def facts(self, plan: PartitionPlan, program: Program, leaves: list[Any]) -> Mapping[str, str]:
        """Return metadata to compare between ranks before a program runs."""
        facts = {
            "plan": plan.digest,
            "settings": self.settings.text(),
            "collectives": collectives_digest(program.module.graph),
        }
        if self.settings.semantics == "global":
            facts["batch"] = ", ".join(f"{list(x.shape)} {x.dtype}" for x in leaves if isinstance(x, torch.Tensor))
        return facts

    def plan_for(self, step_state: StepState, world: int) -> PartitionPlan:
        """Plan the placement of everything on ``world`` ranks.

        Raises:
            PlanError: All problems of the plan.
        """
        plan = plan_placements(
            [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in step_state.params.items()],
            self.settings.style,
            world,
            semantics=self.settings.semantics,
            overrides=self.settings.placements,
            aliases={a: n for a, n in step_state.aliases.items() if n in step_state.params},
            replicas=num_replicas(self.mesh),
            reduction=self.settings.reduction(),
        )
        if plan.problems:
            raise PlanError(plan.problems, "the placements cannot be planned")
        return plan

    def attempt_call(
        self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallArguments, Program, OptimizerReads]:
        """Read a later call's arguments, model and optimizers, and find its program; nothing is communicated."""
        call = read_arguments(self.name, args, kwargs)
        call.live, call.marked = self.traces.live.get(call.spec) or frozenset(), self.traces.marked
        if self.owner.bound().is_unsharded:
            raise PlanError(
                Problem(
                    "unsharded-now",
                    self.name,
                    found="the model holds full parameters in a block of unsharded()",
                    hint="leave the block first",
                )
            )
        binding.check_in_place()
        passed = [x for x in call.leaves if isinstance(x, nn.Module | Optimizer) and id(x) not in binding.owner_ids]
        if passed:  # a call that evaluates may leave the optimizer out
            is_optimizer = all(isinstance(value, Optimizer) for value in passed)
            hint = REPLACED if is_optimizer else "call release() on the step first, or compile a step of its own"
            problem = Problem("model-mismatch", self.name, found="called with another model or optimizer", hint=hint)
            raise (ModelChangedError if is_optimizer else PlanError)(problem)
        optimizers = reconcile(binding)
        state, plan, find = binding.step_state, binding.plan, self.traces.find_program
        return call, find(state, plan, call, optimizers, self.trace_label), optimizers

    def later_call(
        self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallArguments, Program, OptimizerReads, bool] | None:
        """Return program and inputs; ranks that all trace in this call compare, or raise together.

        A rank may trace alone, for a last batch of its own, as long as its collectives stay the agreed ones:
        other ranks run an existing graph, without any notice. An error of such a rank is its own. With `mark_dynamic`
        no rank is alone: all ranks compare, or raise together, if one traces.

        Returns:
            Arguments, program, optimizers, and True if the call must be checked for a graph or a length that is new;
            None if the caller of each rank has put other parameters, modules or optimizers in place.
        """
        attempted, error = capture_errors(lambda: self.attempt_call(binding, args, kwargs))
        is_traced = attempted is None or attempted[1].is_new
        is_alone, facts = self.mesh.size() == 1, dict[str, str]()
        if is_traced and attempted is not None:
            facts |= self.facts(binding.plan, attempted[1], attempted[0].leaves)
        differs = bool(facts) and facts not in self.agreed
        communicates = not is_alone and self.traces.latest is not None and self.traces.latest.communicates
        if self.settings.dynamic and self.settings.check != "never":
            sizes = {} if attempted is None else attempted[1].sizes_of(attempted[0].leaves)
            is_new = is_traced or (attempted is not None and not attempted[1].checked_sizes.issuperset(sizes.items()))
            # A graph may be wrong for a length that it meets first, at any call and on any rank, and a check
            # communicates: all ranks or none. So one number a call is exchanged, and of marked steps alone.
            news = is_new + is_traced
            news = largest_of(self.mesh, news) if communicates else news
            is_new, has_agreed = news > 0, news > 1 and (communicates or is_alone)
            is_traced = is_traced or has_agreed
        elif is_traced:
            has_agreed = is_alone
            if not is_alone:
                announce(self.trace_label, dist.get_rank())
                has_agreed = are_all_announced(
                    self.trace_label, ranks_of(self.mesh), waits=error is not None or differs
                )
            is_new = has_agreed or not communicates
        else:
            is_new = has_agreed = False
        if attempted is not None and not is_traced:
            return *attempted, is_new
        if has_agreed and self.share is None:
            changed = isinstance(error, ModelChangedError)
            if all([changed] if is_alone else all_gather_objects(self.mesh, changed, self.name)):
                return None
        if differs and not has_agreed and self.settings.semantics == "local" and not self.settings.dynamic:
            raise PlanError(
                Problem(
                    "ranks-disagree",
                    self.name,
                    found=f"call {self.schedule.calls} has other collectives on this rank alone; the others run "
                    "their graph",
                    hint=HINT,
                )
            )
        if has_agreed or self.settings.semantics == "global" or differs:
            if attempted is not None and not facts:  # with `mark_dynamic` a rank that runs its old graph compares too
                facts |= self.facts(binding.plan, attempted[1], attempted[0].leaves)

            def outcome() -> tuple[None, Mapping[str, str]]:
                if error is not None:
                    raise error
                return None, facts

            agree_on(self.mesh, self.name, outcome)
            self.agreed += [facts] if facts not in self.agreed else []
        if attempted is None:
            assert error is not None
            raise error
        return *attempted, is_new

    @property
    def trace_label(self) -> str:
        """Text for a trace in this call, common to all ranks; empty without one."""
        return f"{self.token}/{self.schedule.calls}" if self.token and self.mesh.size() > 1 else ""
