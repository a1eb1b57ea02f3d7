"""Mover: carries out one plan or several fused ones in a group, again and again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shard_reshard._torch_compat import has_tangent, is_fake
from shard_reshard.agreement import agree, check_mode
from shard_reshard.bound import Index
from shard_reshard.copying import StaysHere
from shard_reshard.destinations import destination_problems
from shard_reshard.exchange import Exchange
from shard_reshard.local_tensors import local_problems
from shard_reshard.looks import Looks, looks_of
from shard_reshard.members import Members, data_device
from shard_reshard.plan import ReshardPlan
from shard_reshard.problems import PlanError, Problem
from shard_reshard.program import build_program


class _GoodCall(NamedTuple):
    """How the tensors of a call looked in which nothing was wrong."""

    sources: Looks
    outs: Looks | None


class Mover:
    """The acting side of one or several fused plans.

    Args:
        plans: What to carry out, in one collective (or one for each stage or round).
        members: The group.
        keep_workspace: Keep the buffers between calls.
        check: "first" or "always", see `agree`.
    """

    def __init__(
        self, plans: Sequence[ReshardPlan], members: Members, keep_workspace: bool = False, check: str = "first"
    ) -> None:
        self.plans = tuple(plans)
        self.members = members
        self.check = check_mode(check)
        self.keep_workspace = keep_workspace
        self.num_calls = 0
        self.facts = "\n".join(plan.to_json() for plan in self.plans)
        self._exchange: Exchange | None = None
        self._transposed: Mover | None = None
        self._agreed: set[tuple[str, str]] = set()
        self._busy = False
        self._good: _GoodCall | None = None  # how the tensors looked that were last found to be good
        self._repeated = False  # whether those of the call that comes look the same
        self._freed: Any = None  # CUDA event: the kept workspace is read and written no more

    @property
    def exchange(self) -> Exchange:
        """The program bound to torch, made at the first call."""
        if self._exchange is None:
            program = build_program(self.plans, self.members.rank, self.members.size)
            self._exchange = Exchange(program, self.keep_workspace)
        return self._exchange

    @property
    def transposed(self) -> Mover:
        """The mover of gradients. What it does follows from this one's plans, so that it has nothing to compare."""
        if self._transposed is None:
            turned = [plan.transpose() for plan in self.plans]
            self.pair(Mover(turned, self.members, self.keep_workspace, self.check))
            assert self._transposed is not None
        return self._transposed

    def pair(self, backward: Mover) -> None:
        """Move gradients by ``backward``, and its by this one."""
        self._transposed, backward._transposed = backward, self

    @cached_property
    def local_shapes(self) -> tuple[tuple[Index, ...], tuple[Index, ...]]:
        """Shapes of this rank's local tensors: the sources of all plans, and the destinations."""
        rank = self.members.rank
        src = tuple(shape for plan in self.plans for shape in plan.src.local_shapes(rank))
        return src, tuple(shape for plan in self.plans for shape in plan.dst.local_shapes(rank))

    # ---- checks -----------------------------------------------------------------------------------------------

    def problems(
        self, sources: Sequence[Sequence[torch.Tensor]], outs: Sequence[Sequence[torch.Tensor]] | None
    ) -> list[Problem]:
        """What is wrong with the tensors of this rank, listed by plan."""
        flat = [tensor for tensors in sources for tensor in tensors]
        flat_outs = None if outs is None else [tensor for tensors in outs for tensor in tensors]
        if self.looks_as_before(flat, flat_outs):
            return []
        found = self._problems(sources, outs)
        if not found:
            self.found_good(flat, flat_outs)
        return found

    def looks_as_before(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None) -> bool:
        """Whether the tensors of this rank look as those that were last found to be good."""
        good = self._good
        self._repeated = (
            good is not None
            and good.sources.same(sources)
            and (good.outs is None if outs is None else good.outs is not None and good.outs.same(outs))
        )
        return self._repeated

    def found_good(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None) -> None:
        """Remember how tensors look that need not be looked at closely when they come again."""
        looks, out_looks = looks_of(sources), None if outs is None else looks_of(outs)
        known = looks is not None and (outs is None or out_looks is not None)
        self._good = _GoodCall(looks, out_looks) if looks is not None and known else None

    def _problems(
        self, sources: Sequence[Sequence[torch.Tensor]], outs: Sequence[Sequence[torch.Tensor]] | None
    ) -> list[Problem]:
        rank: int = self.members.rank
        found: list[Problem] = []
        for number, plan in enumerate(self.plans):
            if plan.world_size > self.members.size:
                named = f"the plan names rank {plan.world_size - 1}, the group has {self.members.size} ranks"
                found.append(Problem("group-too-small", "group", found=named, hint="pass a larger group="))
                continue
            found += local_problems(plan, rank, sources[number])
            if outs is not None:
                found += local_problems(plan, rank, outs[number], "dst")
        found += self._lazy_problems(sources)
        if outs is not None and not found:
            written = [tensor for tensors in outs for tensor in tensors]
            names = [f"rank {rank}, out"] * len(written)
            found += destination_problems(written, names, [tensor for tensors in sources for tensor in tensors])
        devices = {tensor.device for tensors in (*sources, *(outs or ())) for tensor in tensors}
        if len(devices) > 1:
            listed = ", ".join(sorted(map(str, devices)))
            found.append(Problem("mixed-devices", f"rank {rank}", found=listed, hint="one device on each rank"))
        return found

    def _lazy_problems(self, sources: Sequence[Sequence[torch.Tensor]]) -> list[Problem]:
        """Sources that have to be copied as a whole, where the bytes of copies are bounded."""
        hint = "pass its resolve_conj() or resolve_neg(): that is a copy which max_workspace_bytes does not count"
        found = "a view that conjugates or negates on reading"
        return [
            Problem("source-lazy-view", f"rank {self.members.rank}, source", found=found, hint=hint)
            for plan, tensors in zip(self.plans, sources, strict=True)
            if plan.max_workspace_bytes is not None and any(t.is_conj() or t.is_neg() for t in tensors)
        ]

    def agree(self, problems: Sequence[Problem], device: torch.device, more: str = "") -> None:
        """Compare with all ranks; see `shard_reshard.agreement.agree`."""
        if (device.type, more) in self._agreed:
            raise_alone(problems)
            return
        agree(self.members, f"{self.facts}\non {device.type}{more}", problems, self.check)
        if self.check == "first" and not is_fake(()):
            self._agreed.add((device.type, more))

    # ---- moving -----------------------------------------------------------------------------------------------

    def start(
        self,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
        async_op: bool,
        fresh_outs: bool = False,
    ) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Move checked tensors.

        Args:
            sources: This rank's source tensors.
            outs: Tensors to fill; None for fresh ones.
            async_op: Return when the last collective is under way.
            fresh_outs: ``outs`` were allocated for this call, so that nothing made for them is of use again.

        Returns:
            The destination tensors, and a function that has to be called before they are read.

        Raises:
            RuntimeError: When a call whose workspace is kept is still under way, and when the collective fails.
        """
        if self._busy:
            raise RuntimeError(
                "this Resharder has a call in flight that uses its workspace; wait() for that handle first, "
                "or use a second Resharder"
            )
        device = self.device(sources, outs or ())
        exchange = self.exchange
        fresh = fresh_outs or outs is None
        repeated, self._repeated = self._repeated, False
        self._begin(device)
        try:
            with _moving(outs):
                targets = exchange.allocate(device) if outs is None else list(outs)
                finish = exchange.start(sources, targets, self._collective, device, async_op, fresh, repeated)
        except BaseException:
            self._busy = False
            raise
        if not async_op:
            self._end(device)
            return targets, finish

        def end() -> None:
            try:
                with _moving(outs):
                    finish()
            finally:
                self._end(device)

        return targets, end

    def once_more(self, sources: list[torch.Tensor], outs: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Make the call before again, if it is the same: nothing is checked or worked out twice.

        Only views without graph take part, so that no mode has to be switched.

        Returns:
            The destination tensors; None where it is another call, and nothing was done.
        """
        call = None if self._exchange is None else self._exchange.repeated
        if call is None or self._busy or torch.is_inference_mode_enabled() or has_tangent(sources):
            return None
        if (call.device.type, "") not in self._agreed or not self.looks_as_before(sources, outs):
            return None
        if not call.is_of(sources, outs or (), outs is None) or (torch.is_grad_enabled() and _any_requires(sources)):
            return None
        self._repeated = False
        self._begin(call.device)
        try:
            targets = self.exchange.allocate(call.device) if outs is None else outs
            call.run(targets, self._collective, False)
        finally:
            self._end(call.device)
        return targets

    def _begin(self, device: torch.device) -> None:
        self.num_calls += 1
        self._busy = self.keep_workspace
        if self._freed is not None:
            torch.cuda.current_stream(device).wait_event(self._freed)

    def _end(self, device: torch.device) -> None:
        self._busy = False
        if device.type == "cuda" and self.keep_workspace and not is_fake(()):
            if self._freed is None:
                self._freed = torch.cuda.Event()
            self._freed.record(torch.cuda.current_stream(device))

    def device(self, *tensors: Sequence[torch.Tensor]) -> torch.device:
        """Where this rank's tensors lie; for a rank without any, where the group's lie."""
        for found in tensors:
            for tensor in found:
                return tensor.device
        return data_device(self.members.group)

    def _collective(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        async_op: bool,
    ) -> Any:
        """The collective of the call that was started last."""
        group, call = self.members.group, self.num_calls
        try:
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


def _any_requires(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


@contextmanager
def _moving(outs: Sequence[torch.Tensor] | None) -> Iterator[None]:
    """No graph, and no inference mode: what is kept is used outside of it too. Only its own tensors ask for it."""
    with torch.no_grad():
        if not torch.is_inference_mode_enabled() or any(out.is_inference() for out in outs or ()):
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            yield


class _NamedWork:
    """A work whose failure says which plan and call it was."""

    def __init__(self, work: dist.Work, mover: Mover, call: int) -> None:
        self._work, self._mover, self._call = work, mover, call

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._mover._failed(self._call) from error


class ReshardWork(StaysHere):
    """A reshard under way. Holds all its tensors until :meth:`wait`."""

    _instead = "wait() for it and copy the result"

    def __init__(self, result: Any, finish: Callable[[], None], what: str) -> None:
        self._result, self._finish, self._what = result, finish, what
        self._done = False

    def wait(self) -> Any:
        """Wait, unpack on the current stream, and return the destination tensor (a list for several boxes)."""
        if not self._done:
            self._done = True
            self._finish()
        return self._result

    def is_completed(self) -> bool:
        """Whether :meth:`wait` has been called."""
        return self._done

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            warnings.warn(
                f"a reshard of {self._what} was started and never waited for: its destination is not filled",
                RuntimeWarning,
                stacklevel=2,
            )


def raise_alone(problems: Sequence[Problem]) -> None:
    """Raise on this rank only: fake tensors have no other ranks, and after a checked first call the others do not
    listen. They are told by the collective, when this rank does not come.
    """
    if problems:
        raise PlanError(problems)
