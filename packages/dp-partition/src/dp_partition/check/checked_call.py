"""One checked call: copy, run graph and reference, compare, and undo everything on a mismatch.

The steps (all ranks alike, since the copy and the averages communicate):

1. agree that the copy fits, take a snapshot to go back to, copy the step;
2. run the copy; where it raises on any rank, all raise, before a collective of the graph;
3. run the graph from the same random numbers, and compare;
4. differences on any rank are held against the spread of more runs of the copy;
5. on a mismatch restore the snapshot and raise on every rank.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_partition._shared.consensus import all_gather_objects, capture_errors
from dp_partition._shared.copying import CannotCopyError, Transform
from dp_partition._shared.execution_check import Precision, RandomState
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import FakeTensor, global_modes, has_gradient_hooks, pytree
from dp_partition.capture.inputs import CallArguments, read_optimizers
from dp_partition.capture.reach import PythonState, Reach
from dp_partition.capture.state import StepState, choose_foreach, index_tensors
from dp_partition.check.reference import (
    INTEGERS,
    Difference,
    Outcome,
    ReferenceEnd,
    StepCopy,
    copy_step,
    differences,
    is_out_of_memory,
    live_outcome,
    measure,
    perturbation,
    run_reference,
)
from dp_partition.nodes import meta_of
from dp_partition.plan.placements import all_groups, name_of, warn_on_first
from dp_partition.plan.plan import Settings
from dp_partition.runtime.consensus import raise_naming_peers
from dp_partition.runtime.program import Program
from dp_partition.runtime.state import Binding, Snapshot, full_tensor, full_tensors, live_tensors, local_tensor

# Accepted ratio of the graph's error to the spread of right results.
FACTOR = 10.0
NUM_PERTURBED = 3


UNCHECKED_HINT = "report it with the step; check='never' trains on without this check"


class CheckMismatch(PlanError):
    """The graph's outcome of a checked call differs from the step's. Everything is as before the call."""


def likely_causes(last: int) -> str:
    """Return the hint of a graph's mismatch: what a caller may have changed since the last equal call, 0 if none was.

    A step that `distribute` runs has no such cause: each call reads the present values of Python.
    """
    since = (
        f"call {last} is the last compared one that was equal: likely since then a Python value changed that the "
        "graph's key does not follow, or state of an object was written in place; pass it to the step as an argument, "
        "or keep it in a buffer; else "
    )
    return (since if last else "no compared call was equal before; ") + UNCHECKED_HINT


class CheckedCall:
    """State of one checked call.

    Args:
        runner: What stands behind the step: a `Runner`, which is above this module.
        binding: The placed model and optimizers.
        program: The graph of the call.
        call: The call's arguments.
    """

    hint = UNCHECKED_HINT  # of a mismatch
    # Way on for an object without a copy: a generator's first batch, say, would be used for ever, without any check.
    must_copy = "pass it to the step as an argument, or its value; check='never' runs the graph without any check"

    def __init__(self, runner: Any, binding: Binding, program: Program, call: CallArguments) -> None:
        self.runner, self.binding, self.program, self.call = runner, binding, program, call
        self.arguments = (call.args, call.kwargs)
        self.gradients: dict[str, torch.Tensor] = {}  # of the graph, before clipping
        # Some ranks alone may call a step without collectives: its check must not communicate either.
        self.communicates = binding.mesh.size() > 1 and program.communicates
        # Knowledge of one rank alone must not choose the calls checked by all ranks.
        self.is_shared = self.communicates or binding.mesh.size() == 1

    def run(self) -> Any:
        copies: list[StepCopy] = []

        def prepared() -> str:
            self.before = Snapshot(self.binding, self.arguments)
            # Tensors from outside of the step's arguments; the graph may write them.
            module = self.program.module
            tensors = [getattr(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"]
            self.constants = [(t, t.detach().clone()) for t in tensors if isinstance(t, torch.Tensor)]
            self.random = self.random_state()
            copies.append(self.copy())
            return ""

        reason = self.not_checkable() or self.refused(prepared)
        if reason:
            return self.unchecked(reason)
        with self.taken_back():
            ended = self.own_run(copies.pop())
        drawn = self.random_state()
        self.random.restore()
        result = self.graph_run(self.gradients)
        with self.taken_back():
            local = self.runner.settings.semantics == "local"
            self.conclude(ended, result, not local or self.random_state().equals(drawn))
        return result

    def refused(self, attempt: Callable[[], str]) -> str:
        """Return the first reason of any rank against a comparison; empty if there is none on all of them."""
        return self.attempted(attempt)[1]

    def attempted(self, attempt: Callable[[], Any]) -> tuple[Any, str]:
        """Return what an attempt makes, and the first reason of any rank against a comparison; empty without one.

        An attempt may return its reason, as text.

        Raises:
            CheckMismatch: On every rank, with the error of an attempt that fails otherwise than for an object without
                a copy or for lack of memory (code ``check-error``): that is no reason to go on unchecked. Nor is an
                object without a copy, where the step must have one.
        """
        value, error = capture_errors(attempt)
        reason = value if isinstance(value, str) else ""
        failed, hint = "", UNCHECKED_HINT
        if isinstance(error, CannotCopyError) and self.must_copy:
            failed, hint = f"cannot copy {error}", self.must_copy
        elif isinstance(error, CannotCopyError):
            reason = str(error)
        elif error is not None and is_out_of_memory(error):
            reason = f"out of memory: {error}"
        elif error is not None:
            failed = f"{type(error).__name__}: {error}"
        rows = self.gather((reason, failed))
        failures = [f"rank {rank}: {text}"[:600] for rank, (_, text) in enumerate(rows) if text]
        if failures:
            self.advance(again=True)
            problems = [Problem("check-error", self.runner.name, found=text, hint=hint) for text in failures]
            raise CheckMismatch(problems, "the step cannot be compared with its run on a full copy") from error
        return value, next((text for text, _ in rows if text), "")

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Leave everything as before if the block raises, for a dead peer or an interrupt."""
        try:
            yield
        except CheckMismatch:
            raise
        except BaseException as error:
            self.roll_back()
            error.add_note(f"raised by the check of {self.runner.subject}; everything is as before the call")
            raise

    def own_run(self, copied: StepCopy) -> ReferenceEnd:
        """Run the copy; raise on every rank where it fails on any.

        The graph has not run then, so no rank waits in one of its collectives for one that has raised.
        """
        versions, modes = self.versions(), global_modes()
        ended = self.reference(copied)
        if ended.outcome is not None and modes != global_modes():
            torch.set_grad_enabled(modes[0])
            ended = ReferenceEnd(error=RuntimeError("it leaves a mode of torch on, or another default dtype"))
        failure = None
        if self.versions() != versions:
            failure = "the step reaches the live model past its arguments: the copy of it wrote to live tensors"
        elif ended.error is not None:
            failure = f"the step raised {type(ended.error).__name__}: {ended.error}"
        failed = [(rank, text) for rank, text in enumerate(self.gather(failure)) if text is not None]
        if failed:
            if ended.is_own and ended.error is not None:
                raise ended.error
            self.roll_back()
            name, hint = self.runner.name, f"in call {self.runner.schedule.calls}; everything is as before it"
            problems = [Problem("check-error", name, found=f"rank {r}: {t}"[:600], hint=hint) for r, t in failed]
            raise CheckMismatch(problems, "the step's own run on a copy failed") from ended.error
        return ended

    def conclude(self, ended: ReferenceEnd, result: Any, draws_alike: bool) -> None:
        """Compare; raise on every rank what any rank found, or choose the next call to check."""
        mismatches: list[Difference] = []
        if ended.outcome is not None:
            graph = live_outcome(self.binding.step_state, self.arguments, result, partial(map, local_tensor))
            graph.add_gradients(self.gradients)
            mismatches = differences(graph, ended.outcome)
            if not draws_alike:
                mismatches.append(Difference("random numbers", math.inf, "generators stand elsewhere after the graph"))
            self.count_gradients(ended.outcome)
        program, leaves = self.program, self.call.leaves
        program.checked_sizes.update(program.sizes_of(leaves).items())
        program.checked_numbers.add(program.numbers_of(leaves))  # live ones need two checks, with different values
        # Another check of one that ended unchecked would end in the same way.
        has_all = len(program.checked_numbers) > 1 or not program.capture.live.arguments
        program.is_checked = has_all or bool(ended.unchecked)
        # Some rank may have traced a graph alone, which no check has run yet.
        unseen = any(not item.is_checked for same_key in self.runner.traces.programs.values() for item in same_key)
        rows = self.gather((ended.unchecked, len(mismatches), unseen))
        reason = next((text for text, *_ in rows if text), "")
        if reason:
            self.note_unchecked(reason)
        elif any(count for _, count, _ in rows):
            mismatches = self.beyond_spread(mismatches, ended.outcome)  # communicates: all ranks take part
            self.hint = likely_causes(self.runner.schedule.last_equal)
            self.raise_mismatch(mismatches)
        self.runner.schedule.num_checked += not reason
        schedule = self.runner.schedule
        schedule.last_equal = schedule.last_equal if reason else schedule.calls
        self.advance(unseen=self.is_shared and any(flag for *_, flag in rows))

    def beyond_spread(self, found: list[Difference], reference: Outcome | None) -> list[Difference]:
        """Leave out differences found between right results as well; none where a rank has no memory to look."""
        noise = dict.fromkeys((item.name for item in found), 0.0)
        snapshot, reason = self.attempted(partial(Snapshot, self.binding, self.arguments))
        if reason:
            return found
        after, precision = self.random_state(), Precision()
        with precision:
            self.variation(None)
        for seed in range(NUM_PERTURBED):
            outcome = self.variation(perturbation(precision.epsilon, seed))
            if outcome is not None and reference is not None:
                for name in noise:
                    noise[name] = max(noise[name], measure(name, outcome, reference))
        snapshot.restore()
        after.restore()
        result = []
        for item in found:
            value = None if reference is None else reference.value(item.name)
            is_count = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
            # Rounding changes integers at near ties only.
            if item.error > FACTOR * noise[item.name] and not (is_count and item.error < INTEGERS):
                result.append(replace(item, noise=noise[item.name]))
        return result

    def variation(self, transform: Transform | None) -> Outcome | None:
        """Outcome of another right run; None where it does not go through."""
        self.before.restore()
        self.random.restore()
        copied, _ = capture_errors(partial(self.copy, transform))  # one rank alone may be short of memory
        if not all(self.gather(copied is not None)) or copied is None:
            return None
        return self.reference(copied).outcome

    def raise_mismatch(self, found: list[Difference]) -> None:
        """Raise on every rank if any rank has a difference."""
        rows = self.gather([(item.name, str(item), item.noise) for item in found[:8]])
        problems: list[Problem] = []
        for rank, row in enumerate(rows):
            for name, text, noise in row:
                if all(name != problem.name for problem in problems):
                    right = f" (right results lie {noise:.0e} apart)" if noise else ""
                    where = f"rank {rank}, " if self.communicates else ""
                    problems.append(Problem("check-mismatch", name, found=f"{where}{text}{right}", hint=self.hint))
        if problems:
            raise CheckMismatch(problems[:8], self.roll_back())

    def roll_back(self) -> str:
        """Restore everything from before the call, and check the next call again; return that for an error."""
        self.before.restore()
        with torch.no_grad():
            for tensor, value in self.constants:
                tensor.copy_(value)
        self.random.restore()
        self.advance(again=True)
        text = "the graph does not do what the step does; parameters, state, buffers, generators are as before the call"
        return f"call {self.runner.schedule.calls} of {self.runner.name}: {text}"

    def copy(self, transform: Transform | None = None) -> StepCopy:
        """Copy the step, with gradients left by earlier calls for it to clear."""
        copied = copy_step(self.runner.traces.function, self.arguments, self.binding, transform)
        for optimizer in copied.step_state.optimizers:
            choose_foreach(optimizer)  # as the trace does: in half precision the two ways differ by a rounding
        if self.runner.schedule.calls > 1:
            programs = [item for same_key in self.runner.traces.programs.values() for item in same_key]
            for name in {name for item in programs for name in item.capture.effects.left}:
                # The graph leaves no gradients: existing ones must not matter to the step.
                copied.step_state.params[name].grad = torch.ones_like(copied.step_state.params[name])
        return copied

    def reference(self, copied: StepCopy) -> ReferenceEnd:
        settings = self.runner.settings
        nodes = self.program.module.graph.nodes
        wanted = {name: lies for node in nodes for _, name, lies in meta_of(node).get("reads", ())}
        capture = self.program.capture
        means = capture.returned.mean_leaves()
        return run_reference(copied, self.binding, settings, bool(capture.gradients), wanted, means=means)

    def graph_run(self, gradients: dict[str, torch.Tensor] | None = None) -> Any:
        """Run the graph; a failure is the step's own, and the schedule goes on."""
        try:
            optimizers = read_optimizers(self.binding.step_state.optimizers)
            return self.runner.run(self.binding, self.program, self.call, optimizers, gradients)
        except BaseException:
            self.advance(again=True)
            raise

    def count_gradients(self, reference: Outcome) -> None:
        """Record in the plan the gradients not compared by this check, with reasons."""
        missing: dict[str, list[str]] = {}
        for name, passes in self.program.capture.gradients.items():
            if name in self.gradients and f"{name} gradient" in reference.tensors:
                continue
            reason = "no node of the graph reads them"
            if passes > 1:
                reason = "several backward passes add to them"
            elif name in self.gradients:
                reason = "the eager run adds to gradients that are there"
            missing.setdefault(reason, []).append(name)
        total = len(self.program.capture.gradients)
        for reason, names in missing.items():
            self.note_unchecked(f"{len(names)} of {total} gradients by themselves ({names[0]}, ...): {reason}")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value if ranks communicate in a step; otherwise this rank's."""
        if not self.communicates:
            return [value]
        return all_gather_objects(self.runner.mesh, value, f"the check of {self.runner.subject}")

    def versions(self) -> list[int]:
        """Return version counters of all live tensors. They show each write of a copy to one of them."""
        live = live_tensors(self.binding.step_state, self.arguments)
        return [local_tensor(tensor)._version for *_, tensor in live]

    def random_state(self) -> RandomState:
        return RandomState(g for g in pytree.tree_leaves(self.arguments) if isinstance(g, torch.Generator))

    def advance(self, *, again: bool = False, unseen: bool = False) -> None:
        """Choose the next call to check, unless this rank alone checks without need."""
        if self.is_shared or 0 < self.runner.schedule.next <= self.runner.schedule.calls:
            self.runner.schedule.advance(again=again, unseen=unseen)

    def not_checkable(self) -> str:
        """Return the reason not to check the call, else empty. Sets the schedule's seed as well."""
        tensors = [tensor for *_, tensor in live_tensors(self.binding.step_state, self.arguments)]
        if any(isinstance(local_tensor(t), FakeTensor) or t.device.type == "meta" for t in tensors):
            return "tensors have no values"
        groups = all_groups(self.binding.mesh) if self.binding.mesh.size() > 1 else []
        backends = [group._get_backend(device).name() for group in groups for device in group._device_types]
        if any("fake" in str(name).lower() for name in backends):
            return "the process group moves no data"
        full = sum(t.numel() * t.element_size() for t in tensors)
        local = sum(local_tensor(t).numel() * t.element_size() for t in tensors)
        # Bytes of a copy, its gradients, and a snapshot of the live shards.
        mine = (torch.initial_seed(), free_bytes(self.binding.mesh.device_type), 2 * full + local)
        rows = self.gather(mine)
        if self.is_shared:  # otherwise the seed is this rank's alone
            text = f"{rows[0][0]}:{self.binding.plan.digest}:{self.runner.name}"
            self.runner.schedule.seed = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        short = [rank for rank, (_, free, needed) in enumerate(rows) if needed > free]
        return f"a full copy does not fit into free memory on rank {short[0]}" if short else ""

    def unchecked(self, reason: str) -> Any:
        """Run the call without a check, and record the reason for the plan."""
        self.note_unchecked(reason)
        result = self.graph_run()
        self.program.checked_sizes.update(self.program.sizes_of(self.call.leaves).items())  # not tried again for these
        self.advance()
        return result

    def note_unchecked(self, reason: str) -> None:
        """Record an unchecked call in the plan; warn once for each reason that more memory would remove."""
        schedule, name = self.runner.schedule, self.runner.name
        if reason not in schedule.unchecked:
            schedule.unchecked.append(reason)
            if self.must_copy and "memory" in reason:
                warn_on_first(self.runner.mesh, f"{name} is not checked against its eager run: {reason}", stacklevel=2)
            elif not self.must_copy and not schedule.num_checked:
                text = f"{name}: no call is compared with the step on a full copy: {reason}"
                warn_on_first(self.runner.mesh, text, stacklevel=5)


def free_bytes(device_type: str) -> int:
    """Return the free memory of this process' device, in bytes."""
    if device_type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 1 << 42  # no Linux: a copy that does not fit raises, and the call is unchecked


IN_A_ROW = 8
NEVER = 0


class CheckSchedule:
    """Call numbers to check: 1, 2, then one drawn from each [2^k, 2^(k+1)), for ever.

    Drawn numbers instead of powers of two: those would never meet ``step % 10``.
    """

    def __init__(self, mode: str) -> None:
        self.mode, self.seed = mode, 0
        self.calls = 0  # so far, failed ones included, so that all ranks count alike
        self.last_equal = 0  # number of the last call whose comparison found it equal; 0: none
        self.num_checked = 0  # calls that were compared
        self.unchecked: list[str] = []  # why calls that were to be compared were not
        self.in_a_row = 0  # consecutive checks for a graph that no check has run yet
        self.next = NEVER if mode == "never" else 1  # number of the next call to check; 0: none

    def is_due(self) -> bool:
        """Count a call; return True if it is due for a check. An unchecked call costs only this compare."""
        self.calls += 1
        return 0 < self.next <= self.calls  # `<`: the due call failed before its check

    def advance(self, *, again: bool = False, unseen: bool = False) -> None:
        """Choose the next call to check.

        Args:
            again: Check the very next call: this one has failed.
            unseen: Check it because some rank has an unchecked graph: not for ever, as it may never run again.
        """
        done = self.calls
        self.in_a_row = self.in_a_row + 1 if unseen and self.in_a_row < IN_A_ROW else 0
        if again or done == 1 or self.in_a_row:
            self.next = done + 1
        elif self.mode == "first":
            self.next = NEVER
        else:
            power = max(2, done.bit_length())
            self.next = random.Random(f"{self.seed}:{power}").randrange(1 << power, 1 << (power + 1))


class StepRunner:
    """Behind a step of either door: its name, ranks and settings, and the schedule of its checks."""

    token: str  # unique to the step on its ranks, for notes in the store; empty before they have shared it
    due_call: Callable[..., Any]  # one call, with its arguments, and whether it is due for a check

    def __init__(self, function: Callable[..., Any], mesh: DeviceMesh, settings: Settings) -> None:
        self.function, self.mesh, self.settings = function, mesh, settings
        self.name = name_of(function)
        self.schedule = CheckSchedule(settings.check)

    @property
    def subject(self) -> str:
        """Call and rank, for errors of one rank."""
        return f"call {self.schedule.calls} of {self.name} on rank {dist.get_rank()}"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step on this rank's batch.

        Raises:
            PlanError: ``ranks-diverge`` in both of two threads that run steps at once.
        """
        is_alone = _ONE_CALL.acquire(blocking=False)
        try:
            if not is_alone:
                _interrupted.append(self.name)
            else:
                result = self.due_call(args, kwargs, self.schedule.is_due())
            if _interrupted:  # ranks may not have seen it alike: neither call goes on
                reason = f"another thread runs a step while {_interrupted[0]} is called: collectives of both would mix"
                hint = "call steps in one thread, or one at a time and in one order on all ranks"
                raise PlanError(Problem("ranks-diverge", self.name, found=reason, hint=hint))
            return result
        except Exception as error:
            raise_naming_peers(error, self.token, self.mesh, self.subject)
            raise
        finally:
            if is_alone:
                _interrupted.clear()
                _ONE_CALL.release()


_ONE_CALL = threading.RLock()  # a step may call another one in its own thread
_interrupted: list[str] = []  # steps that other threads have called meanwhile


# A second run of a step with one of these names in its code would be seen outside of it. Other effects (a request, a
# queue) run twice in checked calls, which the README says: no hook sees them all.
EFFECTS = frozenset([
    "print", "input", "open", "save", "write", "writelines", "add_scalar", "add_scalars", "log_metrics", "info",
    "all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "time", "perf_counter", "monotonic",
])  # fmt: skip


class CheckedEagerCall(CheckedCall):
    """One of the first calls of `distribute`'s step, compared with the step on a full copy without shards.

    The copy is run several times, as copies of the copy: right runs may differ by rounding, and their spread is the
    tolerance.
    """

    must_copy = ""  # the step's own Python runs in any case
    is_shared = True  # all ranks compare the same calls

    def __init__(self, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.runner = runner
        self.live_arguments = self.arguments = (args, kwargs)
        self.roots = (runner.function, args, kwargs)
        self.communicates = runner.mesh.size() > 1
        # A watched call runs uncompiled; torch's compiler sets `capturable` of an optimizer on CUDA.
        self.is_watched = runner.eager.is_sharded and runner.eager.placed is None

    def run(self) -> Any:
        if self.runner.eager.reducer is None:
            self.runner.eager.start(
                *self.live_arguments, self.runner.number
            )  # rank 0's values everywhere, before they are copied
        python: list[PythonState] = []

        def read() -> str:  # any of it may fail on one rank alone: its objects are its own
            self.reach = Reach(*self.roots)  # what the call itself makes (a copy of the model) is not compared
            reason = self.not_copyable(state_of(self.reach))
            if not reason:
                python.append(PythonState(*self.roots))
                self.random = self.random_state()
            return reason

        reason, ended = self.refused(read), ReferenceEnd()
        if not reason:
            reason, ended = self.compared_run()
            python.pop().restore()
            self.random.restore()
        result = self.runner.eager(*self.live_arguments, self.runner.number)
        if reason or ended.outcome is None:
            self.note_unchecked(reason)
            return result
        outcome = live_outcome(state_of(self.reach), self.live_arguments, result, full_tensors)
        mismatches = differences(outcome, ended.outcome)
        if any(self.gather(len(mismatches))):

            def take_snapshot() -> str:
                self.before = Snapshot(self.binding, self.arguments)
                python.append(PythonState(*self.roots))
                return ""

            if not self.refused(take_snapshot):
                mismatches = self.beyond_spread(mismatches, ended.outcome)
                python.pop().restore()
            self.raise_mismatch(mismatches)
        self.runner.schedule.num_checked += 1
        self.runner.checked.append(sum(tensor.numel() for tensor in ended.outcome.tensors.values()))
        return result

    def compared_run(self) -> tuple[str, ReferenceEnd]:
        """Run a copy of the step; return a reason against a comparison, the same on all ranks, and the run's end."""
        state = state_of(self.reach)
        placed: Any = SimpleNamespace(step_state=state, mesh=self.runner.mesh)
        # Left by earlier calls; shards are gathered on all ranks, before a copy can fail on one.
        self.left = [None if p.grad is None else full_tensor(p.grad).clone() for p in state.params.values()]
        source = (self.runner.function, self.live_arguments, placed)
        self.shadow, reason = self.attempted(partial(self.copy, source=source))
        if reason:
            return reason, ReferenceEnd()
        state = self.shadow.step_state
        self.binding: Any = SimpleNamespace(step_state=state, mesh=self.runner.mesh)
        self.arguments = (self.shadow.args, self.shadow.kwargs)
        copied, reason = self.attempted(self.copy)  # memory may be short on one rank
        if reason:
            return reason, ReferenceEnd()
        ended = self.reference(copied)
        reasons = self.gather(ended.unchecked or (f"its copy raises {ended.error!r}"[:200] if ended.error else ""))
        return next(filter(None, reasons), ""), ended

    def not_copyable(self, state: StepState) -> str:
        """Return the reason against a copy of the step; empty without one."""
        if effects := [*self.reach.iterators, *sorted(EFFECTS & self.runner.reads.names)]:
            return f"a second run of {effects[0]} would be seen"
        if any(map(has_gradient_hooks, state.params.values())):
            return "a gradient hook of a parameter is not copied"
        if self.reach.identities(state.params.values(), (dict, set, frozenset)):
            return "a container looks parameters up by identity, and a copy has others"
        needed = 3 * sum(t.nbytes for *_, t in live_tensors(state, self.live_arguments) if t.layout == torch.strided)
        fits = needed <= free_bytes(self.runner.mesh.device_type)
        return "" if fits else "full copies do not fit into free memory"

    def copy(self, transform: Transform | None = None, source: tuple[Any, Any, Any] | None = None) -> StepCopy:
        """Copy the shadow, or another source, with its own state and the gradients that earlier calls left."""
        function, arguments, binding = source or (self.shadow.function, self.arguments, self.binding)
        copied = copy_step(function, arguments, binding, transform)
        for param, gradient in zip(copied.step_state.params.values(), self.left, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        return copied

    def reference(self, copied: StepCopy) -> ReferenceEnd:
        with torch.compiler.set_stance("force_eager") if self.is_watched else nullcontext():
            return run_reference(copied, self.binding, self.runner.settings, averages=True, is_eager=True)

    def roll_back(self) -> str:
        """Return a summary alone: a call on FSDP2's shards is not undone."""
        calls, name = self.runner.eager.num_calls, self.runner.name
        return f"call {calls} of {name} does not do what the step does on full parameters; the call's values stay"


def state_of(reach: Reach) -> StepState:
    """Return present tensors of the models and optimizers of a walk; others that are trained count as parameters."""
    prefixes = [""] if len(reach.modules) < 2 else [str(number) for number in range(len(reach.modules))]
    state = StepState(list(zip(prefixes, reach.modules, strict=False)), reach.optimizers)
    index_tensors(state)
    inside = set(map(id, state.params.values()))
    state.params |= {name: p for name, p in reach.parameters.items() if id(p) not in inside}
    return state
