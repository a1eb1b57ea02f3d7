"""Behind a `CompiledStep`: the first call traces and places; later ones find their program."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dp_partition._shared.consensus import all_gather_objects, capture_errors, ranks_of
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import without_autocast
from dp_partition.capture.inputs import CallArguments, OptimizerReads, read_arguments
from dp_partition.capture.state import (
    StepState,
    check_traceable,
    find_step_state,
    rename,
    without_data,
)
from dp_partition.check.checked_call import CheckedCall, CheckSchedule
from dp_partition.plan.placements import num_replicas, shard_world, warn_on_first
from dp_partition.plan.plan import PartitionPlan, Settings, TensorInfo, plan_placements
from dp_partition.runtime.consensus import (
    HINT,
    agree_on,
    announce,
    are_all_announced,
    collectives_digest,
    compare_values,
    largest_of,
    raise_naming_peers,
)
from dp_partition.runtime.program import Program, bind_inputs, check_no_gradients, reconcile, store_outputs
from dp_partition.runtime.state import REPLACED, Binding, ModelChangedError, guarded, release, with_current_parameters
from dp_partition.traces import Traces


class Runner:
    """State of a step between calls."""

    def __init__(
        self, function: Callable[..., Any], mesh: DeviceMesh, settings: Settings, share: Runner | None = None
    ) -> None:
        self.mesh, self.settings = mesh, settings
        self.traces = Traces(function, mesh, settings)
        self.name = self.traces.name
        if self.traces.original is not function:
            warn_on_first(mesh, f"{self.name}: of a compiled step the original runs; compile the model", stacklevel=3)
        self.share = share  # another runner; its placed parameters are used
        self.sharers: list[Runner] = []  # other runners with this one's placed parameters
        if share is not None:
            share.owner.sharers.append(self)
        self.binding: Binding | None = None  # the placed model and optimizers; None before the first call
        self.agreed: list[Mapping[str, str]] = []  # what ranks have compared of their programs
        self.schedule = CheckSchedule(settings.check)

    def checks(self) -> str:
        """Return the checked calls as text for the plan."""
        if self.settings.check == "never":
            return "unchecked: check='never'"
        text = f"{self.schedule.num_checked} of {self.schedule.calls} calls checked against the eager step"
        return "; unchecked: ".join([text, *self.schedule.unchecked])

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step on this rank's batch, as a graph."""
        is_checked = self.schedule.is_due()
        try:
            return self.due_call(args, kwargs, is_checked)
        except Exception as error:
            raise_naming_peers(error, self.schedule.token, self.mesh, self.subject)
            raise

    def due_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        binding = self.binding
        if binding is None:
            call = read_arguments(self.name, args, kwargs)
            call.marked = self.traces.marked
            binding, program, facts = agree_on(self.mesh, self.name, lambda: self.prepare(call))
            if self.share is None:  # only after success on every rank
                binding.place()
            else:
                binding.hold_storages()
            self.binding = binding
            if self.mesh.size() > 1 and not self.schedule.token:  # for traces that all ranks make in one call
                self.schedule.token = all_gather_objects(self.mesh, secrets.token_hex(8), self.name)[0]
            self.agreed.append(facts)  # later traces of one rank alone must equal it
            optimizers = reconcile(binding)
            self.traces.programs[self.traces.key_of(binding.step_state, call, optimizers)] = [program]
            self.traces.latest = program
        else:
            later = self.later_call(binding, args, kwargs)
            if later is None:  # the caller has changed the model, on all ranks: it is placed anew
                self.release()
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
        check_no_gradients(binding.step_state, program.capture.cleared)
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
    def subject(self) -> str:
        """Call and rank, for errors of one rank."""
        return f"call {self.schedule.calls} of {self.name} on rank {dist.get_rank()}"

    @property
    def owner(self) -> Runner:
        """The runner with the placed parameters: this one, unless it shares another's."""
        return self if self.share is None else self.share.owner

    def bound(self) -> Binding:
        """Return the placed model and optimizers; raise ``not-sharded`` before the first call."""
        if self.binding is None:
            raise PlanError(Problem("not-sharded", self.name, found="nothing is placed yet", hint="call the step once"))
        return self.binding

    def release(self) -> None:
        """Restore model and optimizer, and drop all programs.

        Raises:
            PlanError: ``model-changed`` for a step that shares another's parameters.
        """
        if self.share is not None:
            hint = f"call release() on {self.owner.name}, or let go of this step"
            raise PlanError(Problem("model-changed", self.name, found="shares what another step placed", hint=hint))
        bound = [sharer for sharer in self.sharers if sharer.binding is not None]
        release(self.bound(), [optimizer for sharer in bound for optimizer in sharer.bound().step_state.optimizers])
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
                hint = "pass the models of the step it shares with, and optimizers of their parameters"
                reason = f"parameter {foreign[0]} is not placed by it"
                raise PlanError(Problem("model-changed", self.name, found=reason, hint=hint))
            rename(step_state, base.names)
            plan = base.plan
        self.traces.note_values(call)
        program = self.traces.build(step_state, plan, call)
        check_no_gradients(step_state, program.capture.cleared)
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

        def attempt() -> tuple[CallArguments, Program, OptimizerReads]:
            call = read_arguments(self.name, args, kwargs)
            call.live, call.marked = self.traces.live.get(call.spec) or frozenset(), self.traces.marked
            if self.owner.bound().is_unsharded:
                reason, hint = "the model holds full parameters in a block of unsharded()", "leave the block first"
                raise PlanError(Problem("unsharded-now", self.name, found=reason, hint=hint))
            binding.check_in_place()
            passed = [x for x in call.leaves if isinstance(x, nn.Module | Optimizer) and id(x) not in binding.owner_ids]
            if passed:  # a call that evaluates may leave the optimizer out
                is_optimizer = all(isinstance(value, Optimizer) for value in passed)
                hint = REPLACED if is_optimizer else "call release() on the step first, or compile a step of its own"
                problem = Problem(
                    "model-mismatch", self.name, found="called with another model or optimizer", hint=hint
                )
                raise (ModelChangedError if is_optimizer else PlanError)(problem)
            optimizers = reconcile(binding)
            state, plan, find = binding.step_state, binding.plan, self.traces.find_program
            return call, find(state, plan, call, optimizers, self.trace_label), optimizers

        attempted, error = capture_errors(attempt)
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
            reason = f"call {self.schedule.calls} has other collectives on this rank alone; the others run their graph"
            raise PlanError(Problem("ranks-disagree", self.name, found=reason, hint=HINT))
        if has_agreed or self.settings.semantics == "global" or differs:

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
        return f"{self.schedule.token}/{self.schedule.calls}" if self.schedule.token and self.mesh.size() > 1 else ""
