"""Reshard a full state dict in a few fused exchanges."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.problems import Problem, raise_problems, refusal
from shard_reshard._torch_compat import (
    declared_layouts,
    is_fake,
    outside_of_graphs,
    plain_locals,
    unregister_group,
)
from shard_reshard.execution.checks import Match, TensorGuards, not_transformed, record_guards
from shard_reshard.execution.mover import NotPicklable, schedules
from shard_reshard.group import assert_consistent, group_info, raise_on_all_ranks
from shard_reshard.layout.parse import LayoutLike, layout_value
from shard_reshard.state_dict.agreement import (
    KEPT_CALL,
    NEW_RESHARDER,
    ONE_SHOT,
    NestedTensors,
    PlanConsensus,
    Question,
    collect_metadata,
    device_of,
    local_tensors,
    tensors_of,
)
from shard_reshard.state_dict.outputs import (
    Bucket,
    LocalTargets,
    ReceiveBuffers,
    move_buckets,
    write_outputs,
)
from shard_reshard.state_dict.pairs import Pair, as_pairs
from shard_reshard.state_dict.plan import DstLayouts, KeyRule, StateDictPlan, kept_layouts
from shard_reshard.state_dict.work import PreparedState, StateDictWork


@outside_of_graphs
def reshard_state_dict(
    state_dict: Mapping[str, Any] | torch.nn.Module,
    dst_layouts: DstLayouts = None,
    *,
    src_layouts: Mapping[str, LayoutLike] | None = None,
    shapes: Mapping[str, Any] | None = None,
    out: torch.nn.Module | Mapping[str, Any] | None = None,
    key_map: KeyRule | None = None,
    bucket_bytes: int = 64 * 2**20,
    group: dist.ProcessGroup | None = None,
    atomic: bool = True,
    strict: bool = True,
    check: str = "first",
    casts: str = "exact",
    pairs: Pair | Sequence[Pair] = (),
    async_op: bool = False,
    in_flight: int = 2,
) -> Any:
    """Move all tensors of a state dict to other layouts, ranks, names or dtypes.

    Every rank of ``group`` calls it. A rank outside of the source passes an empty mapping.

    Args:
        state_dict: A module, or FQN -> DTensor, ShardedTensor or local tensor; or a nested state dict, such as an
            optimizer's, with DCP's names for its leaves. A local tensor's layout is in ``src_layouts``, or else
            in its ``_sharding_info``. Without either it is full, and equal on all ranks that pass it. DTensors on
            separate sub-meshes of one kind (the tensor-parallel groups of data parallelism) are replicas.
        dst_layouts: Layout by name, one for all, or a function of name and shape. Else that of the tensor of ``out``.
        src_layouts: Layouts of local tensors, the same on every rank; it may name tensors missing on this rank.
        shapes: Global shapes of local tensors, if their layout has none.
        out: A module or mapping of tensors to fill in place; values are cast to its dtypes.
        key_map: Source name -> destination name, `Part` of one, several parts, or None to leave it out. Or a function
            of all sources' global shapes by name that returns such a mapping, the same on every rank.
        bucket_bytes: Approximate buffer bytes of a rank for one exchange.
        group: The union of all ranks; None is the default group.
        atomic: Fill ``out`` after everything has arrived, with memory for one more copy: if a sender dies ``out`` keeps
            its old values. False fills ``out`` as tensors arrive, and the death of a sender leaves a mixture.
        strict: Report elements of ``out`` without a source as a problem; False leaves these unchanged.
        check: "first" or "always", see `reshard`.
        casts: "exact" refuses casts into ``out`` that lose a scale or most values, and to fill a quantised tensor whose
            scale keeps its value in ``out`` (with ``strict=False``). "values" casts the numbers, and moves them alone.
        pairs: Quantised weights and their scales, see `Pair`.
        async_op: Return a `StateDictWork`, whose buckets are waited for one by one. Problems are raised by this call.
        in_flight: With ``async_op``, how many buckets are posted ahead of the one that the caller waits for.

    Returns:
        The tensors of this rank by destination name, with ``.plan``; or a `StateDictWork`.

    Raises:
        PlanError: With the problems of all tensors of all ranks, on every rank, before any transfer.
        RuntimeError: If an exchange fails because a rank died.
    """
    not_transformed("reshard_state_dict")
    members = group_info(group)
    try:
        ahead = _buckets_ahead(in_flight) if async_op else None
        shapes, key_map = _snapshot(shapes) if shapes else {}, _snapshot(key_map) if key_map else {}
        pairs = as_pairs(pairs) if pairs else ()
        options: Any = {"bucket_bytes": bucket_bytes, "strict": strict, "check": check, "casts": casts, "pairs": pairs}
        asked: tuple[Any, ...] = _as_values(dst_layouts), _as_values(src_layouts), shapes, key_map, options
        replays = None not in asked[:2] and not callable(key_map)
        tensors, targets = tensors_of(state_dict), tensors_of(out, out=True)
        if isinstance(tensors, NestedTensors):
            asked = *asked, repr(tensors.beside), tensors.paths
        # What an earlier call with the same arguments, metadata and ties has prepared.
        recent: tuple[StateDictCalls, PreparedState] | None = None
        for earlier, calls in reversed(list(schedules.of(members.group, "state dict").values())) if replays else ():
            if recent is None and earlier == asked and calls.guards is not None:
                compared = calls.matched(tensors, targets)
                if compared[2] is not Match.NONE:
                    recent = calls, calls.prepare(tensors, targets, atomic, compared)
        if recent is None:
            layouts, keys = kept_layouts(dst_layouts), key_map
            serial = next(_SERIALS) if callable(layouts) or callable(keys) else 0
            question = Question(layouts, keys, serial=serial, **options)
            facts = collect_metadata(tensors, targets, src_layouts or {}, shapes or {}, members, question.pairs)
            consensus = PlanConsensus(members, question, facts, question.digest(facts))
    except Exception as error:
        raise_on_all_ranks(members, error)
    if recent is not None:
        calls, call, _ = agreed_call(*recent, ONE_SHOT)
    else:
        consensus.agree(tensors, ONE_SHOT)
        calls = StateDictCalls(consensus)
        call = calls.prepare(tensors, targets, atomic)
        assert_consistent(members, "a state dict", calls.lines, call.problems)
    result = calls.move(call, ahead)
    if replays and calls.guards is not None and (recent is None or recent[0] is not calls):
        schedules.put(members.group, "state dict", object(), (asked, calls))
    return result


class StateDictResharder(NotPicklable):
    """Reshard similar state dicts repeatedly; ranks compare metadata once.

    Args and errors as in `reshard_state_dict`. The constructor communicates, and so does every call; every rank of the
    group makes them in the same order. Every call compares problems of tensors, and the values of plain tensors, before
    tensors move: problems of one rank raise on all. With ``check="first"`` (the same on every rank) only the first call
    does so, later calls save one small collective, and a rank with problems raises alone.

    With ``changed_only=True`` (the same on every rank) a call sends only elements with bits changed since the previous
    call, if that is shorter, and everything if some rank missed or did not finish the previous call. Both ends keep a
    copy of the exchanged bytes.

    """

    _instead = "make another one, on every rank of the group"

    def __init__(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        dst_layouts: DstLayouts = None,
        *,
        src_layouts: Mapping[str, LayoutLike] | None = None,
        shapes: Mapping[str, Any] | None = None,
        out: torch.nn.Module | Mapping[str, Any] | None = None,
        key_map: KeyRule | None = None,
        bucket_bytes: int = 64 * 2**20,
        group: dist.ProcessGroup | None = None,
        strict: bool = True,
        check: str = "always",
        changed_only: bool = False,
        casts: str = "exact",
        pairs: Pair | Sequence[Pair] = (),
    ) -> None:
        members = group_info(group)
        try:
            tensors, targets = tensors_of(state_dict), tensors_of(out, out=True)
            if isinstance(tensors, NestedTensors) and tensors.beside:
                raise refusal(
                    "wrong-type",
                    next(iter(tensors.beside)),
                    found="no tensor",
                    hint="such values change between calls: use reshard_state_dict, or pass the tensors alone",
                )
            layouts, keys = kept_layouts(dst_layouts), _snapshot(key_map) if key_map else {}
            options: Any = {"serial": next(_SERIALS), "casts": casts, "pairs": as_pairs(pairs) if pairs else ()}
            question = Question(layouts, keys, bucket_bytes, strict, check, changed_only, **options)
            facts = collect_metadata(tensors, targets, src_layouts or {}, shapes or {}, members, question.pairs)
            consensus = PlanConsensus(members, question, facts, question.digest(facts))
        except Exception as error:
            raise_on_all_ranks(members, error)
        consensus.agree(tensors, NEW_RESHARDER)
        self._calls = StateDictCalls(consensus, kept=True)
        self._compared = False  # all ranks have compared their tensors with the plan
        self._token = os.urandom(16)  # no other rank's: with ``changed_only`` all is sent at first
        self._work: weakref.ref[StateDictWork] | None = None  # of the last asynchronous call

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all calls."""
        return self._calls.consensus.members.group

    @property
    def plan(self) -> StateDictPlan:
        """The plan of the last call, or of the first one to come."""
        return self._calls.plan

    @outside_of_graphs
    def __call__(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        *,
        out: torch.nn.Module | Mapping[str, Any] | None = None,
        atomic: bool = True,
        async_op: bool = False,
        in_flight: int = 2,
    ) -> Any:
        """Move tensors of the resharder's names, shapes, dtypes and layouts.

        ``async_op`` and ``in_flight`` as in `reshard_state_dict`. The next call is refused until every bucket of a
        `StateDictWork` was waited for: both would use the kept buffers. With ``changed_only`` a bucket is exchanged
        when it is posted, and its wait only unpacks it.
        """
        not_transformed("StateDictResharder")
        problems: Sequence[Problem] = ()
        tensors: Mapping[str, Any] = {}
        targets: Mapping[str, Any] = {}
        ahead: int | None = None
        try:
            tensors, targets = tensors_of(state_dict), tensors_of(out, out=True)
            ahead = _buckets_ahead(in_flight) if async_op else None
            if (work := None if self._work is None else self._work()) is not None and not work.is_completed():
                raise refusal(
                    "conflicting-arguments",
                    "StateDictResharder",
                    found="a call in flight",
                    hint="wait() for its handle first, or make a second StateDictResharder",
                )
        except Exception as error:
            problems = problems_of(error)
        calls, question = self._calls, self._calls.consensus.question
        call = calls.prepare(tensors, targets, atomic, problems=problems)
        done: Callable[[], None] | None = None
        if is_fake(()) or (not question.changed_only and question.check == "first"):
            if self._compared:  # after a checked first call the problems of this rank alone
                raise_problems(call.problems)
            else:
                assert_consistent(calls.consensus.members, "a state dict", calls.lines, call.problems)
                self._compared = question.check == "first" and not is_fake(())
        elif not question.changed_only:
            self._calls, call, _ = agreed_call(calls, call, KEPT_CALL)
        else:
            # Ranks that ended the call before have one token; one that fails here has a token that no other has.
            token, self._token = self._token, os.urandom(16)
            self._calls, call, tokens = agreed_call(calls, call, KEPT_CALL, token)
            for mover in self._calls.here.movers:
                assert mover.changes is not None
                mover.changes.begin(full=len(set(tokens)) > 1)
            done = partial(setattr, self, "_token", hashlib.sha256(b"".join(tokens)).digest()[:16])
        result = self._calls.move(call, ahead, done)
        self._work = weakref.ref(result) if ahead is not None else None
        return result


class StateDictCalls:
    """Calls by one plan on this rank: compared with the last one, prepared and moved.

    Args:
        consensus: The plan of all ranks.
        kept: True for movers, buffers and views of their own, kept between calls; one-shot calls of several callers
            share movers, and keep no buffers.
    """

    def __init__(self, consensus: PlanConsensus, kept: bool = False) -> None:
        assert consensus.plan is not None
        self.consensus, self.plan, self.kept = consensus, consensus.plan, kept
        question = consensus.question
        self.lines = [f"tensors of plan {self.plan.digest}"]  # compared between ranks
        options: Any = {"check": question.check, "keep": kept, "changed_only": question.changed_only}
        options |= {"known": consensus.facts.sources}
        self.here = LocalTargets(consensus.members, self.plan, question.dst_layouts, **options)
        self.guards: TensorGuards | None = None  # on the local tensors of the last call
        self._seen: tuple[Any, ...] = (None, None, None)  # its names, declared layouts and ``atomic``
        # Made for them, where all are filled in place: local tensors of both sides, buffers, and views by bucket.
        self._again: tuple[Locals, Locals, ReceiveBuffers, list[Bucket]] | None = None

    @torch.no_grad()  # as when the guards were recorded
    def matched(self, tensors: Mapping[str, Any], targets: Mapping[str, Any]) -> Compared:
        """Return both sides' local tensors, and the match with the last call's guards."""
        names, values = (list(tensors), list(targets)), [*tensors.values(), *targets.values()]
        match, layouts = Match.NONE, declared_layouts(values, self._seen[1])
        # Most are plain tensors and DTensors. Parameters are compared as they are: a view of each costs more.
        held, sides = plain_locals(values), (tensors, targets)
        if held is None:
            sides = sources, outs = local_tensors(tensors), local_tensors(targets)
            for name in tensors.keys() - sources.keys():
                raise refusal(
                    "wrong-type",
                    name,
                    found=f"a {type(tensors[name]).__qualname__}",
                    hint="leave it out of the state dict",
                )
            held = [*sources.values(), *outs.values()]
        if self.guards is not None and self._seen[:2] == (names, layouts):
            match = self.guards.match(held)
        if match is Match.MEMORY and self._again is not None:  # views of the same memory
            return *self._again[:2], match, held
        locals_ = plain_locals(held, detach=True) or held
        sources = dict(zip(sides[0], locals_, strict=False))
        return sources, dict(zip(sides[1], locals_[len(sources) :], strict=True)), match, held

    def prepare(
        self,
        tensors: Mapping[str, Any],
        targets: Mapping[str, Any],
        atomic: bool,
        compared: Compared | None = None,
        problems: Sequence[Problem] = (),
    ) -> PreparedState:
        """Return a call's tensors on this rank, with all its problems; no communication."""
        here, all_problems = self.here, list(problems)
        sources, outs, match, held = _NOTHING
        arriving, calls = None, list[Bucket]()
        with torch.no_grad():
            try:
                sources, outs, match, held = compared or self.matched(tensors, targets)
                if self.guards is None or self._seen[-1] is not atomic:
                    match = Match.NONE
                again = self._again if match is Match.MEMORY and not atomic else None
                if again:
                    *_, arriving, calls = again
                else:
                    device = device_of(sources, outs, self.consensus.members)
                    arriving = ReceiveBuffers(here, None if atomic else outs, device)
                    calls = [
                        (
                            [move.view(sources[move.source]) for move in moves if move.source in sources],
                            [
                                tensor.unsqueeze(0) if move.unstacked else tensor
                                for move in filling
                                for tensor in arriving.tensors[move.target]
                            ],
                        )
                        for moves, filling in here.buckets
                    ]
                if not all_problems and match is not Match.MEMORY:
                    written = [tensor for name in arriving.in_place for tensor in arriving.tensors[name]]
                    all_problems += here.source_problems(sources, tensors, written, match is Match.METADATA)
                    asked = self.consensus.question
                    all_problems += here.out_problems(targets, outs, sources, atomic, asked.strict, asked.casts)
                    self._again = None
            except Exception as error:
                all_problems += problems_of(error)
        return PreparedState(tensors, targets, sources, outs, match, held, atomic, arriving, calls, all_problems)

    def move(self, call: PreparedState, ahead: int | None, done: Callable[[], None] | None = None) -> Any:
        """Move the tensors of a call without problems; ``done`` is called after the last exchange.

        With a number of buckets ``ahead`` these are posted, and the result is a handle.
        """
        here, arriving = self.here, call.arriving
        assert arriving is not None
        # Of a destination that is fresh in every call no guard knows the address.
        is_guarded = call.match is Match.MEMORY and (arriving.fresh or arriving.all_in_place)
        unchanged = self.guards if is_guarded else None
        with torch.no_grad():
            if call.match is not Match.MEMORY:
                self.guards = record_guards(call.held) if len(call.outs) == len(call.targets) else None
                layouts = declared_layouts([*call.tensors.values(), *call.targets.values()])
                self._seen = (list(call.tensors), list(call.targets)), layouts, call.atomic
                keeps = self.guards is not None and self.kept and arriving.all_in_place
                self._again = (call.sources, call.outs, arriving, call.buckets) if keeps else None
            if self.plan.fills:
                arriving.fill(self.plan.fills, call.outs)
            if ahead is not None:
                return StateDictWork(here, call, unchanged, ahead, done)
            move_buckets(here, call.buckets, arriving.fresh, unchanged)
            result = write_outputs(here, arriving, call.targets, call.outs)
        result.update(self.plan.values)
        result.plan = self.plan
        if done is not None:
            done()
        return result


def agreed_call(
    calls: StateDictCalls, call: PreparedState, kind: int, token: bytes = b""
) -> tuple[StateDictCalls, PreparedState, tuple[bytes, ...]]:
    """Compare a call with those of all ranks. Return it, prepared for the plan of all, and the tokens of all."""
    consensus = calls.consensus
    plan, is_prepared, tokens = consensus.agree(call.tensors, kind, call.problems, token)
    if plan is not calls.plan:  # other ranks have other tensors now
        calls = StateDictCalls(consensus, calls.kept)
        call = calls.prepare(call.tensors, call.targets, call.atomic)
    if not is_prepared:
        assert_consistent(calls.consensus.members, "a state dict", calls.lines, call.problems)
    return calls, call, tokens


class SyncEnd:
    """An end of a sync between jobs: it drops its resharder, and leaves the group, after a failed exchange."""

    resharder: StateDictResharder | None = None

    def exchange(self, *given: Any, **options: Any) -> None:
        """Call the resharder.

        Raises:
            RuntimeError: A peer died. gloo tells the neighbours of a dead rank alone; the others would wait for these
                until the timeout, but fail once the last reference to the group is gone, and its connections with it.
        """
        assert self.resharder is not None
        failure = ""  # the text alone: an error's traceback holds the group
        try:
            self.resharder(*given, **options)
        except RuntimeError as error:
            failure = str(error)
        if failure:
            group = self.resharder.group
            schedules.drop(group)
            unregister_group(group)
            del group
            self.resharder = None
            gc.collect()  # movers and their transposed ones hold each other, and the group
            raise RuntimeError(f"{failure}; this end has left the group, initialize it again")


Locals = Mapping[str, torch.Tensor]
# Local tensors of both sides of a call, their match with guards on the last one, and the tensors that were compared.
Compared = tuple[Locals, Locals, Match, list[torch.Tensor]]
_NOTHING: Compared = {}, {}, Match.NONE, []


# ---- one-shot calls -------------------------------------------------------------------------------------------


_SERIALS = count(1)


def _snapshot(given: Any) -> Any:
    """Copy a mapping, with its lists, so that the caller's later changes have no effect. A function stays as it is."""
    return (
        given
        if callable(given)
        else {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )


def _buckets_ahead(in_flight: Any) -> int:
    """Return the number of buckets to post ahead of the caller."""
    if not isinstance(in_flight, int) or in_flight < 0:
        raise refusal(
            "invalid-argument",
            "in_flight",
            found=repr(in_flight),
            hint="0 or more buckets; 2 overlaps one exchange with the work on the bucket before it",
        )
    return in_flight


def _as_values(layouts: Any) -> Any:
    """Return layouts as values that compare; None for those that hold tensors, and for functions."""
    if isinstance(layouts, Mapping):
        values = {name: layout_value(layout) for name, layout in layouts.items()}
        return None if None in values.values() else values
    return () if layouts is None else layout_value(layouts)
