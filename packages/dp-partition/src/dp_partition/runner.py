"""Behind a `Step`: the first call plans, traces and places; later calls find their program, or trace one more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import without_autocast
from dp_partition.backends.inductor import check_inductor, lower
from dp_partition.capture.arguments import CallArguments, check_arguments, closing, read_arguments
from dp_partition.capture.fingerprint import FunctionReads, program_key
from dp_partition.capture.hyperparameters import OptimizerReads, read_optimizers
from dp_partition.capture.lengths import first_difference
from dp_partition.capture.node_meta import meta_of
from dp_partition.capture.state import StepState, check_traceable, find_step_state
from dp_partition.capture.tracer import asks_for_values, line_of_node, trace_problem
from dp_partition.check.checked_call import CheckedCall, CheckSchedule
from dp_partition.mesh import num_replicas, shard_world
from dp_partition.ops import is_collective, is_wait
from dp_partition.pipeline import batch_scale, build_program
from dp_partition.plan.plan import PartitionPlan, TensorInfo, check_plan, plan_placements
from dp_partition.plan.settings import CommConfig, Settings
from dp_partition.progress import Progress, counted
from dp_partition.runtime.consensus import agree_on, all_announced, announce, batch_text, collectives_digest
from dp_partition.runtime.io import bind_inputs, check_no_gradients, reconcile, store_outputs
from dp_partition.runtime.program import Program
from dp_partition.runtime.rng import Stream
from dp_partition.runtime.rollback import guarded
from dp_partition.runtime.state import Binding, release

MANY_TRACES = 8  # after as many a warning says what a trace is taken for, as torch.compile does
MOST_PROGRAMS = 64  # that are kept


class Runner:
    """State of a step between calls.

    Args:
        function: The train step, as written for one device.
        mesh: The data-parallel ranks.
        settings: What the caller chose.
        share: The runner whose placed parameters this one uses.
        passes: A pass over every partitioned graph.
        progress: Where to show how far tracing and compiling are.

    Attributes:
        binding: The placed model and optimizers; None before the first call.
        latest: The program of the last call.
        num_traces: How many programs were traced.
        num_compiled: How many pieces of programs were compiled.
        schedule: Which calls are checked.
        num_checked: How many calls were checked.
        unchecked: Why calls that were to be checked were not.
        marked: Dims of tensor arguments whose sizes are symbols of a trace; none once that has failed.
        has_warned: A warning has said why a second trace with symbols was taken.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: DeviceMesh,
        settings: Settings,
        share: Runner | None = None,
        passes: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
        progress: TextIO | None = None,
    ) -> None:
        self.function, self.mesh, self.settings = closing(function), mesh, settings
        self.share, self.passes, self.progress = share, passes, Progress(progress)
        self.reads = FunctionReads(function)
        self.stream: Stream | None = None
        self.binding: Binding | None = None
        self.programs: dict[Any, list[Program]] = {}
        self.agreed: list[Mapping[str, str]] = []
        self.reshard_names: frozenset[str] | None = None
        self.latest: Program | None = None
        self.num_traces = self.num_compiled = self.num_checked = 0
        self.schedule = CheckSchedule(settings.check)
        self.unchecked: list[str] = []
        self.marked, self.has_warned = settings.dynamic, False

    # ---- what was chosen --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the function the step was made from."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def comm(self) -> CommConfig:
        """Arrangement of communication, as far as it changes no result: what `verify` simulates."""
        return replace(self.settings.comm, reduce_dtype=None, hook=None)

    def checks(self) -> str:
        """Return the checked calls as text for the plan."""
        if self.settings.check == "never":
            return "unchecked: check='never'"
        text = f"{self.num_checked} of {self.schedule.calls} calls checked against the eager step"
        return "; unchecked: ".join([text, *self.unchecked])

    @property
    def resharding(self) -> str | bool | frozenset[str]:
        """Parameters to gather again for backward; once chosen, a rank that retraces alone does as all."""
        return self.settings.reshard if self.reshard_names is None else self.reshard_names

    # ---- a call -----------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step on this rank's batch."""
        is_checked = self.schedule.is_due()
        call = read_arguments(self.name, args, kwargs)
        binding = self.binding
        if binding is None:
            binding, program, optimizers = self.first_call(call)
        else:
            self.check_step_state(binding, call.leaves)
            optimizers = reconcile(binding)
            program = self.find_program(binding, call, optimizers)
            if program.is_new:
                program.is_new = False
                is_checked = is_checked or self.is_new_on_all_ranks(program)
        if is_checked:
            return CheckedCall(self, binding, program, call).run()
        return self.run(binding, program, call, optimizers)

    def run(
        self,
        binding: Binding,
        program: Program,
        call: CallArguments,
        optimizers: OptimizerReads,
        gradients: dict[str, Any] | None = None,
    ) -> Any:
        """Run the graph and put new state in place; gradients are noted for a caller that passes a dict for them."""
        check_no_gradients(binding.step_state, program.capture.cleared)
        inputs = bind_inputs(binding, program, call.leaves, optimizers)
        try:
            with self.guarded(program, inputs):
                if gradients is None:
                    values = program.run(inputs)
                else:
                    values, noted = program.run_noting_gradients(inputs)
                    gradients.update(noted)
        except Exception as error:
            self.note_line(error, binding, program, call)
            raise
        store_outputs(binding, program, values, call.leaves)
        return program.capture.returned.result(values)

    def note_line(self, error: Exception, binding: Binding, program: Program, call: CallArguments) -> None:
        """Add the line of the step to the error of a node that was traced from it."""
        node, program.failed = program.failed, None
        if node is None or is_collective(node) or is_wait(node):
            return
        scale = batch_scale(binding.plan, self.settings.batch_dim, self.settings.accumulate)
        with suppress(Exception):  # the error stays the graph's own
            marked = self.marked if program.capture.sizes else ()
            name = meta_of(node).get("traced_as", node.name)
            line = line_of_node(name, self.function, call.args, call.kwargs, binding.step_state, scale, marked)
            error.add_note(f"raised by node {node.name} ({node.target}) of the graph{line}")

    @contextmanager
    def guarded(self, program: Program, inputs: list[Any]) -> Iterator[None]:
        """Run the block without autograd and autocast, on the step's random stream; take back what a failure left."""
        kept = {label: inputs[position] for label, position in program.labels(("param", "state"))}
        buffers = {label: inputs[position] for label, position in program.labels(("buffer",))}
        drawing = self.stream.drawing() if self.stream is not None else nullcontext()
        with torch.no_grad(), without_autocast(), guarded(self.subject, kept, buffers), drawing:
            yield

    @property
    def subject(self) -> str:
        """Call and rank, for errors of one rank."""
        return f"call {self.schedule.calls} of {self.name} on rank {dist.get_rank()}"

    @property
    def owner(self) -> Runner:
        """The runner that placed the parameters: this one, unless it shares another's."""
        return self if self.share is None else self.share.owner

    def bound(self) -> Binding:
        """The placed model and optimizers.

        Raises:
            PlanError: Before the first call (code ``not-sharded``).
        """
        if self.binding is None:
            raise self.not_started()
        return self.binding

    def not_started(self) -> PlanError:
        """The error for what is there after the first call only."""
        return PlanError(Problem("not-sharded", self.name, found="nothing is placed yet", hint="call the step once"))

    def release(self) -> None:
        """Give model and optimizer back, and forget everything.

        Raises:
            PlanError: ``model-changed`` for a step that shares what another one placed.
        """
        if self.share is not None:
            hint = f"call release() on {self.owner.name}, or let go of this step"
            raise PlanError(Problem("model-changed", self.name, found="shares what another step placed", hint=hint))
        release(self.bound())
        self.binding, self.latest, self.reshard_names = None, None, None
        self.programs.clear()
        self.agreed.clear()

    # ---- the first call ---------------------------------------------------------------------------------------------

    def first_call(self, call: CallArguments) -> tuple[Binding, Program, OptimizerReads]:
        """Plan, trace and partition; only when all that succeeded, on every rank, place the tensors."""
        binding, program, facts = agree_on(self.mesh, self.name, lambda: self.prepare(call))
        if self.share is None:
            binding.place(self.settings.equal)
            if self.settings.rng is not None:
                self.stream = Stream(self.mesh, self.settings.rng)
        else:
            binding.hold_storages()
        self.binding = binding
        self.agreed.append(facts)
        if self.settings.reshard == "auto" and self.settings.semantics == "local":
            self.reshard_names = program.reshard_names()
        optimizers = reconcile(binding)
        self.programs[self.key_of(binding.step_state, call, optimizers)] = [program]
        self.latest = program
        return binding, program, optimizers

    def prepare(self, call: CallArguments) -> tuple[tuple[Binding, Program, Mapping[str, str]], Mapping[str, str]]:
        """Plan, trace and partition without communication; with the facts that ranks have to agree on."""
        if self.settings.backend == "inductor":
            check_inductor(self.mesh.device_type)
        base = None if self.share is None else self.share.bound()
        step_state = find_step_state(self.function, call.args, call.kwargs)
        if base is None:
            check_traceable(step_state)
            plan = self.plan_for(step_state, shard_world(self.mesh))
        else:
            self.check_shared(base, step_state)
            plan = base.plan
        program = self.build_compiled(step_state, plan, call)
        check_no_gradients(step_state, program.capture.cleared)
        facts = self.facts(plan, program, call.leaves)
        return (Binding(step_state, plan, self.mesh), program, facts), facts

    def facts(self, plan: PartitionPlan, program: Program, leaves: list[Any]) -> Mapping[str, str]:
        """Return the facts that have to be equal on every rank before a program runs."""
        facts = {
            "plan": plan.digest,
            "settings": self.settings.text(),
            "collectives": collectives_digest(program.module.graph),
        }
        if self.settings.semantics == "global":
            facts["batch"] = batch_text(leaves)
        return facts

    def plan_for(self, step_state: StepState, world: int) -> PartitionPlan:
        """Plan the placement of everything on ``world`` ranks.

        Raises:
            PlanError: With all problems of the plan.
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
        check_plan(plan)
        return plan

    def build_compiled(self, step_state: StepState, plan: PartitionPlan, call: CallArguments) -> Program:
        """Return a program that is ready to run: traced, partitioned and compiled."""
        self.progress.begin("tracing")
        program = self.build(step_state, plan, call)
        if self.settings.backend == "inductor":
            self.progress.begin("compiling")
            module = program.with_local_values()
            program.lowered = lower(program.for_backend(), module, self.name, self.progress)
            self.num_compiled += program.lowered.num_compiled
        self.progress.end()
        return program

    def build(
        self, step_state: StepState, plan: PartitionPlan, call: CallArguments, device: str | None = None
    ) -> Program:
        """Trace and partition for the arguments at hand.

        Raises:
            PlanError: ``python-state`` if running the step changed Python values that it reads: its graph would not.
        """
        program = self.build_with_symbols(step_state, plan, call, device) if self.marked else None
        if program is None:
            program = self.trace(step_state, plan, call, device)
        if self.passes is not None:
            program.module.recompile()
            program.capture.module = self.passes(program.module)
        return program

    def build_with_symbols(
        self, step_state: StepState, plan: PartitionPlan, call: CallArguments, device: str | None
    ) -> Program | None:
        """Trace with symbols for the marked sizes; None, and a warning, where that fails."""
        try:
            program = self.trace(step_state, plan, call, device, self.marked)
        except Exception as error:  # of any rule or kernel that wants a number
            self.stop_marking(str(error).strip().splitlines()[-1])
            return None
        if self.binding is None and self.settings.check != "never":  # the first call, checked by execution
            program.right_sizes.add(program.sizes_of(call.leaves))
        return program if self.is_for_length(step_state, plan, call, program) else None

    def stop_marking(self, reason: str) -> None:
        """Trace each length from now on."""
        self.marked = ()
        warnings.warn(f"{self.name} takes a trace for each length, in spite of mark_dynamic: {reason}", stacklevel=2)

    def trace(
        self,
        step_state: StepState,
        plan: PartitionPlan,
        call: CallArguments,
        device: str | None = None,
        marked: tuple[int, ...] = (),
        keep_views: bool = False,
    ) -> Program:
        """Trace and partition once."""
        check_arguments(self.name, step_state.optimizers, call.leaves)
        self.num_traces += 1
        settings = (
            self.settings.batch_dim,
            self.settings.comm,
            self.settings.accumulate,
            self.resharding,
            device,
            marked,
        )
        function = counted(self.function, self.progress)
        before = self.python_state(step_state, call)
        arguments = (function, call.args, call.kwargs, step_state, plan, self.mesh)
        try:
            program = build_program(*arguments, *settings, keep_views=keep_views or bool(marked))
        except Exception as error:
            if isinstance(error, PlanError) or marked or not asks_for_values(error):
                raise
            raise PlanError(trace_problem(self.name, error), "a shape depends on values of tensors") from error
        self.check_python_state(before, self.python_state(step_state, call))
        return program

    def python_state(self, step_state: StepState, call: CallArguments) -> Any:
        """Return a fingerprint of what the step reads beside tensors, as it is now."""
        return self.key_of(step_state, call, read_optimizers(step_state.optimizers))

    def key_of(self, step_state: StepState, call: CallArguments, optimizers: OptimizerReads) -> Any:
        """Return all that a trace for this call depends on."""
        return program_key(step_state, call, self.reads, optimizers, self.marked)

    def check_python_state(self, before: Any, after: Any) -> None:
        """Raise if running the step changed what it reads."""
        if before != after:
            found = "running it changes Python values that it reads: a counter, a flag, an entry of a list or dict"
            hint = "keep what changes from step to step in a buffer, or pass it to the step in a tensor"
            raise PlanError(Problem("python-state", self.name, found=found, hint=hint))

    # ---- later calls ------------------------------------------------------------------------------------------------

    def find_program(self, binding: Binding, call: CallArguments, optimizers: OptimizerReads) -> Program:
        """Return the program whose guards hold for these arguments; trace one if there is none."""
        for program in self.programs.get(self.key_of(binding.step_state, call, optimizers), []):
            sizes = program.sizes_of(call.leaves) if program.capture.sizes else ()
            broken = program.broken_guard(optimizers.values, sizes)
            if broken is None and (not sizes or self.is_for_length(binding.step_state, binding.plan, call, program)):
                self.latest = program
                return program
            if broken is not None and broken.free_symbols & set(program.capture.sizes.values()):
                self.note_decision(broken, sizes)
        program = self.latest = self.retrace(binding, call)
        # The key is made here: a trace with symbols may have given way to one without.
        self.programs.setdefault(self.key_of(binding.step_state, call, optimizers), []).append(program)
        if self.num_traces == MANY_TRACES + 1:
            warnings.warn(
                f"{self.name} was traced {self.num_traces} times: each new shape, and each new Python value among its "
                "arguments, takes a trace. Where lengths change, pass mark_dynamic=1 to compile, or the dim that they "
                "are in, or pad batches to few lengths; pass numbers that change in tensors",
                stacklevel=4,
            )
        while sum(map(len, self.programs.values())) > MOST_PROGRAMS:
            del self.programs[next(iter(self.programs))]  # the oldest
        return program

    def note_decision(self, broken: Any, sizes: tuple[int, ...]) -> None:
        """Warn once that a decision on sizes takes another trace; where it fixes one, each length has a trace."""
        if broken.func.__name__ == "Equality" and len(broken.free_symbols) == 1:
            self.stop_marking(f"the step, or an operator, uses a size as a number ({broken})")
        elif not self.has_warned:
            self.has_warned = True
            text = f"{self.name} takes another trace for sizes {sizes}: an earlier one decided {broken}"
            warnings.warn(f"{text}. Without `if` on sizes one trace serves all lengths", stacklevel=5)

    def is_for_length(self, step_state: StepState, plan: PartitionPlan, call: CallArguments, program: Program) -> bool:
        """Return whether a graph with symbols is that of a trace for this length; compared for two lengths.

        Each rank does so by itself: ranks may have other lengths at a call.
        """
        sizes = program.sizes_of(call.leaves)
        if not sizes or sizes in program.right_sizes or len(program.right_sizes) > 1:
            return True
        static = self.trace(step_state, plan, call, keep_views=True)
        outputs = program.capture.returned.everything, static.capture.returned.everything
        difference = first_difference(program.module.graph, static.module.graph, outputs)
        if difference:
            self.stop_marking(f"its graph for sizes {sizes} is another one: {difference}")
            return False
        program.right_sizes.add(sizes)
        return True

    def retrace(self, binding: Binding, call: CallArguments) -> Program:
        """Trace a program for new arguments.

        Under global semantics all ranks' batches change agree_on, and agree. Under local semantics a rank may retrace
        alone, for a last batch of its own, as long as its collectives stay those that were agreed on.
        """

        def attempt() -> tuple[tuple[Program, Mapping[str, str]], Mapping[str, str]]:
            program = self.build_compiled(binding.step_state, binding.plan, call)
            facts = self.facts(binding.plan, program, call.leaves)
            return (program, facts), facts

        announce(self.trace_label)
        if self.settings.semantics == "global":
            program = agree_on(self.mesh, self.name, attempt)[0]
        else:
            (program, _), facts = retraced = attempt()
            if facts not in self.agreed:
                agree_on(self.mesh, self.name, lambda: retraced)
                self.agreed.append(facts)
        program.is_new = True
        return program

    @property
    def trace_label(self) -> str:
        """Text for a trace in this call that all ranks have in common; empty if they have none."""
        return f"{self.schedule.token}/{self.schedule.calls}" if self.schedule.token and self.mesh.size() > 1 else ""

    def is_new_on_all_ranks(self, program: Program) -> bool:
        """Return whether this call is the first of a trace, on every rank: it is checked then, due or not.

        The call of a rank that traced alone, for a batch of its own size, is not checked, since the others would not
        take part; the next calls that are due make up for it.
        """
        if self.settings.check == "never":
            return False
        if self.mesh.size() == 1 or not any(map(is_collective, program.module.graph.nodes)):
            return True
        return all_announced(self.trace_label, self.mesh.size())

    # ---- whose model it is ------------------------------------------------------------------------------------------

    def check_shared(self, base: Binding, step_state: StepState) -> None:
        """Raise unless a step that uses what another step placed is given that step's model, and no optimizer."""
        placed = {id(param) for param in base.params.values()}
        foreign = [name for name, param in step_state.params.items() if id(param) not in placed]
        if foreign or step_state.optimizers:
            hint = "pass the model of the step it shares with, and no optimizer"
            found = f"parameter {foreign[0]} is not placed by it" if foreign else "an optimizer is passed"
            raise PlanError(Problem("model-changed", self.name, found=found, hint=hint))

    def check_step_state(self, binding: Binding, leaves: list[Any]) -> None:
        """Raise if this step was placed for another model or optimizer."""
        given = {id(leaf) for leaf in leaves if isinstance(leaf, nn.Module | Optimizer)}
        if given != binding.owner_ids:
            hint = "call release() on the step first, or compile a step of its own"
            raise PlanError(
                Problem("model-mismatch", self.name, found="called with another model or optimizer", hint=hint)
            )
        binding.check_in_place()
