"""Behind a `Step`: the first call plans, traces and places; later calls find their program, or trace one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TextIO

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dp_partition._torch_compat import pytree, without_autocast
from dp_partition.agreement import batch_text, collectives_digest, together
from dp_partition.axes import num_replicas, shard_world
from dp_partition.binding import Binding
from dp_partition.bucket import Traffic
from dp_partition.capture.arguments import closing, open_arguments
from dp_partition.capture.attributes import check_traceable
from dp_partition.capture.constants import FunctionConstants
from dp_partition.capture.hypers import find_hypers
from dp_partition.capture.subject import Subject, find_subject
from dp_partition.check.checked_call import CheckedCall
from dp_partition.check.schedule import CheckSchedule
from dp_partition.failure import guarded
from dp_partition.feeding import gather_inputs, store_outputs
from dp_partition.keys import program_key
from dp_partition.lower.lowered import check_inductor, lower
from dp_partition.plain import release
from dp_partition.plan import PartitionPlan, TensorInfo, check_plan, plan_placements
from dp_partition.problems import PlanError, Problem
from dp_partition.program import Program, build_program
from dp_partition.progress import Progress, counted
from dp_partition.randomness import Stream
from dp_partition.settings import Settings
from dp_partition.upkeep import check_no_gradients, take_over


class Runner:
    """What a step keeps between calls.

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
        checked: Programs that a check has run.
        unchecked: Why calls that were to be checked were not.
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
        self.outside = FunctionConstants(function)
        self.stream: Stream | None = None
        self.binding: Binding | None = None
        self.programs: dict[Any, list[Program]] = {}
        self.agreed: list[Mapping[str, str]] = []
        self.gathered_again: frozenset[str] | None = None
        self.latest: Program | None = None
        self.num_traces = self.num_compiled = self.num_checked = 0
        self.schedule = CheckSchedule(settings.check)
        self.checked: set[int] = set()
        self.unchecked: list[str] = []

    # ---- what was chosen --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the function the step was made from."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def batch_dim(self) -> int:
        """Batch dim of tensor arguments."""
        return self.settings.batch_dim

    @property
    def accumulate(self) -> int:
        """Number of micro-batches of a call."""
        return self.settings.accumulate

    @property
    def traffic(self) -> Traffic:
        """How communication is arranged, as far as it does not change what is computed: what `verify` simulates."""
        return replace(self.settings.traffic, reduce_dtype=None, hook=None)

    def checks(self) -> str:
        """Which calls were compared with the eager step, as text for the plan."""
        if self.settings.check == "never":
            return "unchecked: check='never'"
        text = f"{self.num_checked} of {self.schedule.calls} calls checked against the eager step"
        return "; unchecked: ".join([text, *self.unchecked])

    @property
    def resharding(self) -> str | bool | frozenset[str]:
        """What is gathered again for backward; once chosen it stays, so that a rank that retraces alone does as all."""
        return self.settings.reshard if self.gathered_again is None else self.gathered_again

    # ---- a call -----------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step on this rank's batch."""
        is_checked = self.schedule.is_due()
        args, kwargs = open_arguments(self.name, (args, kwargs))
        binding = self.binding
        if binding is None:
            binding, program = self.start(args, kwargs)
        else:
            self.check_subject(binding, args, kwargs)
            take_over(binding)
            program = self.find_program(binding, args, kwargs)
        if is_checked:
            return CheckedCall(self, binding, program, (args, kwargs)).run()
        return self.run(binding, program, args, kwargs)

    def run(self, binding: Binding, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph and put new state in place."""
        check_no_gradients(binding.subject, program.capture.cleared)
        inputs = gather_inputs(binding, program, args, kwargs)
        kept = {label: inputs[position] for label, position in program.labels(("param", "state"))}
        buffers = {label: inputs[position] for label, position in program.labels(("buffer",))}
        drawing = self.stream.drawing() if self.stream is not None else nullcontext()
        with torch.no_grad(), without_autocast(), guarded(kept, buffers), drawing:
            values = program.run(inputs)
        store_outputs(binding, program, values)
        return program.capture.returned.result(values)

    @property
    def owner(self) -> Runner:
        """The runner that placed the parameters: this one, unless it shares another's."""
        return self if self.share is None else self.share.owner

    def bound(self) -> Binding:
        """The placed model and optimizers.

        Raises:
            PlanError: Before the first call (code ``not-started``).
        """
        if self.binding is None:
            raise self.not_started()
        return self.binding

    def not_started(self) -> PlanError:
        """The error for what is there after the first call only."""
        return PlanError(Problem("not-started", self.name, found="nothing is placed yet", hint="call the step once"))

    def release(self) -> None:
        """Give model and optimizer back, and forget everything.

        Raises:
            PlanError: ``not-owner`` for a step that shares what another one placed.
        """
        if self.share is not None:
            hint = f"call release() on {self.owner.name}, or let go of this step"
            raise PlanError(Problem("not-owner", self.name, found="shares what another step placed", hint=hint))
        release(self.bound())
        self.binding, self.latest, self.gathered_again = None, None, None
        self.programs.clear()
        self.agreed.clear()

    # ---- the first call ---------------------------------------------------------------------------------------------

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Binding, Program]:
        """Plan, trace and partition; only when all that succeeded, on every rank, place the tensors."""
        binding, program, facts = together(self.mesh, self.name, lambda: self.prepare(args, kwargs))
        if self.share is None:
            binding.place(self.settings.equal)
            take_over(binding)
            if self.settings.rng is not None:
                self.stream = Stream(self.mesh, self.settings.rng)
        self.binding = binding
        self.agreed.append(facts)
        if self.settings.reshard == "auto" and self.settings.semantics == "local":
            self.gathered_again = program.gathered_again()
        self.remember(binding.subject, args, kwargs, program)
        return binding, program

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Binding, Program, Mapping[str, str]], Mapping[str, str]]:
        """Plan, trace and partition without communication; with the facts that ranks have to agree on."""
        if self.settings.backend == "inductor":
            check_inductor(self.mesh.device_type)
        base = None if self.share is None else self.share.bound()
        subject = find_subject(self.function, args, kwargs)
        if base is None:
            check_traceable(subject)
            plan = self.plan_for(subject, shard_world(self.mesh))
        else:
            self.check_shared(base, subject)
            plan = base.plan
        program = self.made(subject, plan, args, kwargs)
        check_no_gradients(subject, program.capture.cleared)
        facts = self.facts(plan, program, args, kwargs)
        return (Binding(subject, plan, self.mesh), program, facts), facts

    def facts(
        self, plan: PartitionPlan, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, str]:
        """What has to be equal on every rank before a program runs."""
        facts = {
            "plan": plan.digest,
            "settings": self.settings.text(),
            "collectives": collectives_digest(program.module.graph),
        }
        if self.settings.semantics == "global":
            facts["batch"] = batch_text(pytree.tree_leaves((args, kwargs)))
        return facts

    def plan_for(self, subject: Subject, world: int) -> PartitionPlan:
        """Where everything would lie on ``world`` ranks.

        Raises:
            PlanError: With all problems of the plan.
        """
        plan = plan_placements(
            [TensorInfo(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in subject.params.items()],
            self.settings.style,
            world,
            semantics=self.settings.semantics,
            overrides=self.settings.placements,
            aliases={a: n for a, n in subject.aliases.items() if n in subject.params},
            replicas=num_replicas(self.mesh),
            reduction=self.settings.reduction(),
        )
        check_plan(plan)
        return plan

    def made(self, subject: Subject, plan: PartitionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """A program that is ready to run: traced, partitioned and lowered."""
        self.progress.begin("tracing")
        program = self.build(subject, plan, args, kwargs)
        if self.settings.backend == "inductor":
            self.progress.begin("compiling")
            module = program.with_local_values()
            program.lowered = lower(program.for_backend(), module, self.name, self.progress)
            self.num_compiled += program.lowered.num_compiled
        self.progress.end()
        return program

    def build(self, subject: Subject, plan: PartitionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Trace and partition for the arguments at hand."""
        self.num_traces += 1
        settings = (self.batch_dim, self.settings.traffic, self.accumulate, self.resharding)
        function = counted(self.function, self.progress)
        before = self.python_state(subject, args, kwargs)
        program = build_program(function, args, kwargs, subject, plan, self.mesh, *settings)
        self.check_python_state(before, self.python_state(subject, args, kwargs))
        if self.passes is not None:
            program.module.recompile()
            program.capture.module = self.passes(program.module)
        return program

    def python_state(self, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the step reads beside tensors, as it is now."""
        return program_key(subject, args, kwargs, self.outside)

    def check_python_state(self, before: Any, after: Any) -> None:
        """Raise if running the step changed what it reads: a graph of it would not.

        Raises:
            PlanError: ``python-state``.
        """
        if before != after:
            found = "running it changes Python values that it reads: a counter, a flag, an entry of a list or dict"
            hint = "keep what changes from step to step in a buffer, or pass it to the step in a tensor"
            raise PlanError(Problem("python-state", self.name, found=found, hint=hint))

    # ---- later calls ------------------------------------------------------------------------------------------------

    def remember(self, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> None:
        """Keep a program for arguments like these."""
        self.programs.setdefault(program_key(subject, args, kwargs, self.outside), []).append(program)
        self.latest = program

    def find_program(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The program whose guards hold for these arguments; traced now if there is none."""
        hypers = {h: h.read(binding.subject.optimizers) for h in find_hypers(binding.subject.optimizers)}
        for program in self.programs.get(program_key(binding.subject, args, kwargs, self.outside), ()):
            if program.holds_for(hypers):
                self.latest = program
                return program
        program = self.retrace(binding, args, kwargs)
        self.remember(binding.subject, args, kwargs, program)
        return program

    def retrace(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """A program for new arguments.

        Under global semantics all ranks' batches change together, and agree. Under local semantics a rank may retrace
        alone, for a last batch of its own, as long as its collectives stay those that were agreed on.
        """

        def attempt() -> tuple[tuple[Program, Mapping[str, str]], Mapping[str, str]]:
            program = self.made(binding.subject, binding.plan, args, kwargs)
            facts = self.facts(binding.plan, program, args, kwargs)
            return (program, facts), facts

        if self.settings.semantics == "global":
            return together(self.mesh, self.name, attempt)[0]
        made, facts = attempt()
        if facts not in self.agreed:
            together(self.mesh, self.name, lambda: (made, facts))
            self.agreed.append(facts)
        return made[0]

    # ---- whose model it is ------------------------------------------------------------------------------------------

    def check_shared(self, base: Binding, subject: Subject) -> None:
        """Raise unless a step that uses what another step placed is given that step's model, and no optimizer."""
        placed = {id(param) for param in base.params.values()}
        foreign = [name for name, param in subject.params.items() if id(param) not in placed]
        if foreign or subject.optimizers:
            hint = "pass the model of the step it shares with, and no optimizer"
            found = f"parameter {foreign[0]} is not placed by it" if foreign else "an optimizer is passed"
            raise PlanError(Problem("not-shared", self.name, found=found, hint=hint))

    def check_subject(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if this step was placed for another model or optimizer."""
        leaves = pytree.tree_leaves((args, kwargs))
        known: list[Any] = [m for _, m in binding.subject.modules] + list(binding.subject.optimizers)
        given = [leaf for leaf in leaves if isinstance(leaf, nn.Module | Optimizer)]
        if {id(one) for one in given} != {id(one) for one in known}:
            hint = "call release() on the step first, or compile a step of its own"
            raise PlanError(
                Problem("other-model", self.name, found="called with another model or optimizer", hint=hint)
            )
        binding.check_in_place()


__all__ = ["Runner"]
