"""Average gradients over the ranks in each backward pass, in buckets sent while backward still runs.

A step may run several backward passes, reach other parameters in each, and other ones on each rank. Ranks meet
at the start of each pass and at the end of each call: one that raised, or runs another number of passes, makes all of
them raise. In the first pass k of a call, ranks exchange the parameters reached by it; from then on the
same buckets are sent in the same order on every rank, each as soon as its gradients are there. The last bucket waits
for the end of the pass and carries flags of newly reached parameters.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dp_partition._shared.consensus import device_types, named_collective, ranks_of
from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import (
    after_backward,
    backward_pass,
    flat_group,
    flatten,
    foreach_copy_,
    group_like,
    has_gradient_hooks,
    hooks_after_accumulation,
    is_in_backward,
    is_outermost,
    unflatten,
)
from dp_partition.capture.tracer import user_line
from dp_partition.passes.bucketing import divisors
from dp_partition.plan.plan import CommConfig
from dp_partition.runtime.consensus import is_of_collective
from dp_partition.runtime.state import HeldMemory

# States of a rank that meets its peers; where they differ, the lowest one of any rank names what ranks do apart. A pass
# in which all ranks run has a message of zeros.
PICKLING, GATHERING, _RUNNING, _FINISHED, _FAILED = range(-2, 3)
_DENSE, _SPARSE = 1, 2  # kinds of gradients; 0: none
_FIRST_BUCKET = 1 << 20  # small, so that communication starts early
CAUGHT = "the step has caught an error of a backward pass"
LOCAL_HOOK = "has a hook that would see this rank's gradient before it is averaged"
HOOK_HINT = "read gradients behind backward, or in a hook of the optimizer (register_step_pre_hook)"

_Message = tuple[torch.Tensor, dist.Work]
_RANKS_DECIDE = "decide on values that are equal on all ranks, for example after dist.all_reduce"
_APART = {  # state -> what some ranks do, and the way on
    PICKLING: (
        "some ranks alone pickle a shard in call {}, which only all of them can gather",
        "torch.save on every rank, or between two calls within unsharded()",
    ),
    GATHERING: (
        "some ranks alone enter unsharded() or call release() since call {}, which gather shards of all ranks",
        "call them on every rank; a rank that has no more batches ends its loop where all ranks do",
    ),
    _RUNNING: (
        "ranks run different numbers of backward passes, or of forwards in shards, so their gradients do not belong "
        "together",
        _RANKS_DECIDE,
    ),
}


class Meetings:
    """Exchanges of states: all ranks of a group are in one state, or all raise. A rank that has raised tells so."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        self.group, self.device, self.name = group, device, name
        self.has_raised = False  # whether all ranks have raised by a message of the present call

    def send(self, state: int, digests: Iterable[int] = ()) -> _Message:
        """Start the exchange of a state, and of digests to compare."""
        row = [number for value in (state, *digests) for number in (value, -value)]
        message = torch.tensor(row, device=self.device)
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        return message, work

    def receive(self, message: _Message, call: int, subject: str) -> list[bool]:
        """Return for each digest whether it is the same on all ranks.

        Raises:
            PlanError: On every rank: ``rank-failed`` if one has raised; ``ranks-diverge`` if ranks are in other states.
        """
        row, work = message
        with named_collective(subject):
            work.wait()
        highest, negative_lowest, *digests = row.tolist()
        self.has_raised = highest == _FAILED or highest != -negative_lowest
        if highest == _FAILED:
            reason, hint = f"another rank raised in call {call}", "see the traceback of that rank"
            raise PlanError(Problem("rank-failed", self.name, found=reason, hint=hint))
        if self.has_raised:
            apart, hint = _APART[-negative_lowest]
            raise PlanError(Problem("ranks-diverge", self.name, found=apart.format(call), hint=hint))
        return [most == -negative for most, negative in zip(digests[::2], digests[1::2], strict=True)]


@dataclass
class _Bucket:
    """Parameters of one dtype and device, with their gradients in one message."""

    members: list[int]
    arrived: int = 0
    work: tuple[torch.Tensor, torch.Tensor, dist.Work] | None = None  # message, its flags, and the handle


@dataclass
class _Pass:
    """Buckets of a backward pass, known from its second run on, with the present gradients."""

    buckets: list[_Bucket] = field(default_factory=list)
    is_known: bool = False
    launched: int = 0
    is_entered: bool = False  # whether the present run has begun: on this rank it may reach no parameter
    arrived: set[int] = field(default_factory=set)
    bucket_of: dict[int, _Bucket] = field(default_factory=dict)
    sparse: list[int] = field(default_factory=list)  # parameters with sparse gradients, each sent by itself
    entry: _Message | None = None  # of the ranks at the start of the present run
    are_in: bool = False  # whether all of them have started it
    end: Callable[[], Any] = lambda: None  # a weak reference to the callback that autograd holds, of the present run

    def reset(self) -> None:
        """Start anew: what the last run of the pass reached and sent counts no more."""
        self.launched, self.is_entered, self.arrived, self.entry = 0, False, set(), None
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.members}
        for bucket in self.buckets:
            bucket.arrived = 0


@dataclass
class _Call:
    """State of the present call of a step."""

    number: int = 0
    passes: list[_Pass] = field(default_factory=list)  # of the step
    index: int = 0  # the number of the present pass
    meets: bool = False  # whether ranks meet at the start of each pass and at the end
    runs: bool = False  # whether the step runs now


class GradientReducer:
    """Hooks on parameters to average gradients when autograd accumulates them.

    Parameters are in one order on all ranks; frozen ones count once they are trained.

    Args:
        parameters: Full parameters by name.
        group: The ranks, for the messages.
        comm: Sizes of buckets, and the dtype of the reduction.
        name: The steps, for messages.
        meet: Called at the start of each backward pass, in place of the reducer's own meetings.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        comm: CommConfig,
        name: str,
        meet: Callable[[], None] | None = None,
    ) -> None:
        real = {n: p for n, p in parameters.items() if p.is_leaf and (p.is_floating_point() or p.is_complex())}
        self.names, self.parameters = list(real), list(real.values())
        self.group, self.world, self.comm, self.name = group, dist.get_world_size(group), comm, name
        self.meet = meet
        self._passes_of: dict[int, list[_Pass]] = {}  # of each step over these parameters
        self._call = _Call()
        has_cpu = "cpu" in device_types(dist.get_backend_config(group))
        self._meetings = Meetings(
            group, torch.device("cpu") if has_cpu or not real else self.parameters[0].device, name
        )
        # On a GPU flags beside the gradients would make the host wait for it in each pass.
        self._flags_apart = has_cpu and any(p.device.type != "cpu" for p in self.parameters)
        self._handles = []
        for index, parameter in enumerate(self.parameters):
            # A frozen parameter accepts no hook, but may be trained from some call on.
            is_trained = parameter.requires_grad
            hook = partial(self._mark_ready, index)
            self._handles.append(parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(is_trained)

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def sparse_names(self) -> set[str]:
        """Return the parameters with sparse gradients in any step."""
        return {self.names[i] for passes in self._passes_of.values() for backward in passes for i in backward.sparse}

    @contextmanager
    def call(self, number: int = 0) -> Iterator[None]:
        """Run one call of a step in the block. A rank that raises makes its peers raise, in this call."""
        passes = self._passes_of.setdefault(number, [])
        # A message on the CPU costs little. One of NCCL would make the host wait for the device in each call.
        meets = self.meet is None and (self._call.number == 0 or self._meetings.device.type == "cpu")
        self._call = call = _Call(self._call.number + 1, passes, meets=meets)
        self._meetings.has_raised = False
        for backward in passes:
            backward.reset()
        if not self.parameters or self.world == 1:
            yield
            return
        call.runs = True
        try:
            if any(hooks_after_accumulation(p) > 1 for p in self.parameters):  # in the block: peers raise as well
                raise PlanError(Problem("parameter-hooks", self.name, found=LOCAL_HOOK, hint=HOOK_HINT))
            yield
            if any(backward.is_entered for backward in passes):  # gradients of some parameters are this rank's alone
                raise PlanError(Problem("backward-failed", self.name, found=CAUGHT))
        except Exception as error:
            if not self._meetings.has_raised:
                self._leave(error)
            raise
        finally:
            call.runs = False
        if call.meets:
            self._check(self._meetings.send(_FINISHED))

    # ---- meetings of ranks ------------------------------------------------------------------------------------------

    def _check(self, message: _Message) -> None:
        """Raise on every rank unless all are in the same pass or all at the end."""
        call = self._call.number
        self._meetings.receive(message, call, f"{self.name}, call {call}")

    def _leave(self, error: Exception) -> None:
        """Meet the peers once more, at their next exchange, to make them raise too."""
        current = self._current()
        try:
            if current.entry is not None:
                current.entry[1].wait()
                if any(current.entry[0].tolist()):
                    return  # the peers are not in this pass, and raise by this message
            if current.is_entered and current.is_known:
                self._send(current, failed=True)
            elif current.is_entered:
                self._exchange(current.arrived, failed=True)
            elif self._call.meets:
                self._meetings.send(_FAILED)[1].wait()
        except RuntimeError as other:
            error.add_note(f"the other ranks could not be told: {other}")

    # ---- a backward pass --------------------------------------------------------------------------------------------

    def _current(self) -> _Pass:
        if self._call.index == len(self._call.passes):
            self._call.passes.append(_Pass())
        return self._call.passes[self._call.index]

    def enter(self) -> None:
        """Begin the present run of a backward pass, if none has begun: all ranks enter it, whatever they reach there.

        A rank that runs no module of full parameters in a call, such as a vision tower, enters where gradients come to
        the output of a unit of FSDP2.

        Raises:
            PlanError: ``backward-failed`` if the last one ended by an error that the step has caught.
        """
        if not self._call.runs:
            return  # between two calls
        current = self._current()
        if current.is_entered and current.end() is None:  # autograd drops the callback with a pass that failed
            raise PlanError(Problem("backward-failed", self.name, found=CAUGHT))
        if not current.is_entered:
            if self.meet is not None:
                self.meet()
            # Held by autograd alone. It queues the last part behind FSDP2's callback, which sends, on all ranks alike.
            end = partial(after_backward, self._finalize_backward)
            current.end, current.is_entered = weakref.ref(end), True
            after_backward(end)
            current.entry = self._meetings.send(_RUNNING) if self._call.meets else None
            current.are_in = current.entry is None

    def _mark_ready(self, index: int, parameter: torch.Tensor) -> None:
        if not self._call.runs:
            return  # a backward pass of one rank between two calls is its own
        current = self._current()
        if parameter.grad.is_sparse and current.is_known and index not in current.sparse:  # type: ignore[union-attr]
            raise PlanError(
                Problem(
                    "sparse-gradient",
                    self.names[index],
                    found="dense in earlier calls",
                    hint="use sparse=False in the embedding",
                )
            )
        self.enter()
        bucket = current.bucket_of.get(index)
        if bucket is not None and index not in current.arrived:
            bucket.arrived += 1  # a count: many small gradients would search a set for each arrival
        current.arrived.add(index)
        if not current.are_in:  # nothing is sent before all ranks are in this pass
            assert current.entry is not None
            current.are_in = current.entry[1].is_completed() and not any(current.entry[0].tolist())
            if not current.are_in:
                return
        # Buckets are sent in order, and the last one at the end: the order is the same whatever each rank reaches.
        while current.launched < len(current.buckets) - 1:
            bucket = current.buckets[current.launched]
            if bucket.arrived < len(bucket.members):
                break
            self._launch_bucket(current, bucket)

    def _finalize_backward(self) -> None:
        """End a backward pass: send the remaining buckets, and replace gradients by averages."""
        current = self._current()
        self._call.index += 1
        if self.world == 1:
            return
        entry, current.entry = current.entry, None
        if entry is not None:
            self._check(entry)
        if not current.is_known:
            reached = self._exchange(current.arrived)
            current.sparse = [index for index, kind in reached.items() if kind == _SPARSE]
            current.buckets = self._buckets(reached.keys() - set(current.sparse))
            current.is_known = bool(current.buckets)
        extra = self._send(current)
        if extra:  # reached on some rank in this pass for the first time
            more = _Pass(self._buckets(extra), is_known=True, arrived=current.arrived)
            self._send(more)
            current.buckets = self._buckets({i for b in current.buckets for i in b.members} | extra)
        for index in current.sparse:  # a rank that failed has been heard of by now
            parameter = self.parameters[index]
            mine = torch.zeros_like(parameter).to_sparse(1) if parameter.grad is None else parameter.grad  # of no row
            with named_collective(f"{self.name}, {self.names[index]} in call {self._call.number}"):
                dist.all_reduce(total := mine.coalesce(), group=self.group)
            parameter.grad = total / self.world
        current.reset()

    def _send(self, current: _Pass, *, failed: bool = False) -> set[int]:
        """Send the remaining buckets, wait, and write the averages; return parameters without a bucket."""
        while current.launched < len(current.buckets):
            is_last = current.launched == len(current.buckets) - 1
            self._launch_bucket(current, current.buckets[current.launched], is_last=is_last, failed=failed)
        reached = self._exchange(current.arrived, failed=failed).keys() if self._flags_apart else None
        extra = set(reached or ()).difference(current.sparse, *(bucket.members for bucket in current.buckets))
        for bucket in current.buckets:
            assert bucket.work is not None
            flat, tail, work = bucket.work
            bucket.work = None
            with named_collective(f"{self.name}, backward pass {self._call.index} of call {self._call.number}"):
                work.wait()
            if not failed:
                extra |= self._unpack(bucket, flat, tail, reached)
        return extra

    @torch.no_grad()  # gradients of a pass that is differentiated again have a graph
    def _launch_bucket(self, current: _Pass, bucket: _Bucket, *, is_last: bool = False, failed: bool = False) -> None:
        """Start a bucket's average: gradients, a flag for each, and in the last bucket flags of the pass."""
        parameters = [self.parameters[index] for index in bucket.members]
        # A rank that failed sends zeros, as nobody reads the averages: its own gradients may be what has failed.
        gradients = [torch.zeros_like(p) if failed or p.grad is None else p.grad for p in parameters]
        if gradients[0].is_complex():
            gradients = [torch.view_as_real(gradient.resolve_conj()) for gradient in gradients]
        flags = [] if self._flags_apart else [float(index in current.arrived) for index in bucket.members]
        if is_last and not self._flags_apart:
            unsent = current.arrived.difference(current.sparse, *(bucket.members for bucket in current.buckets))
            flags += [float(index in unsent) for index in range(len(self.parameters))]
            flags += [float(failed)]  # a failing rank still sends
        tail = gradients[0].new_tensor(flags) if flags else gradients[0].new_empty(0)  # which nobody waits for
        flat = flatten([*gradients, tail])
        if self.comm.reduce_dtype is not None:
            flat = flat.to(self.comm.reduce_dtype)
        flat.div_(self._divisors(parameters[0])[0])
        bucket.work = flat, tail, dist.all_reduce(flat, group=self.group, async_op=True)
        current.launched += 1

    def _divisors(self, parameter: nn.Parameter) -> tuple[float, float]:
        return divisors(self.comm.reduce_dtype or parameter.dtype, self.world)

    @torch.no_grad()
    def _unpack(self, bucket: _Bucket, flat: torch.Tensor, tail: torch.Tensor, reached: Set[int] | None) -> set[int]:
        parameters = [self.parameters[index] for index in bucket.members]
        if (after := self._divisors(parameters[0])[1]) != 1:
            flat.div_(after)
        is_complex = parameters[0].is_complex()
        shapes = [torch.view_as_real(parameter) for parameter in parameters] if is_complex else parameters
        *parts, tail = unflatten(flat, [*shapes, tail])  # in one call: many small gradients take long
        flags = tail.tolist() if reached is None else [index in reached for index in bucket.members]
        extra: set[int] = set()
        if len(flags) > len(parameters):  # the last bucket
            self._raise_if_failed(bool(flags[-1]))
            extra = {index for index in range(len(self.parameters)) if flags[len(parameters) + index]}
        # A gradient that no rank has stays missing.
        targets: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        for parameter, part, flag in zip(parameters, parts, flags, strict=False):
            if flag and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if flag and part.numel():  # an empty one has lost its shape
                targets.append(parameter.grad)  # type: ignore[arg-type]
                averages.append(part)
        if targets:
            foreach_copy_([torch.view_as_real(x) for x in targets] if is_complex else targets, averages)
        return extra

    def _raise_if_failed(self, failed: bool) -> None:
        if failed:
            self._meetings.has_raised = True
            raise PlanError(
                Problem(
                    "rank-failed",
                    self.name,
                    found=f"another rank raised in backward pass {self._call.index} of call {self._call.number}",
                    hint="see the traceback of that rank",
                )
            )

    # ---- first runs of a pass ---------------------------------------------------------------------------------------

    def _exchange(self, arrived: Set[int], *, failed: bool = False) -> dict[int, int]:
        """Return the parameters reached by any rank in this pass, with the kind of their gradients."""
        grads = [parameter.grad for parameter in self.parameters]
        kinds = [_SPARSE if grad is not None and grad.is_sparse else _DENSE for grad in grads]
        row = [failed, *(kind * (index in arrived) for index, kind in enumerate(kinds))]
        flags = torch.tensor(row, dtype=torch.uint8, device=self._meetings.device)
        with named_collective(f"{self.name}, call {self._call.number}"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        some_failed, *reached = flags.tolist()
        if not failed:
            self._raise_if_failed(bool(some_failed))
        return {index: kind for index, kind in enumerate(reached) if kind}

    def _buckets(self, reached: set[int]) -> list[_Bucket]:
        """Return buckets in the usual order of gradients: the last parameters first."""
        buckets: list[_Bucket] = []
        sizes: list[int] = []
        open_at: dict[tuple[torch.dtype, torch.device], int] = {}
        for index in sorted(reached, reverse=True):  # the same on all ranks
            parameter = self.parameters[index]
            kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
            at = open_at.get(kind)
            limit = self.comm.bucket_bytes if at else min(_FIRST_BUCKET, self.comm.bucket_bytes)
            if at is None or sizes[at] + size > limit:
                at = open_at[kind] = len(buckets)
                buckets.append(_Bucket([]))
                sizes.append(0)
            buckets[at].members.append(index)
            sizes[at] += size
        return buckets


class PlacedShards:
    """The parameters in shards of a step, with their memory and the number of writes to each."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, name: str, units: Iterable[nn.Module] = ()
    ) -> None:
        self.parameters = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        # of the shards written in all calls; of the sharded results of the last call; of the order of FSDP2's units
        self.digest = self.results = self.order = 0
        self.runs = False  # whether a call runs now
        self.number, self.passes = 0, set[int]()  # of the present call, or the last one; of its backward passes
        # Ahead of FSDP2's own hook, which puts the stored parameters back.
        self.handles = [unit.register_forward_pre_hook(self._gathers(i), prepend=True) for i, unit in enumerate(units)]
        self.leaving: Any = None  # the message of a rank that has raised, until its peers read it
        group = flat_group(mesh)
        is_met = bool(self.parameters) and mesh.size() > 1
        self.meets = is_met and "cpu" in device_types(dist.get_backend_config(group))
        device = next(iter(self.parameters.values())).device if is_met and not self.meets else torch.device("cpu")
        self.meetings = Meetings(group_like(group, ranks_of(mesh)) if self.meets else group, device, name)
        self.memory = HeldMemory(self.parameters)

    def check_assigned(self) -> None:
        """Raise for ``p.data = ...`` and gradient hooks on shards between two calls: both have no effect.

        Raises:
            PlanError: ``parameter-replaced`` or ``parameter-hooks``, with the names.
        """
        problems = self.memory.moved()
        if hooked := [name for name, p in self.parameters.items() if has_gradient_hooks(p)]:
            hint = "use register_post_accumulate_grad_hook, or release() first: the next call keeps it full"
            reason = "a gradient hook since it is in shards would never run"
            problems = [*problems, *(Problem("parameter-hooks", name, found=reason, hint=hint) for name in hooked)]
        if problems:
            raise PlanError(problems)

    def _gathers(self, number: int) -> Callable[..., None]:
        """Return a hook that notes the run of a unit: units of equal sizes gather each other's shards out of order.

        It refuses parameters that `torch.func.functional_call` puts in the place of the unit's: FSDP2 ignores them.
        """

        def note(unit: nn.Module, inputs: Any) -> None:
            held: dict[str, Any] = unit._parameters
            foreign = [n for n, p in held.items() if not isinstance(p, nn.Parameter | None)]
            if foreign and self.runs:
                hint = 'call it in call 1, too, which keeps them full; or use style="replicate"'
                reason = "another tensor in the place of a parameter in shards, which FSDP2 ignores"
                raise PlanError([Problem("parameter-replaced", name, found=reason, hint=hint) for name in foreign])
            if self.runs:
                self.order = zlib.crc32(number.to_bytes(4, "little"), self.order)
                if is_outermost(unit) and not is_in_backward():  # a rank without a batch may not run it
                    self.meet(_RUNNING, "a forward of")

        outside_of_graphs: Callable[..., None] = torch.compiler.disable(note)
        return outside_of_graphs

    @contextmanager
    def call(self, number: int) -> Iterator[None]:
        """Run the call of this number in the block, and add the shards that it writes to the digest of all calls.

        A rank that raises makes its peers raise where they meet next in their call; it does not wait for them, as they
        may be elsewhere.
        """
        shards = self.parameters.values()
        self.meetings.has_raised, versions, self.runs = False, [p._version for p in shards], True
        self.number, self.passes = number, set()
        try:
            yield
        except Exception as error:
            if self.meets and not self.meetings.has_raised and not is_of_collective(error):
                self.leaving = self.meetings.send(_FAILED, (self.digest, self.results, self.order))
            raise
        finally:
            self.runs = False
            written = bytes([p._version != old for p, old in zip(shards, versions, strict=True)])
            self.digest = zlib.crc32(written, self.digest)

    def enter_pass(self) -> None:
        """Meet at the start of each backward pass of a call, before FSDP2 gathers: a peer may not run this pass.

        Raises:
            PlanError: On every rank: ``full-parameters`` for a pass that is differentiated again, ``rank-failed``, or
                ``ranks-diverge`` where some rank has ended the call.
        """
        if self.runs and torch.is_grad_enabled():  # `create_graph=True`
            hint = 'take them in call 1, too, which keeps parameters full; or use style="replicate"'
            reason = f"second derivatives are taken since parameters are in shards{user_line()}"
            raise PlanError(Problem("full-parameters", self.meetings.name, found=reason, hint=hint))
        number = backward_pass()
        if self.runs and number not in self.passes:
            self.passes.add(number)
            self.meet(_RUNNING, "a backward pass of")

    def end_call(self, results: list[DTensor], *, always: bool) -> None:
        """Meet the peers at the end of a call.

        Args:
            results: Sharded tensors in the step's result, in order.
            always: Meet in this call in any case, without a CPU backend too.

        Raises:
            PlanError: On every rank: ``ranks-diverge`` where ranks have written other shards since they met last, or
                return other results; and as `meet` does.
        """
        self.results = zlib.crc32(repr([(x.shape, x.dtype, x.placements) for x in results]).encode())
        same_update, same_results, _ = self.meet(_FINISHED, "the end of", always=always)
        if not same_update:
            reason = f"ranks have updated different parameters by call {self.number}: one has skipped an optimizer step"
            hint = f"{_RANKS_DECIDE}; shards are of different calls now: load a checkpoint"
            raise PlanError(Problem("ranks-diverge", self.meetings.name, found=reason, hint=hint))
        if not same_results:
            reason = f"ranks return other tensors in call {self.number}, whose shards only all of them can gather"
            raise PlanError(Problem("ranks-diverge", self.meetings.name, found=reason, hint=_RANKS_DECIDE))

    def meet(self, state: int, subject: str, *, always: bool = False) -> list[bool]:
        """Meet the peers, for example before a pickle gathers a shard that a peer may not gather.

        Without a CPU backend ranks meet at the end of few calls alone, as the host would wait for the device each time.

        Args:
            state: What this rank does: `PICKLING`, say.
            subject: The same for an error, before the words "call 5".
            always: Meet without a CPU backend too.

        Returns:
            Whether shards written, results and order of units are the same on all ranks; True where none meet.

        Raises:
            PlanError: On every rank: ``rank-failed``, or ``ranks-diverge`` where ranks do different things, or have run
                units in another order.
        """
        if not self.meets and not (always and self.parameters and dist.get_world_size(self.meetings.group) > 1):
            return [True, True, True]
        message = self.meetings.send(state, (self.digest, self.results, self.order))
        same = self.meetings.receive(message, self.number, f"{self.meetings.name}, {subject} call {self.number}")
        if not same[-1]:
            self.meetings.has_raised = True
            reason = f"ranks have run modules in another order by call {self.number}: each gathered others' shards"
            hint = f'{_RANKS_DECIDE}, or use style="replicate"; weights are mixed now: load a checkpoint'
            raise PlanError(Problem("ranks-diverge", self.meetings.name, found=reason, hint=hint))
        return same
