"""Mover: executes one plan or several fused ones in a group, repeatedly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shard_reshard._shared.problems import Problem, raise_problems
from shard_reshard._torch_compat import is_fake
from shard_reshard.execution.changes import ChangeExchange
from shard_reshard.execution.checks import TensorGuards, destination_problems, local_problems
from shard_reshard.execution.exchange import Exchange, Workspace
from shard_reshard.group import GroupInfo, assert_consistent, check_mode, data_device
from shard_reshard.lowering import build_program
from shard_reshard.plan import Plan, group_problems


class NotPicklable:
    """An object that can be neither copied nor pickled; its error names the alternative."""

    _instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a copy would share the collectives of this object, or have none.

        Raises:
            TypeError: Always.
        """
        kind = type(self).__name__
        raise TypeError(f"a {kind} belongs to a process group of this process and is not copied: {self._instead}")


class Schedules:
    """Movers and plans that ranks have prepared, by group, kind and key; the one memory of this process.

    Kinds have separate bounds, so that entries looked up by one rank alone do not evict entries that all ranks have to
    look up alike. A group's entries end with the group.
    """

    _BOUNDS: ClassVar[dict[str, int]] = {"call": 8192, "mover": 1024, "state dict plan": 16, "state dict": 8}

    def __init__(self) -> None:
        # By kind and group. Repeated calls read it as it is: a method would cost them a frame.
        self.entries: dict[str, WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]]] = {
            kind: WeakKeyDictionary() for kind in self._BOUNDS
        }

    def of(self, group: dist.ProcessGroup, kind: str) -> Mapping[Any, Any]:
        """Return the entries of a kind, oldest first."""
        return self.entries[kind].get(group, {})

    def put(self, group: dist.ProcessGroup, kind: str, key: Any, value: Any) -> None:
        """Add an entry, and evict the oldest of its kind beyond the bound."""
        entries = self.entries[kind].setdefault(group, {})
        entries[key] = value
        while len(entries) > self._BOUNDS[kind]:
            entries.pop(next(iter(entries)))  # dicts keep insertion order

    def drop(self, group: dist.ProcessGroup) -> None:
        """Drop all entries of a group."""
        for entries in self.entries.values():
            entries.pop(group, None)


schedules = Schedules()


def shared_mover(members: GroupInfo, plans: tuple[Plan, ...], check: str) -> Mover:
    """Return the mover of one-shot calls, without a workspace: several callers share it."""
    mover: Mover | None = schedules.of(members.group, "mover").get((plans, check))
    if mover is None:
        mover = Mover(plans, members, check)
        schedules.put(members.group, "mover", (plans, check), mover)
    return mover


class Mover:
    """Executor of one or several fused plans, by one collective for each stage or round.

    With a ``workspace`` its calls share buffers and views, and a second call waits for the first. For ``late`` see
    `Exchange`.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        members: GroupInfo,
        check: str = "first",
        workspace: Workspace | None = None,
        late: bool = False,
    ) -> None:
        self.plans = tuple(plans)
        self.members = members
        self.check, self.late = check_mode(check), late
        self.workspace = workspace
        self.num_calls = 0
        self._transposed: Mover | None = None
        self.agreed: set[tuple[str, str]] = set()  # devices (and options) compared by all ranks
        self.guards: TensorGuards | None = None  # on the last call without gradient or problem
        self.changes: ChangeExchange | None = None  # sends only changes since the previous call

    @cached_property
    def exchange(self) -> Exchange:
        """Program on torch, built at the first call."""
        return Exchange(build_program(self.plans, self.members.rank, self.members.size), self.workspace, self.late)

    @property
    def transposed(self) -> Mover:
        """Mover of gradients; it follows from this one's plans, so ranks need no comparison."""
        if self._transposed is None:
            turned = [plan.transpose() for plan in self.plans]
            workspace = None if self.workspace is None else Workspace()
            self._transposed = Mover(turned, self.members, self.check, workspace)
            self._transposed._transposed = self
        return self._transposed

    # ---- guards and checks ------------------------------------------------------------------------------------

    def problems(self, sources: list[torch.Tensor], outs: list[torch.Tensor] | None) -> list[Problem]:
        """Return the problems of this rank's tensors, for a mover of one plan."""
        (plan,), where = self.plans, f"rank {self.members.rank}"
        if outside := group_problems([plan], self.members.size):
            return outside  # the layout's other checks need its ranks
        problems = local_problems(plan, self.members.rank, sources)
        if plan.max_workspace_bytes is not None and any(t.is_conj() or t.is_neg() for t in sources):
            hint = "pass its resolve_conj() or resolve_neg(): a copy that max_workspace_bytes does not count"
            lazy = "a view that conjugates or negates on reading"
            problems.append(Problem("unsupported-tensor", f"{where}, source", found=lazy, hint=hint))
        if outs is not None:
            problems += local_problems(plan, self.members.rank, outs, "dst")
            problems = problems or destination_problems(outs, [f"{where}, out"] * len(outs), sources)
        devices = {tensor.device for tensor in (*sources, *(outs or ()))}
        if len(devices) > 1:
            listed = ", ".join(sorted(map(str, devices)))
            problems.append(Problem("device-mismatch", where, found=listed, hint="one device on each rank"))
        return problems

    def assert_consistent(self, problems: Sequence[Problem], device: torch.device, more: str = "") -> None:
        """Compare with all ranks, in the first call of a kind or in each."""
        if (device.type, more) in self.agreed:
            # After the first checked call ranks no longer compare: peers see this failure as a collective timeout.
            raise_problems(problems)
            return
        (plan,) = self.plans
        lines = [f"{plan.src.describe()} -> {plan.dst.describe()}"]
        lines.append(f"plan {plan.digest}: {plan.shape} {plan.dtype} -> {plan.out_dtype}")
        lines.append(f"on {device.type}{more}, check={self.check!r}")
        assert_consistent(self.members, "reshard", lines, problems)
        if self.check == "first" and not is_fake(()):  # fake tensors compared nothing
            self.agreed.add((device.type, more))

    # ---- moving -----------------------------------------------------------------------------------------------

    def start(
        self,
        sources: list[torch.Tensor],
        outs: list[torch.Tensor] | None,
        async_op: bool,
        fresh_outs: bool = False,
        unchanged: TensorGuards | None = None,
    ) -> tuple[list[torch.Tensor], Finish | None]:
        """Move checked tensors. Return the destinations, and a function to call before they are read, or None.

        ``outs`` is None for fresh ones; for ``fresh_outs`` and ``unchanged`` see `Exchange.prepare`.
        """
        if torch.is_inference_mode_enabled() and not any(out.is_inference() for out in outs or ()):
            # Kept tensors are used outside of inference mode too; only inference tensors need the mode.
            with torch.inference_mode(False):
                return self.start(sources, outs, async_op, fresh_outs)
        exchange, tensors = self.exchange, sources or outs
        device = tensors[0].device if tensors else data_device(self.members.group)
        self.num_calls += 1
        if self.workspace is not None:
            self.workspace.acquire(device)
        finish: Callable[[], None] | None = None
        try:
            with torch.no_grad():
                targets = exchange.allocate(device) if outs is None else outs
                call = exchange.prepare(sources, targets, device, fresh_outs or outs is None, unchanged)
                finish = call.run(self._collective, async_op)
        finally:
            if finish is None and self.workspace is not None:  # failed or done: no handle to release it
                self.workspace.release(device)
        if finish is None:
            return targets, None
        stream, held = None, list[torch.Tensor]()
        if device.type == "cuda" and not is_fake(()):
            stream, held = torch.cuda.current_stream(device), [*targets, *call.workspace.buffers.values()]
        inference = True in map(torch.Tensor.is_inference, targets)
        return targets, Finish(self.workspace, finish, call.commit, device, inference, stream, held)

    def _collective(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        async_op: bool,
    ) -> Any:
        """Send; the collective of the call that was started last."""
        group, call = self.members.reference() or self.members.group, self.num_calls  # the latter raises: no group
        try:
            if self.changes is not None and not is_fake(()):
                self.changes.all_to_all(output, input, output_splits, input_splits, group)
                return None
            work = dist.all_to_all_single(output, input, output_splits, input_splits, group=group, async_op=async_op)
        except RuntimeError as error:
            raise self._failed(call) from error
        return None if work is None else _NamedWork(work, self, call)

    def _failed(self, call: int) -> RuntimeError:
        digest = self.plans[0].digest[:12]
        return RuntimeError(
            f"all_to_all_single of call {call} of reshard plan {digest} failed on rank {self.members.rank}: another "
            "rank died, left the call out or made another one; the destination tensors are not complete"
        )


@dataclass(frozen=True, eq=False)
class Finish:
    """End of an asynchronous call, on the waiter's current stream."""

    workspace: Workspace | None
    finish: Callable[[], None]
    written: Callable[[], None]  # the end of a late call
    device: torch.device
    inference: bool
    stream: torch.cuda.Stream | None  # the one that packed, whose allocator owns the tensors; None for CPUs
    held: list[torch.Tensor]  # destinations and buffers on CUDA

    def __call__(self) -> None:
        try:
            self._run(self.finish)
            if self.stream is not None and (current := torch.cuda.current_stream(self.device)) != self.stream:
                # The packing stream must not reuse memory that is still read here when the tensors are freed.
                for tensor in self.held:
                    tensor.record_stream(current)
        finally:
            if self.workspace is not None:
                self.workspace.release(self.device)

    def commit(self) -> None:
        """Write the destinations of a late call, which was waited for."""
        self._run(self.written)

    def _run(self, act: Callable[[], None]) -> None:
        # Inference tensors need that mode for writes; writes to others have to count as versions.
        with torch.no_grad(), torch.inference_mode(torch.is_inference_mode_enabled() and self.inference):
            act()

    def abandon(self) -> None:
        """Give up a call that nobody waits for."""
        if self.workspace is not None:
            self.workspace.abandon()


class _NamedWork(NamedTuple):
    """A work with an error that names its plan and call."""

    work: dist.Work
    mover: Mover
    call: int

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.mover._failed(self.call) from error


class ReshardWork(NotPicklable):
    """A reshard in flight; holds all its tensors until `wait`."""

    _instead = "wait() for it and copy the result"

    def __init__(self, result: Any, finish: Callable[[], None] | None, what: str) -> None:
        self._result, self._finish, self._what = result, finish, what
        self._done = False
        self._error: Exception | None = None

    def wait(self) -> Any:
        """Wait, unpack on the current stream, and return the result (a list for several boxes)."""
        if self._error is not None:  # a failed call stays failed
            raise self._error
        if not self._done:
            self._done = True  # before finish(): a failure is final
            try:
                if self._finish is not None:
                    self._finish()
            except Exception as error:
                self._error = error
                raise
        return self._result

    def is_completed(self) -> bool:
        """Return True after `wait`."""
        return self._done

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            if isinstance(self._finish, Finish):
                self._finish.abandon()
            warnings.warn(
                f"a reshard of {self._what} was started and never waited for: its destination is not filled",
                RuntimeWarning,
                stacklevel=2,
            )
