"""Plans for many tensors: from the metadata of all ranks to one list of moves."""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from operator import add
from typing import NamedTuple

import torch
from shard_spec import Layout, MeshSpec

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.boxes import BoxShardMap, Dims, ShardMapView, tiling_problems
from shard_reshard.layout.parse import LayoutLike, ToGroup, resolve_layout
from shard_reshard.layout.shard_map import ITEMSIZES, Index, MeshShardMap, ShardMap, human
from shard_reshard.plan import all_ranks_copies
from shard_reshard.planning import ReshardPlan, make_plan


class Part(NamedTuple):
    """Destination of a tensor, or of a span of one: a value of ``key_map``.

    ``{"q.weight": Part("qkv.weight", start=0), "k.weight": Part("qkv.weight", start=4096)}`` fuses;
    ``{"qkv.weight": [Part("q.weight", size=4096), Part("k.weight", source_start=4096, size=1024)]}`` splits;
    ``{f"experts.{n}.w1": Part("experts.w1", stack=n) for n in range(8)}`` stacks.
    Together the sources of a destination fill it: an element without a source is a problem.

    Attributes:
        name: FQN of the destination.
        start: First index in the destination, along its dim for ``dim``.
        dim: Tensor dim of the source.
        source_start: First index along ``dim`` of the source.
        size: Number of indices; None: all of the source from ``source_start`` on.
        fill: Value of the destination's elements without a source (padding). None: there are none.
        stack: Index in a leading dim of the destination that the source lacks. None: they have the same dims.
        dims: The source's dims in the destination's order, as in ``torch.permute``. None: the same order.
    """

    name: str
    start: int = 0
    dim: int = 0
    source_start: int = 0
    size: int | None = None
    fill: float | None = None
    stack: int | None = None
    dims: tuple[int, ...] | None = None


KeyMap = Mapping[str, "str | Part | Sequence[Part] | None"]
DstLayouts = Mapping[str, LayoutLike] | Callable[[str, tuple[int, ...]], LayoutLike] | LayoutLike | None


class TensorMeta(NamedTuple):
    """Metadata of one tensor on a rank; plain data, sent between ranks."""

    shape: tuple[int, ...]
    dtype: str
    layout: ShardMap | None  # None for a plain tensor
    tied_to: str  # first name with the same memory, perhaps its own
    on_meta: bool = False  # without values


@dataclass(frozen=True)
class RankMeta:
    """Metadata of all tensors of one rank."""

    sources: dict[str, TensorMeta]
    outs: dict[str, TensorMeta]
    problems: tuple[Problem, ...] = ()
    elsewhere: tuple[str, ...] = ()  # names of ``src_layouts`` missing on this rank


class TensorMove(NamedTuple):
    """One tensor, or a span of one, and its plan."""

    source: str
    target: str
    plan: ReshardPlan

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a local source tensor with its dims in the destination's order."""
        dims = self.plan.src.dims if isinstance(self.plan.src, ShardMapView) else None
        if dims is None:
            return tensor
        view = tensor.permute([dim for dim in dims if dim is not None])
        for at in (at for at, dim in enumerate(dims) if dim is None):
            view = view.unsqueeze(at)
        return view


@dataclass(frozen=True)
class StateDictPlan:
    """Plan of all tensors of a state dict.

    Attributes:
        moves: Every move, in execution order.
        buckets: For each collective, the positions of its moves.
        targets: Layout and dtype of every destination tensor.
        aliases: Destination names tied to another destination, which is moved for both.
        fills: Destination names with elements without a source, and the value of these; None: they stay unchanged.
    """

    moves: tuple[TensorMove, ...]
    buckets: tuple[tuple[int, ...], ...]
    targets: Mapping[str, tuple[ShardMap, str]]
    aliases: Mapping[str, str]
    fills: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def wire_bytes(self) -> int:
        """All bytes on the wire, with the padding of messages of several dtypes."""
        total = 0
        for bucket in self.buckets:
            plans = [self.moves[at].plan for at in bucket]
            padding = max(plan.itemsize for plan in plans) if len({plan.itemsize for plan in plans}) > 1 else 1
            messages: Counter[tuple[int, int, int]] = Counter()  # bytes by stage and pair of ranks
            for plan in plans if padding > 1 else ():
                for copy in all_ranks_copies(plan):
                    if copy.src_rank != copy.dst_rank:
                        messages[copy.stage, copy.src_rank, copy.dst_rank] += copy.numel * plan.itemsize
            total += sum(-(-size // padding) * padding for size in messages.values())
            total += sum(plan.wire_bytes for plan in plans) if padding == 1 else 0
        return total

    @property
    def lower_bound(self) -> int:
        """Minimum bytes for any algorithm."""
        return sum(move.plan.lower_bound for move in self.moves)

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        moves = [(move.source, move.target, move.plan.digest) for move in self.moves]
        facts = [moves, self.buckets, dict(self.aliases), dict(self.fills)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def lines(self) -> list[str]:
        """One line for each move, for comparison between ranks."""
        return [
            f"{_title(move)}: {move.plan.dtype} {move.plan.shape} from {move.plan.src.describe()} to "
            f"{move.plan.dst.describe()}, plan {move.plan.digest[:12]}"
            for move in self.moves
        ]

    def explain(self, name: str | None = None) -> str:
        """Describe the plan of tensor ``name`` (source or target), or each tensor in a line."""
        chosen = [move for move in self.moves if name in (None, move.source, move.target)]
        if name is not None:
            return "\n".join(move.plan.explain(_title(move)) for move in chosen)
        lines = [
            f"{len(self.moves)} moves in {len(self.buckets)} collectives, {human(self.wire_bytes)} on the wire, "
            f"lower bound {human(self.lower_bound)}"
        ]
        for move in chosen:
            size = human(move.plan.wire_bytes)
            lines.append(f"  {_title(move)}: {move.plan.src.describe()} -> {move.plan.dst.describe()}, {size}")
        return "\n".join(lines)


def _title(move: TensorMove) -> str:
    return move.source if move.source == move.target else f"{move.source} -> {move.target}"


# ---- planning --------------------------------------------------------------------------------------------------


@contextmanager
def _collections_paused() -> Iterator[None]:
    # A plan of a large model is a million objects that all stay: each full collection would visit every object of the
    # process, for 40 % of the planning time, and free nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collections_paused()
def plan_state_dict(
    everyone: Sequence[RankMeta],
    dst_layouts: DstLayouts,
    key_map: KeyMap | None = None,
    bucket_bytes: int = 64 * 2**20,
    to_group: ToGroup | None = None,
    strict: bool = True,
) -> StateDictPlan:
    """Plan the moves of all tensors from all ranks' metadata, in rank order, or raise the problems of all.

    Pure and equal on every rank.
    """
    problems: list[Problem] = [p for facts in everyone for p in facts.problems]
    key_map = key_map or {}

    # Sources of all ranks, and the destinations of each.
    sources = _merge("source", [facts.sources for facts in everyone], problems)
    elsewhere = dict.fromkeys(name for facts in everyone for name in facts.elsewhere)
    hint = "src_layouts names tensors of some rank's state_dict"
    problems += [_unknown("src_layouts", name, sources, hint) for name in elsewhere if name not in sources]
    hint = "key_map names tensors of the source state dict"
    problems += [_unknown("key_map", name, sources, hint) for name in key_map if name not in sources]
    routes: list[Route] = []
    for name, meta in sources.items():
        entries = key_map.get(name, name)
        for entry in [] if entries is None else [entries] if isinstance(entries, str | Part) else list(entries):
            try:
                routes.append(_route(name, meta.shape, Part(entry) if isinstance(entry, str) else entry))
            except PlanError as error:
                problems += error.problems
    by_target: dict[str, list[Route]] = {}
    for route in routes:
        by_target.setdefault(route.target, []).append(route)

    # Layout and dtype of each destination: the caller's, or those of its tensor in `out`.
    shapes = {name: _least_shape(name, sources, by_target[name], problems) for name in sorted(by_target)}
    in_layouts = {name: given_layout(name, shape, dst_layouts) for name, (shape, _) in shapes.items()}
    located = {name for name, layout in in_layouts.items() if layout is not None}
    outs = _merge("out", [facts.outs for facts in everyone], problems, located)
    targets: dict[str, tuple[ShardMap, str]] = {}
    fills: dict[str, float | None] = {}
    # Large models have many tensors and few layouts: equal ones are resolved, planned and scheduled once.
    resolved: dict[object, ShardMap] = {}
    for name, (shape, dtype) in shapes.items():
        out, wanted = outs.get(name), in_layouts[name]
        key = id(wanted), id(out.layout) if out is not None and wanted is None else 0, shape
        try:
            if key not in resolved:
                own = None if out is None else out.layout
                if wanted is None and own is None:
                    hint = "name it in dst_layouts, pass an out= that has it, or leave it out: key_map={name: None}"
                    raise PlanError(Problem("missing-argument", name, found="no destination layout", hint=hint))
                resolved[key] = own if wanted is None and own else resolve_layout(wanted, shape, to_group)
            targets[name] = resolved[key], dtype if out is None else out.dtype
            if len(by_target[name]) > 1 or resolved[key].shape != by_target[name][0].shape:
                _fill(name, resolved[key], by_target[name], everyone, strict, fills)
        except PlanError as error:
            problems += [p.named(name) for p in error.problems]
    if strict:
        filled = {outs[name].tied_to for name in targets if name in outs}
        reason, hint = "a tensor of out= without a source", "pass its source, name it in key_map, or pass strict=False"
        problems += [
            Problem("missing-source", name, found=reason, hint=hint)
            for name, meta in outs.items()
            if name not in targets and meta.tied_to not in filled  # one tied to a filled one is filled with it
        ]
        hint = "dst_layouts names destination tensors; leave it out, or pass strict=False"
        problems += [
            _unknown("dst_layouts", name, shapes, hint)
            for name in (dst_layouts if isinstance(dst_layouts, Mapping) else ())
            if name not in shapes and key_map.get(name, name) is not None
        ]
    if problems:
        raise PlanError(dict.fromkeys(problems))

    # Moves: of tied tensors once, and equal plans as one object.
    aliases = _aliases(sources, outs, by_target, routes, targets)
    plans: dict[object, ReshardPlan] = {}
    moves = []
    for route in routes:
        if route.target in aliases:
            continue
        layout, dtype = targets[route.target]
        meta = sources[route.source]
        same = id(meta.layout), meta.dtype, route[2:], id(layout), dtype
        if same not in plans:
            src = meta.layout
            assert src is not None  # merged
            if src.shape != route.shape or route.dims is not None:
                src = ShardMapView(src, route.source_start, route.shape, route.dims)
            if layout.shape != route.shape:
                layout = ShardMapView(layout, route.start, route.shape)
            num_bytes = (src.largest + layout.largest) * max(ITEMSIZES[meta.dtype], ITEMSIZES[dtype])
            plans[same] = make_plan(src, layout, meta.dtype, dtype, bucket_bytes if num_bytes > bucket_bytes else None)
        moves.append(TensorMove(route.source, route.target, plans[same]))
    return StateDictPlan(tuple(moves), _buckets(moves, bucket_bytes), targets, aliases, fills)


def _merge(
    side: str, tables: Sequence[Mapping[str, TensorMeta]], problems: list[Problem], located: Set[str] = frozenset()
) -> dict[str, TensorMeta]:
    """Merge tables into one entry for each name, with the layout over all ranks.

    Plain tensors among ``located`` are shards of a layout given by the caller, each of its own shape.
    """
    merged: dict[str, TensorMeta] = {}
    times = Counter(name for table in tables for name in table)
    several: dict[str, dict[int, TensorMeta]] = {}
    alike: dict[ShardMap | None, ShardMap | None] = {}  # equal layouts as one object
    for rank, table in enumerate(tables):
        for name, entry in table.items():
            if times[name] == 1 and entry.layout:
                merged[name] = entry
            else:
                several.setdefault(name, {})[rank] = entry
    for name, by_rank in sorted(several.items()):
        first = next(iter(by_rank.values()))
        for rank, entry in by_rank.items():
            if name in located and entry.layout is first.layout is None and entry.dtype == first.dtype:
                continue
            if entry[:2] != first[:2] or (entry.layout is None) != (first.layout is None):
                kind = "a plain tensor" if entry.layout is None else "a sharded tensor"
                reason = f"rank {rank}: {kind} of {entry.shape} {entry.dtype}, before: {first.shape} {first.dtype}"
                hint = "shape, dtype and kind of a tensor are the same on every rank"
                problems.append(Problem("ranks-disagree", f"{side} {name}", found=reason, hint=hint))
                break
        else:
            joined = _joined_layout(by_rank)
            layout = alike.setdefault(joined, joined)
            if layout is None and side == "out":
                reason = f"the layouts {', '.join(sorted({repr(entry.layout) for entry in by_rank.values()}))}"
                hint = "give one layout for all ranks in dst_layouts"
                problems.append(Problem("ranks-disagree", f"out {name}", found=reason, hint=hint))
            tied = {entry.tied_to for entry in by_rank.values() if entry.tied_to}
            merged[name] = first._replace(layout=layout or first.layout, tied_to=tied.pop() if len(tied) == 1 else name)
    return dict(sorted(merged.items()))


def _joined_layout(by_rank: Mapping[int, TensorMeta]) -> ShardMap | None:
    """Return the layout over all ranks, or None: a common one, or equal replicas."""
    first = next(iter(by_rank.values()))
    layouts = list(dict.fromkeys(metadata.layout for metadata in by_rank.values()))
    if layouts == [None]:  # plain tensors: full on each of their ranks
        return MeshShardMap(Layout(MeshSpec({"replica": len(by_rank)}, list(by_rank)), "replica:R"), first.shape)
    boxed = [entry for entry in layouts if isinstance(entry, BoxShardMap)]
    meshed = [entry.layout for entry in layouts if isinstance(entry, MeshShardMap)]
    if len(layouts) == 1 or len(layouts) not in (len(boxed), len(meshed)):
        return layouts[0] if len(layouts) == 1 else None
    if boxed:
        boxes = {rank: held for entry in boxed for rank, held in entry.boxes.items()}
        (kind, *options), *others = {(kind, *rest) for kind, (_, _, *rest) in (entry.__reduce__() for entry in boxed)}
        if others or len(boxes) < sum(len(entry.boxes) for entry in boxed):
            return None
        joined: BoxShardMap = kind(first.shape, boxes, *options)  # ranks with equal boxes are replicas
        return joined
    axes, text = meshed[0].mesh.axes, str(meshed[0])
    ranks = [rank for layout in meshed for rank in layout.mesh.ranks]
    if any((layout.mesh.axes, str(layout)) != (axes, text) for layout in meshed) or len(set(ranks)) < len(ranks):
        return None
    axis = next(name for name in ("replica", "replica_", "replica__") if name not in axes)
    return MeshShardMap(Layout(MeshSpec({axis: len(meshed), **axes}, ranks), f"{axis}:R, {text}"), first.shape)


class Route(NamedTuple):
    """A resolved entry of ``key_map``: a window of the source, and its destination."""

    source: str
    target: str
    source_start: Index  # in the source's dims
    start: Index  # this and the shape are in the destination's dims
    shape: Index
    dims: Dims | None  # the source's dims in the destination's order; None: the same
    fill: float | None
    stop: Index  # one past the last index in the destination


def _route(name: str, shape: Index, part: Part) -> Route:
    reason, zero = f"{part!r} for a tensor of shape {shape}", (0,) * len(shape)
    order = tuple(range(len(shape))) if part.dims is None else tuple(part.dims)
    if sorted(order) != list(range(len(shape))):
        raise PlanError(Problem("invalid-argument", name, found=reason, hint="dims names each dim of the source once"))
    start, source_start, sizes = list(zero), list(zero), list(shape)
    if shape:
        if not -len(shape) <= part.dim < len(shape):
            raise PlanError(Problem("dim-out-of-range", name, part.dim, found=reason, hint="correct key_map"))
        dim = part.dim % len(shape)
        start[dim], source_start[dim] = part.start, part.source_start
        sizes[dim] = shape[dim] - part.source_start if part.size is None else part.size
        if min(sizes[dim], part.start, part.source_start) < 0 or part.source_start + sizes[dim] > shape[dim]:
            raise PlanError(Problem("box-out-of-range", name, dim, found=reason, hint="correct key_map"))
    dims: Dims = order if part.stack is None else (None, *order)
    if part.stack is not None and part.stack < 0:
        raise PlanError(Problem("box-out-of-range", name, found=reason, hint="stack is counted from 0"))
    begin = tuple(part.stack or 0 if dim is None else start[dim] for dim in dims)
    extent = tuple(1 if dim is None else sizes[dim] for dim in dims)
    turned = None if dims == tuple(range(len(shape))) else dims
    stop = tuple(map(add, begin, extent))
    return Route(name, part.name, tuple(source_start), begin, extent, turned, part.fill, stop)


def _least_shape(
    name: str, sources: Mapping[str, TensorMeta], routes: Sequence[Route], problems: list[Problem]
) -> tuple[Index, str]:
    """Return the smallest shape that contains all windows of a destination, and their dtype."""
    dtypes = {sources[route.source].dtype for route in routes}
    if len(dtypes) > 1:
        hint = "parts of one tensor have one dtype"
        problems.append(Problem("ranks-disagree", name, found=", ".join(sorted(dtypes)), hint=hint))
    if len({len(route.shape) for route in routes}) > 1:
        reason = ", ".join(f"{route.source} {route.shape}" for route in routes)
        hint = "parts of one tensor have its number of dims"
        problems.append(Problem("ranks-disagree", name, found=reason, hint=hint))
        routes = routes[:1]
    return tuple(map(max, zip(*(route.stop for route in routes), strict=True))), sources[routes[0].source].dtype


def _fill(
    name: str,
    layout: ShardMap,
    routes: Sequence[Route],
    everyone: Sequence[RankMeta],
    strict: bool,
    fills: dict[str, float | None],
) -> None:
    """Compare a destination with its arrivals. Each element has one source, a value of ``fill``, or stays."""
    for route in routes:
        if len(route.shape) != len(layout.shape) or any(a > b for a, b in zip(route.stop, layout.shape, strict=True)):
            reason = f"{route.source} arrives as {route.shape} at {route.start}, the destination is of {layout.shape}"
            hint = "pass a destination of that shape, or a Part of the source in key_map"
            raise PlanError(Problem("shape-mismatch", name, found=reason, hint=hint))
    values = sorted({route.fill for route in routes if route.fill is not None})
    if len(values) > 1:
        reason, hint = f"fill of {', '.join(map(str, values))}", "give one value for a destination"
        raise PlanError(Problem("conflicting-arguments", name, found=reason, hint=hint))
    hint = "send the rest too, give Part(..., fill=) its value, or pass an out= that has values, and strict=False"
    spans = [(route.source, (route.start, route.stop)) for route in routes if 0 not in route.shape]
    problems = tiling_problems(layout.shape, spans, name, hint, "source")
    gaps = {problem.code for problem in problems} == {"boxes-incomplete"}
    stays = not strict and all(
        rank < len(everyone) and name in everyone[rank].outs and not everyone[rank].outs[name].on_meta
        for rank in layout.ranks
        if layout.pieces(rank)
    )
    if gaps and (values or stays):  # overlaps are never allowed
        fills[name] = values[0] if values else None
    elif problems:
        raise PlanError(problems)


def kept_layouts(dst_layouts: DstLayouts) -> DstLayouts:
    """Return layouts that a caller's later changes do not reach. A function is asked once for each tensor."""
    if isinstance(dst_layouts, Mapping):
        return dict(dst_layouts)
    return cache(dst_layouts) if callable(dst_layouts) else dst_layouts


def given_layout(name: str, shape: tuple[int, ...], dst_layouts: DstLayouts) -> LayoutLike | None:
    """Return the layout of one tensor in ``dst_layouts``."""
    if isinstance(dst_layouts, Mapping):
        return dst_layouts.get(name)
    return dst_layouts(name, shape) if callable(dst_layouts) else dst_layouts


def _unknown(argument: str, name: object, names: Collection[str], hint: str) -> Problem:
    near = get_close_matches(str(name), names, n=1)
    return Problem(
        "unknown-name", argument, found=repr(name), hint=f"did you mean {near[0]!r}? {hint}" if near else hint
    )


def _aliases(
    sources: Mapping[str, TensorMeta],
    outs: Mapping[str, TensorMeta],
    by_target: Mapping[str, Sequence[Route]],
    routes: Sequence[Route],
    targets: Mapping[str, tuple[ShardMap, str]],
) -> dict[str, str]:
    """Return tied tensors that move once: one memory at either end, one layout."""
    by_source: dict[str, list[Route]] = {}
    for route in routes:
        by_source.setdefault(route.source, []).append(route)
    aliases: dict[str, str] = {}
    for source, meta in sources.items():
        first = meta.tied_to
        if first == source or len(by_source.get(source, ())) != 1 or len(by_source.get(first, ())) != 1:
            continue
        (route,), (first_route,) = by_source[source], by_source[first]
        if route[2:] != first_route[2:]:  # other spans of the one tensor
            continue
        target, first_target = route.target, first_route.target
        simple = len(by_target[target]) == len(by_target[first_target]) == 1 and target != first_target
        outs_tied = target not in outs or outs[target].tied_to == outs[first_target].tied_to
        if simple and outs_tied and targets[target] == targets[first_target]:
            aliases[target] = first_target
    return aliases


_FEW_RANKS = 32  # a larger layout counts on all ranks


def _buckets(moves: Sequence[TensorMove], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Group moves into collectives, in their order, by the fullest rank's bytes."""
    buckets: list[list[int]] = []
    everywhere, on_rank = bucket_bytes + 1, Counter[int]()  # no bucket is open
    for at, move in enumerate(moves):
        plan, shared, sizes = move.plan, 0, Counter[int]()
        apart = plan.src.rank_set.isdisjoint(plan.dst.rank_set)  # no rank sends and receives
        for side in (plan.src, plan.dst):
            size = side.largest * plan.itemsize
            if len(side.ranks) > _FEW_RANKS:
                shared = max(shared, size) if apart else shared + size
            else:
                sizes.update(dict.fromkeys(side.ranks, size))
        everywhere += shared
        on_rank.update(sizes)
        alone = plan.max_workspace_bytes is not None
        if alone or everywhere + max(on_rank.values(), default=0) > bucket_bytes:
            buckets.append([])
            everywhere, on_rank = shared, sizes
        buckets[-1].append(at)
        everywhere += bucket_bytes + 1 if alone else 0
    return tuple(map(tuple, buckets))
