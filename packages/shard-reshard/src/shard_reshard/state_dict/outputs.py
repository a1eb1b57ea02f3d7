"""Execution of a planned state dict: an exchange for each bucket, then results by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.dtensor import as_dtensor
from shard_reshard._shared.problems import Problem
from shard_reshard._torch_compat import dtensor_maker, unflattened
from shard_reshard.execution.changes import ChangeExchange
from shard_reshard.execution.checks import (
    FREED,
    TensorGuards,
    address,
    destination_problems,
    has_memory,
    local_problems,
    memory_of,
)
from shard_reshard.execution.exchange import Workspace
from shard_reshard.execution.mover import Mover, shared_mover
from shard_reshard.group import GroupInfo, assert_consistent
from shard_reshard.layout.boxes import BoxShardMap, PieceShardMap
from shard_reshard.layout.shard_map import dtype_name, torch_dtype
from shard_reshard.state_dict.agreement import declared_mismatches
from shard_reshard.state_dict.pairs import VALUES, Conversion, apart_problems
from shard_reshard.state_dict.plan import DstLayouts, StateDictPlan, TensorMeta, TensorMove, given_layout


class Progress(NamedTuple):
    """Argument of ``progress`` after each tensor's arrival."""

    name: str
    done: int
    total: int
    done_bytes: int
    total_bytes: int


class MovedStateDict(dict[str, Any]):
    """Name -> tensor on this rank, in the destination layout. A DTensor for layouts of a DeviceMesh.

    Of a nested state dict the names are DCP's, as ``state.layer.weight.exp_avg``, and values that are no tensors are in
    it on every rank.

    Attributes:
        plan: The executed plan.
    """

    plan: StateDictPlan

    def nested(self) -> dict[str, Any]:
        """Return the result in the form of the nested state dict that was moved."""
        return unflattened({name: self[name] for name in self.plan.paths if name in self}, self.plan.paths)


class LocalTargets:
    """Destinations, buckets and movers of one rank in a planned state dict, for all calls.

    With ``keep`` buffers and views are kept between calls. Sources of a call are compared with ``known`` metadata.

    Attributes:
        converted: Names that arrive apart from their destination, because arithmetic follows; with their weights.
        shapes: Destination name -> shapes of the local tensors; without names that are tied to another one.
        buckets: For each bucket, the moves that take a source from this rank, and all its moves.
        movers: For each bucket, what moves it.
    """

    def __init__(
        self,
        members: GroupInfo,
        plan: StateDictPlan,
        dst_layouts: DstLayouts = None,
        *,
        check: str = "first",
        keep: bool = False,
        changed_only: bool = False,
        known: Mapping[str, TensorMeta] | None = None,
    ) -> None:
        self.plan, self.rank, self.members, self.dst_layouts = plan, members.rank, members, dst_layouts
        self.converted = {name: weight for weight, entry in plan.conversions.items() for name in (entry.scale, weight)}
        self._known, moved = known or {}, {move.source for move in plan.moves}
        self._tied = [
            (name, entry.tied_to)
            for name, entry in self._known.items()
            if entry.tied_to != name and name not in moved and name not in plan.dropped
        ]
        local = {name: layout.local_shapes(self.rank) for name, (layout, _) in plan.targets.items()}
        self.shapes = {name: shapes for name, shapes in local.items() if name not in plan.aliases}
        self.dtypes = {name: torch_dtype(plan.targets[name][1]) for name in self.shapes}
        self.buckets: list[tuple[list[TensorMove], list[TensorMove]]] = []
        self.movers: list[Mover] = []
        for bucket in plan.buckets:
            moves = [plan.moves[at] for at in bucket]
            held = [move for move in moves if move.plan.src.local_shapes(self.rank)]
            self.buckets.append((held, moves))
            plans = tuple(move.plan for move in moves)
            # What is prepared for one caller's tensors must not meet another's: then movers are not shared.
            mover = Mover(plans, members, check, Workspace()) if keep else shared_mover(members, plans, check)
            if changed_only:
                mover.changes = ChangeExchange(min(plan.itemsize for plan in plans))
            self.movers.append(mover)
        self.wraps: dict[str, Callable[[torch.Tensor], Any] | None] = {}  # constructors of DTensors, by name

    def source_problems(
        self,
        sources: Mapping[str, torch.Tensor],
        given: Mapping[str, Any] | None = None,
        written: Iterable[torch.Tensor] = (),
        unchanged: bool = False,
    ) -> list[Problem]:
        """Return the problems of this rank's sources, which are on the device of what is ``written``.

        ``given`` are the same as the caller has them. ``unchanged``: with the metadata of a call without problems.
        """
        where = f"rank {self.rank}"
        hint = "make another resharder: this one moves them as one tensor"
        # In other memory tensors may be tied differently, even with equal metadata.
        problems = [
            Problem("tied-weights", name, found=f"no longer the memory of {first}", hint=hint)
            for name, first in self._tied
            if name in sources and first in sources and sources[name].numel()
            if memory_of(sources[name]) != memory_of(sources[first])
        ]
        if unchanged:  # guards on metadata do not see storage that was freed
            return problems + [
                Problem("no-data", f"{name}: {where}, source", None, None, *FREED)
                for name, tensor in sources.items()
                if not has_memory(tensor)
            ]
        if strange := sorted(given.keys() - self._known.keys()) if given is not None else []:
            hint = "leave them out, or make a resharder for a state dict that has them"
            problems.append(Problem("unknown-name", "state_dict", found=", ".join(map(repr, strange)), hint=hint))
        metadata, full = self._known, BoxShardMap.whole
        problems += declared_mismatches(
            given or {}, lambda name: (m := metadata.get(name)) and (m.layout or full(m.shape, self.rank)), self.members
        )
        for move in self.plan.moves:
            held = move.source in sources and move.plan.src.local_shapes(self.rank)
            for problem in local_problems(move.plan, self.rank, [move.view(sources[move.source])] if held else []):
                name = f"{move.source}: {problem.name}"
                problems.append(Problem(problem.code, name, found=problem.found, hint=problem.hint))
        devices = {tensor.device for tensor in (*sources.values(), *written)}
        if len(devices) > 1:
            listed = ", ".join(sorted(map(str, devices)))
            problems.append(Problem("device-mismatch", where, found=listed, hint="one device on each rank"))
        return problems

    def out_problems(
        self,
        given: Mapping[str, Any],
        outs: Mapping[str, torch.Tensor],
        sources: Mapping[str, torch.Tensor],
        atomic: bool,
        strict: bool,
        casts: str,
    ) -> list[Problem]:
        """Return the problems of ``given`` as ``out`` on this rank (locally ``outs``)."""
        targets = self.plan.outputs
        problems = declared_mismatches(given, lambda name: targets[name][0] if name in targets else None, self.members)

        def add(code: str, found: str, hint: str) -> None:
            problems.append(Problem(code, f"{name}: rank {self.rank}, out", found=found, hint=hint))

        planned = {name: out for name, out in outs.items() if name in targets}
        for name, out in planned.items():
            layout, dtype = targets[name]
            shapes = layout.local_shapes(self.rank)
            if len(shapes) == 1 and (tuple(out.shape), str(out.dtype)) != (shapes[0], f"torch.{dtype}"):
                add(
                    "shape-mismatch",
                    f"{out.dtype} of shape {tuple(out.shape)}, the layout needs {dtype} of shape {shapes[0]}",
                    "pass a local tensor of that shape, or another layout in dst_layouts",
                )
            elif len(shapes) > 1:
                add(
                    "argument-count",
                    f"one tensor for {len(shapes)} boxes",
                    "leave it out of out=; the result has a list of tensors",
                )
            elif not shapes and strict and out.numel():
                add(
                    "missing-source",
                    f"shape {tuple(out.shape)}, the layout has nothing on this rank",
                    "leave it out of out= on this rank, or pass strict=False",
                )
        for name, value in given.items():
            if name in targets and not isinstance(value, torch.Tensor):
                add("wrong-type", f"a {type(value).__qualname__}", "pass a tensor, or leave it out of out=")
        memories = {address(out) for out in planned.values()} if len(planned) < len(outs) else set()
        # A tensor tied to a filled one is filled with it.
        left = {name for name, out in outs.items() if name not in planned and address(out) not in memories}
        if strict:
            problems += [
                Problem(
                    "missing-source",
                    name,
                    found="a tensor of out= without a source",
                    hint="leave it out of out=, or pass strict=False",
                )
                for name in outs
                if name in left
            ]
        elif casts == "exact":
            dtypes = {name: dtype_name(out.dtype) for name, out in outs.items()}
            partly = {name for name, value in self.plan.fills.items() if value is None}
            hint = f"give both a source, {{source: %r}}; {VALUES}"
            for moved, stays in ((outs.keys() - left, left), (outs.keys() - left - partly, partly)):
                problems += apart_problems(dtypes, moved, stays, "which keeps values that it has in out=", hint)
        if not problems:
            # Tensors tied at the source too move once, and are written once. Ties only here would get two values.
            once = {(memory_of(out), self.plan.aliases.get(name, name)): name for name, out in planned.items()}
            filled = {name: planned[name] for name in once.values()}
            names = [f"{name}: rank {self.rank}, out" for name in filled]
            problems = destination_problems(list(filled.values()), names, list(sources.values()), not atomic)
        return problems


class ReceiveBuffers:
    """Destination tensors of this rank: those of ``outs`` if filled in place, else fresh ones."""

    def __init__(self, here: LocalTargets, outs: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.fresh = not outs
        self.in_place: set[str] = set()  # names filled in the caller's memory
        self.ready: dict[str, list[torch.Tensor]] = {}  # results of conversions
        for name, shapes in here.shapes.items():
            if outs and name in outs and len(shapes) == 1 and name not in here.converted:
                self.tensors[name] = [outs[name]]
                self.in_place.add(name)
                continue
            self.tensors[name] = [torch.empty(shape, dtype=here.dtypes[name], device=device) for shape in shapes]
        self.all_in_place = bool(outs) and len(self.in_place) == len(self.tensors)

    def fill(self, fills: Mapping[str, float | None], outs: Mapping[str, torch.Tensor]) -> None:
        """Write the elements without a source; before the moves."""
        for name, value in fills.items():
            for tensor in self.tensors.get(name, ()):
                if value is not None:
                    tensor.fill_(value)
                elif name not in self.in_place:
                    tensor.copy_(outs[name])


Bucket = tuple[list[torch.Tensor], list[torch.Tensor]]  # sources and destinations
Held = dict[str, list[torch.Tensor]]


def staged(
    here: LocalTargets,
    subject: str,
    digest: str,
    name_of: Callable[[TensorMove], str],
    make: Callable[[str], list[torch.Tensor]],
    states: tuple[str, str],
    finish: Callable[[str, list[torch.Tensor]], None] | None = None,
) -> Iterator[tuple[list[TensorMove], Held]]:
    """Yield each bucket's moves, and by name what they need on this rank, once every rank has it; a collective.

    ``make`` is called before the first bucket that needs a name, ``finish`` after the last one; errors of both are
    raised on all ranks. ``states`` says what they leave of the caller's tensors, before the first bucket and later.
    """
    problems, held, buckets = list[Problem](), Held(), here.plan.buckets
    last = {name_of(here.plan.moves[at]): number for number, bucket in enumerate(buckets) for at in bucket}
    for number, bucket in enumerate(buckets):
        moves = [here.plan.moves[at] for at in bucket]
        for name in dict.fromkeys(map(name_of, moves)):
            try:
                if name not in held:
                    held[name] = make(name)
            except Exception as error:  # a file that was changed, memory that is short on one rank
                problems += problems_of(error)
        assert_consistent(here.members, subject, [f"bucket {number} of {digest}"], problems, states[number > 0])
        yield moves, held
        for name in [name for name in held if last[name] == number]:
            tensors = held.pop(name)
            try:
                if finish is not None:
                    finish(name, tensors)
            except Exception as error:  # a full disk: raised in the next comparison
                problems += problems_of(error)
    if finish is not None:
        assert_consistent(here.members, subject, [f"all of {digest}"], problems, states[1])


def move_buckets(
    here: LocalTargets,
    calls: Iterable[Bucket],
    fresh: bool,
    unchanged: TensorGuards | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Exception | None:
    """Run all exchanges; return the first error of ``progress``, for which no other rank waits."""
    plan, done_bytes, done, late = here.plan, 0, 0, None
    sizes = [] if progress is None else [prod(move.plan.shape) * move.plan.itemsize for move in plan.moves]
    for mover, bucket, (flat, outs) in zip(here.movers, plan.buckets, calls, strict=True):
        mover.start(flat, outs, False, fresh, unchanged)
        for at in bucket:
            if progress is None or late is not None:
                break
            done, done_bytes = done + 1, done_bytes + sizes[at]
            try:
                progress(Progress(plan.moves[at].source, done, len(plan.moves), done_bytes, sum(sizes)))
            except Exception as error:
                late = error
    return late


def write_outputs(
    here: LocalTargets,
    arriving: ReceiveBuffers,
    outs: Mapping[str, Any],
    locals_: Mapping[str, torch.Tensor],
    names: Iterable[str] | None = None,
) -> MovedStateDict:
    """Return the results of this rank; copies separate arrivals to ``outs`` (locally ``locals_``).

    ``names`` are those that are wanted, whose buckets have arrived; None: all.
    """
    plan, results, ready = here.plan, dict[str, Any](), arriving.ready
    names = plan.outputs if names is None else names  # in the order of their names
    if arriving.in_place.issuperset(names):  # most kept calls: a step a tensor counts
        return MovedStateDict({name: outs[name] for name in names})
    for name in names:
        if name in arriving.in_place:
            results[name] = outs[name]
            continue
        first = plan.aliases.get(name, name)
        if first in here.converted and first not in ready:
            weight = here.converted[first]
            ready |= _converted(here, arriving, weight, plan.conversions[weight])
        tensors = ready[first] if first in ready else arriving.tensors[first]
        if not tensors:  # nothing on this rank
            continue
        if name in locals_:
            target = locals_[name]
            if address(target) != address(tensors[0]) or target.shape != tensors[0].shape:
                target.copy_(tensors[0])
            results[name] = outs[name]
            continue
        if name not in here.wraps:  # a DTensor for a layout of a DeviceMesh
            shape = plan.outputs[name][0].shape
            layout = given_layout(name, shape, here.dst_layouts)
            here.wraps[name] = None
            derived = isinstance(plan.outputs[name][0], PieceShardMap)  # the scale of a sharded weight is no DTensor
            if not derived and isinstance(layout, tuple) and len(layout) == 2 and hasattr(layout[0], "mesh_dim_names"):
                here.wraps[name] = dtensor_maker(as_dtensor(tensors[0], layout[0], tuple(layout[1]), shape))
        wrap = here.wraps[name]
        results[name] = wrap(tensors[0]) if wrap else tensors[0] if len(tensors) == 1 else tensors
    return MovedStateDict(results)


def _converted(
    here: LocalTargets, arriving: ReceiveBuffers, name: str, conversion: Conversion
) -> dict[str, list[torch.Tensor]]:
    """Return a weight that was quantised or dequantised on this rank, and the scale of a quantised one.

    What arrived is released: the result takes its place.
    """
    weights = arriving.tensors.pop(name)
    scales = (
        weights if conversion.quantize else arriving.tensors[here.plan.aliases.get(conversion.scale, conversion.scale)]
    )
    results = [
        conversion.apply(here.rank, number, weight, factors)
        for number, (weight, factors) in enumerate(zip(weights, scales, strict=True))
    ]
    names = [name, conversion.scale] if conversion.quantize else [name]
    return {each: [result[at] for result in results] for at, each in enumerate(names)}
