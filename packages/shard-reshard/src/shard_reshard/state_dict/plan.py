"""Plans for many tensors: from the metadata of all ranks to one list of moves."""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import chain
from math import prod
from operator import add
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from shard_spec import Layout, MeshSpec

from shard_reshard._shared.problems import PlanError, Problem, raise_problems, refusal
from shard_reshard.group import condensed
from shard_reshard.layout.boxes import BoxShardMap, Dims, ShardMapView, tiling_problems
from shard_reshard.layout.parse import LayoutLike, ToGroup, resolve_layout
from shard_reshard.layout.shard_map import Index, MeshShardMap, ShardMap, by_key, dtype_name, human
from shard_reshard.plan import all_ranks_copies
from shard_reshard.planning import ReshardPlan, make_plan
from shard_reshard.state_dict.pairs import (
    QUANTISED,
    VALUES,
    Axes,
    Block,
    Conversion,
    Matched,
    Pair,
    Scaled,
    Scales,
    apart_problems,
    axes_by_dims,
    cast_problem,
    convertible,
    grid_of,
    grown_layout,
    holds,
    matched_pairs,
    scale_axes,
    scale_layout,
    weight_beside,
    zero_point_problems,
)


class Part(NamedTuple):
    """Destination of a tensor, or of a span of one: a value of ``key_map``.

    ``{"q.weight": Part("qkv.weight", start=0), "k.weight": Part("qkv.weight", start=4096)}`` fuses;
    ``{"qkv.weight": [Part("q.weight", size=4096), Part("k.weight", source_start=4096, size=1024)]}`` splits;
    ``{f"experts.{n}.w1": Part("experts.w1", stack=n) for n in range(8)}`` stacks, and
    ``{"experts.w1": [Part(f"experts.{n}.w1", unstack=n) for n in range(8)]}`` is the way back. Both may cut a dim too:
    ``Part("experts.0.up", unstack=0, dim=1, source_start=64)`` is the second half of expert 0's rows.
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
        unstack: Index in the source's first dim, which the destination lacks. None: they have the same dims.
    """

    name: str
    start: int = 0
    dim: int = 0
    source_start: int = 0
    size: int | None = None
    fill: float | None = None
    stack: int | None = None
    dims: tuple[int, ...] | None = None
    unstack: int | None = None


KeyMap = Mapping[str, "str | Part | Sequence[Part] | None"]
# A function gets the global shapes of all sources by name.
KeyRule = KeyMap | Callable[[Mapping[str, tuple[int, ...]]], KeyMap]
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
    values: Mapping[str, Any] = field(default_factory=dict)  # what is no tensor in a nested state dict
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # of all names of a nested state dict


class TensorMove(NamedTuple):
    """One tensor, or a span of one, and its plan."""

    source: str
    target: str
    plan: ReshardPlan
    unstacked: bool = False  # the plan has a first dim of size 1 that the local destination lacks

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
        targets: Layout and dtype of every tensor that arrives.
        outputs: Layout and dtype of every result: of ``targets`` after the conversions.
        aliases: Destination names tied to another destination, which is moved for both.
        fills: Destination names with elements without a source, and the value of these; None: they stay unchanged.
        conversions: Destination weights that a receiver quantises or dequantises after the moves.
        keys: The resolved ``key_map``, with the parts of scales.
        dropped: Sources that are not moved.
        values: What is no tensor in a nested state dict, by name.
        paths: Keys of each name of a nested state dict, from the outermost mapping on.
    """

    moves: tuple[TensorMove, ...]
    buckets: tuple[tuple[int, ...], ...]
    targets: Mapping[str, tuple[ShardMap, str]]
    outputs: Mapping[str, tuple[ShardMap, str]]
    aliases: Mapping[str, str]
    fills: Mapping[str, float | None] = field(default_factory=dict)
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    keys: KeyMap = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    values: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

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

    @cached_property
    def arrivals(self) -> tuple[tuple[str, ...], ...]:
        """For each bucket the results that are complete when it and the buckets before it have arrived."""
        last = {self.moves[at].target: number for number, bucket in enumerate(self.buckets) for at in bucket}
        quantised = {entry.scale: name for name, entry in self.conversions.items() if entry.quantize}
        complete: list[list[str]] = [[] for _ in self.buckets]
        for name in self.outputs:
            needed = {quantised.get(name, name)}
            needed |= {self.conversions[n].scale for n in needed & self.conversions.keys()} - quantised.keys()
            complete[max(last[self.aliases.get(n, n)] for n in needed)].append(name)
        return tuple(map(tuple, complete))

    @property
    def lower_bound(self) -> int:
        """Minimum bytes for any algorithm."""
        return sum(move.plan.lower_bound for move in self.moves)

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        moves = [(move.source, move.target, move.plan.digest) for move in self.moves]
        conversions = {name: repr(conversion) for name, conversion in self.conversions.items()}
        facts = [moves, self.buckets, dict(self.aliases), dict(self.fills), conversions, sorted(self.dropped)]
        facts.append(repr(self.values))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def lines(self) -> list[str]:
        """One line for each move, for comparison between ranks."""
        return [
            f"{move.source}{f' -> {move.target}' * (move.source != move.target)}: "
            f"{move.plan.dtype} {move.plan.shape} from {move.plan.src.describe()} to "
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
    key_map: KeyRule | None = None,
    bucket_bytes: int = 64 * 2**20,
    to_group: ToGroup | None = None,
    strict: bool = True,
    *,
    casts: str = "exact",
    pairs: Sequence[Pair] = (),
    unexpected: Sequence[str] | None = None,
) -> StateDictPlan:
    """Plan the moves of all tensors from all ranks' metadata, in rank order, or raise the problems of all.

    Pure and equal on every rank. ``unexpected`` are globs of sources that may lack a destination.
    """
    problems: list[Problem] = [p for facts in everyone for p in facts.problems]
    if casts not in ("exact", "values"):
        problems.append(Problem("invalid-argument", "casts", found=repr(casts), hint="'exact' or 'values'"))
    # Sources of all ranks, and the destinations of each.
    sources = _merge("source", [facts.sources for facts in everyone], problems)
    elsewhere = dict.fromkeys(name for facts in everyone for name in facts.elsewhere)
    hint = "src_layouts names tensors of some rank's state_dict"
    problems += [_unknown("src_layouts", name, sources, hint) for name in elsewhere if name not in sources]
    asked = key_map({name: meta.shape for name, meta in sources.items()}) if callable(key_map) else key_map or {}
    hint = "key_map names tensors of the source state dict"
    problems += [_unknown("key_map", name, sources, hint) for name in asked if name not in sources]
    matched, keys = dict[str, Matched](), asked
    if pairs:
        matched = matched_pairs({name: meta[:2] for name, meta in sources.items()}, pairs, problems)
        keys = _with_scales(asked, sources, matched, problems)
        problems += zero_point_problems([name for name in sources if asked.get(name, name) is not None], matched)
    by_target = _routes(sources, keys, problems)
    if unexpected:
        by_target = _expected(by_target, everyone, dst_layouts, unexpected, matched)
    values, paths = _values(everyone, problems) if any(facts.paths for facts in everyone) else ({}, {})
    dropped = frozenset(sources) - {route.source for routes in by_target.values() for route in routes}

    # Layout and dtype of each destination: the caller's, or those of its tensor in `out`.
    shapes = {name: _least_shape(name, sources, by_target[name], problems) for name in sorted(by_target)}
    layouts = {name: given_layout(name, shape, dst_layouts) for name, (shape, _) in shapes.items()}
    by_name = dst_layouts if isinstance(dst_layouts, Mapping) else {}
    where = _Where(everyone, sources, shapes, layouts, by_name, to_group, unexpected is not None)
    if matched:
        where.pair(by_target, matched, problems)
    located = {name for name, layout in layouts.items() if layout is not None} - where.scaled.keys() | where.local
    where.outs = _merge("out", [facts.outs for facts in everyone], problems, located)
    targets, fills = where.targets(by_target, strict, casts, problems)
    outputs = where.outputs(targets) if where.conversions else targets
    if casts == "exact" and dropped:
        unchanged = {name: by_target[name] for name in targets.keys() - where.conversions.keys()}
        problems += _left_out(unchanged, sources, targets, {n for n in dropped if asked.get(n, n) is not None})
    if any(pair.quantize for pair in pairs) and not where.made:
        problems.append(
            Problem(
                "missing-argument",
                "pairs",
                found="quantize=True quantises no weight",
                hint="pass an out= with quantised weights and their scales",
            )
        )
    if strict:
        arrived = by_target.keys() | outputs.keys()
        if where.scaled:  # not what is used up; a scale whose weight has a problem has that problem too
            arrived = (arrived - where.consumed) | where.failed(targets)
        filled = {where.outs[name].tied_to for name in arrived if name in where.outs}
        reason, hint = "a tensor of out= without a source", "pass its source, name it in key_map, or pass strict=False"
        problems += [
            Problem("missing-source", name, found=reason, hint=hint)
            for name, meta in where.outs.items()
            if name not in arrived and meta.tied_to not in filled  # one tied to a filled one is filled with it
        ]
        hint = "dst_layouts names destination tensors; leave it out, or pass strict=False"
        problems += [
            _unknown("dst_layouts", name, shapes, hint)
            for name in by_name
            if name not in shapes and name not in outputs and keys.get(name, name) is not None
        ]
    if problems:
        raise PlanError(condensed(problems))
    order = {name: at for at, name in enumerate(sources)}  # sorted() keeps parts of one source in their order
    routes = sorted(chain.from_iterable(by_target.values()), key=lambda route: order[route.source])
    tied = any(meta.tied_to != name for name, meta in sources.items())
    aliases = _aliases(sources, where.outs, by_target, routes, targets) if tied else {}
    aliases = where.alike(aliases) if where.conversions else aliases
    moves = _moves(sources, routes, aliases, targets, bucket_bytes)
    buckets = _buckets(moves, bucket_bytes)
    return StateDictPlan(
        moves, buckets, targets, outputs, aliases, fills, where.conversions, keys, dropped, values, paths
    )


def _values(everyone: Sequence[RankMeta], problems: list[Problem]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the values beside the tensors of nested state dicts, equal on all ranks that have them, and all paths."""
    values: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for rank, facts in enumerate(everyone):
        paths |= facts.paths
        for name, value in facts.values.items():
            if repr(values.setdefault(name, value)) != repr(value):
                problems.append(
                    Problem(
                        "ranks-disagree",
                        name,
                        found=f"{value!r:.80} on rank {rank}, before: {values[name]!r:.80}",
                        hint="pass equal values, or none",
                    )
                )
    return values, paths


def _routes(sources: Mapping[str, TensorMeta], keys: KeyMap, problems: list[Problem]) -> dict[str, list[Route]]:
    """Return the windows of each destination."""
    by_target: dict[str, list[Route]] = {}
    for name, meta in sources.items():
        entries = keys.get(name, name)
        for entry in [] if entries is None else [entries] if isinstance(entries, str | Part) else list(entries):
            try:
                route = _route(name, meta.shape, Part(entry) if isinstance(entry, str) else entry)
                by_target.setdefault(route.target, []).append(route)
            except PlanError as error:
                problems += error.problems
    return by_target


def _expected(
    by_target: dict[str, list[Route]],
    everyone: Sequence[RankMeta],
    dst_layouts: DstLayouts,
    unexpected: Sequence[str],
    matched: Mapping[str, Matched],
) -> dict[str, list[Route]]:
    """Leave out destinations that no one asked for, of sources that match the globs.

    A scale of ``matched`` stays where its weight does.
    """
    named = {name for facts in everyone for name in facts.outs}
    named |= set(dst_layouts if isinstance(dst_layouts, Mapping) else ())
    if not named and dst_layouts is not None:  # a layout for all, and no `out`: every tensor is asked for
        return by_target
    left_out = {
        name
        for name, routes in by_target.items()
        if name not in named and all(any(fnmatchcase(r.source, glob) for glob in unexpected) for r in routes)
    }
    used = {route.source for name, routes in by_target.items() if name not in left_out for route in routes}
    scales = {entry.scale for weight, entry in matched.items() if weight in used}
    left_out -= {name for name in left_out if any(route.source in scales for route in by_target[name])}
    return {name: routes for name, routes in by_target.items() if name not in left_out}


def _left_out(
    by_target: Mapping[str, Sequence[Route]],
    sources: Mapping[str, TensorMeta],
    targets: Mapping[str, tuple[ShardMap, str]],
    left: Set[str],
) -> list[Problem]:
    """Return the problems of sources that move in their dtype while what stands beside them is ``left`` out."""
    moved = {
        r.source for name, routes in by_target.items() for r in routes if sources[r.source].dtype == targets[name][1]
    }
    return apart_problems(
        {name: meta.dtype for name, meta in sources.items()},
        moved,
        left,
        "a source that unexpected= leaves out",
        f"name its destination in key_map, {{%r: name}}, or None to leave it out; {VALUES}",
    )


def _with_scales(
    keys: KeyMap, sources: Mapping[str, TensorMeta], matched: Mapping[str, Matched], problems: list[Problem]
) -> KeyMap:
    """Return ``key_map`` with entries for scales whose weights have entries: a part of a weight in units of blocks."""
    added: dict[str, Any] = {}
    for name, (pair, scale, block) in matched.items():
        if name not in keys or scale in keys or scale not in sources:
            continue
        entries = keys[name]
        try:
            if entries is None:
                added[scale] = None
                continue
            shape = sources[name].shape
            axes = scale_axes(scale, shape, block, sources[scale].shape)
            parts = [entries] if isinstance(entries, str | Part) else list(entries)
            added[scale] = [_scale_part(name, pair, part, shape, block, axes) for part in parts]
        except PlanError as error:
            problems += [p.named(name) for p in error.problems]
    return {**keys, **added}


def _scale_part(name: str, pair: Pair, entry: str | Part, shape: Index, block: Block, axes: Axes) -> Part:
    """Return the part of a scale that goes with a part of its weight."""
    part = Part(entry) if isinstance(entry, str) else entry
    scale = pair.scale_for(name, part.name)
    if scale is None:
        raise refusal(
            "missing-argument",
            name,
            found=f"{part.name!r} has no scale's name",
            hint=f"name the scale in key_map, or map to a name of the form {pair.weight!r}",
        )
    dim, cut = part.dim % max(1, len(shape)), part.size is not None or part.start or part.source_start
    values = part._replace(name=scale, dim=0, fill=None if part.fill is None else 1.0)
    if cut:
        unit, end = block[dim], part.source_start + (part.size or 0)
        ragged = part.size is not None and end != shape[dim]
        if unit is None or dim not in axes or part.start % unit or part.source_start % unit or (ragged and end % unit):
            raise refusal(
                "does-not-divide",
                name,
                dim,
                found=f"{part!r} in blocks of {block}",
                hint="parts begin and end at blocks: their elements share scales with others",
            )
        size = None if part.size is None else -(-part.size // unit)
        values = values._replace(
            dim=axes.index(dim), start=part.start // unit, source_start=part.source_start // unit, size=size
        )
    plain = axes == tuple(range(len(shape)))
    if (part.dims is not None and not plain) or (part.unstack is not None and (axes[:1] != (0,) or block[0] != 1)):
        raise refusal(
            "conflicting-arguments",
            name,
            found=repr(part),
            hint="name the scale in key_map: it lacks dims of the weight",
        )
    return values


@dataclass
class _Where:
    """Layout and dtype of each destination while a plan is made, and the conversions of pairs.

    Attributes:
        everyone: Metadata by rank.
        sources: Metadata of all sources.
        shapes: By destination, the smallest shape that contains all its parts, and their dtype.
        given: By destination, the layout in ``dst_layouts``; None for a layout by ``out``.
        by_name: Layouts that the caller gives for single names, also of scales.
        to_group: See `resolve_layout`.
        of_files: True if the sources are files.
        outs: Metadata of the tensors to fill.
        conversions: By destination weight.
        scaled: By destination scale, its weight.
        local: Scales of ``out`` that are shards, without a layout of their own.
        resolved: Layouts; large models have many tensors and few of them, which are then planned once.
    """

    everyone: Sequence[RankMeta]
    sources: Mapping[str, TensorMeta]
    shapes: Mapping[str, tuple[Index, str]]
    given: Mapping[str, LayoutLike | None]
    by_name: Mapping[str, LayoutLike]
    to_group: ToGroup | None
    of_files: bool
    outs: Mapping[str, TensorMeta] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    scaled: dict[str, Scaled] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    resolved: dict[object, ShardMap] = field(default_factory=dict)

    @property
    def consumed(self) -> set[str]:
        """Names that arrive, but are no result: scales of dequantised weights."""
        return {entry.scale for entry in self.conversions.values() if not entry.quantize}

    @property
    def made(self) -> set[str]:
        """Names that are results, but do not arrive: scales of quantised weights."""
        return {entry.scale for entry in self.conversions.values() if entry.quantize}

    def outputs(self, targets: Mapping[str, tuple[ShardMap, str]]) -> dict[str, tuple[ShardMap, str]]:
        """Return layout and dtype of every result."""
        outputs = {name: entry for name, entry in targets.items() if name not in self.consumed}
        for name, entry in self.conversions.items():
            outputs[name] = entry.layout, entry.dtype
            if entry.quantize:
                outputs[entry.scale] = entry.scale_layout, entry.scale_dtype
        return dict(sorted(outputs.items()))

    def pair(
        self, by_target: Mapping[str, Sequence[Route]], matched: Mapping[str, Matched], problems: list[Problem]
    ) -> None:
        """Find the pairs of destinations, and merge the metadata of ``out``."""
        targets_of = by_key((route.source, name) for name, routes in by_target.items() for route in routes)
        for name, routes in by_target.items():
            pairs = {(matched[r.source][0], r.dst_block(matched[r.source][2])) for r in routes if r.source in matched}
            if not pairs or any(route.source not in matched for route in routes):
                continue
            (pair, block), *others = pairs
            own = matched[routes[0].source].scale
            has_scale = own in self.sources
            scales, places = targets_of.get(own, []), targets_of[routes[0].source]
            alike = scales[places.index(name)] if len(scales) == len(places) else None  # parts in one order
            wanted = [alike, pair.scale_for(routes[0].source, name)] if has_scale else [pair.scale_of(name) or own]
            scale = next((s for s in wanted if s is not None and (s in self.shapes or not has_scale)), None)
            if scale is None:  # left out by key_map: a cast of the weight is refused
                continue
            if others:
                problems.append(
                    Problem(
                        "conflicting-arguments",
                        name,
                        found=f"parts with blocks {sorted(str(b) for _, b in pairs)}",
                        hint="one block for a destination",
                    )
                )
            elif scale in self.scaled:
                problems.append(
                    Problem(
                        "duplicate-name",
                        name,
                        found=f"{scale} is the scale of {self.scaled[scale].weight} too",
                        hint="one scale for each weight",
                    )
                )
            else:
                self.scaled[scale] = Scaled(name, pair, block, has_scale)
        for scale, entry in self.scaled.items():
            # A plain scale of another size than the full one is the shard that goes with a shard of the weight.
            grid = prod(grid_of(self.shapes[entry.weight][0], entry.block))
            if any(scale in facts.outs and prod(facts.outs[scale].shape) != grid for facts in self.everyone):
                self.local.add(scale)

    def targets(
        self, by_target: Mapping[str, Sequence[Route]], strict: bool, casts: str, problems: list[Problem]
    ) -> tuple[dict[str, tuple[ShardMap, str]], dict[str, float | None]]:
        """Return layout and dtype of what arrives by name, and the values of elements without a source."""
        targets: dict[str, tuple[ShardMap, str]] = {}
        fills: dict[str, float | None] = {}
        scales: Scales | None = None  # few state dicts are cast
        by_weight = {entry.weight: scale for scale, entry in self.scaled.items()}
        for name in sorted(self.shapes, key=lambda name: (name in self.scaled, name)):  # scales follow their weights
            try:
                if name in self.scaled:
                    targets[name] = self._scale_target(name, targets)
                else:
                    targets[name] = self._target(name, by_target[name][0].source, by_weight.get(name))
                out, (layout, dtype) = self.outs.get(name), targets[name]
                source = self.sources[by_target[name][0].source].dtype
                is_cast = name not in self.conversions and name not in self.scaled
                if casts == "exact" and out is not None and source != dtype and is_cast:
                    scales = scales or Scales([*self.sources, *self.outs])
                    problem = cast_problem(by_target[name][0].source, source, dtype, scales, name)
                    problems += [] if problem is None else [problem]
                routes = by_target[name]
                if len(routes) > 1 or layout.shape != routes[0].shape:
                    _fill(name, layout, routes, self.everyone, strict, fills)
            except PlanError as error:
                problems += [p.named(name) for p in error.problems]
        return dict(sorted(targets.items())), fills

    def alike(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Return the ties that hold after the conversions: one weight with two scales is two tensors."""
        changed = self.conversions.keys()
        ties = {name: first for name, first in aliases.items() if (name in changed) == (first in changed)}
        for name, entry in self.conversions.items():
            first = self.conversions.get(aliases.get(name, ""))
            if first is None or entry.quantize or aliases.get(entry.scale) != first.scale:
                ties.pop(name, None)
        return ties

    def failed(self, targets: Collection[str]) -> set[str]:
        """Return scales whose weights have a problem: that problem is theirs too."""
        return {scale for scale, entry in self.scaled.items() if entry.weight not in targets}

    def _target(self, name: str, source: str, scale: str | None) -> tuple[ShardMap, str]:
        """Return layout and dtype of a tensor that is no scale; of a weight of a pair, with its conversion."""
        (shape, dtype), out = self.shapes[name], self.outs.get(name)
        wanted = self.given[name]
        key = id(wanted), id(out.layout) if out is not None and wanted is None else 0, shape
        if key not in self.resolved:
            own = None if out is None else out.layout
            if wanted is None and own is None:
                raise PlanError(self._no_layout(name, source))
            self.resolved[key] = own if wanted is None and own else resolve_layout(wanted, shape, self.to_group)
        layout = self.resolved[key]
        if out is not None and len(out.shape) == len(shape) - 1 and shape[0] == 1:
            raise refusal(
                "shape-mismatch",
                name,
                found=f"{source} arrives as {shape}, the tensor of out= has {len(out.shape)} dims",
                hint="for one index of the first dim write Part(..., unstack=index)",
            )
        final = dtype if out is None else out.dtype
        if scale is None:
            return layout, final
        entry = self.scaled[scale]
        block, pair = entry.block, entry.pair
        if entry.has_scale and pair.dequantize:
            if out is None and pair.dequantize is True:
                raise refusal(
                    "missing-argument",
                    name,
                    found="no dtype to dequantize to",
                    hint="Pair(..., dequantize=torch.bfloat16), or pass out=",
                )
            into = final if pair.dequantize is True else dtype_name(pair.dequantize)
            if into != final and out is not None:
                raise refusal(
                    "dtype-mismatch",
                    name,
                    found=f"{into}, out is of {final}",
                    hint="pass dequantize=True for the dtype of out",
                )
            (scale_shape, scale_dtype) = self.shapes[scale]
            axes = scale_axes(scale, shape, block, scale_shape)
            raise_problems(filter(None, [convertible(name, dtype, into)]))
            scaled = self._derived("scale", scale, layout, block, axes)
            self.conversions[name] = Conversion(scale, False, block, axes, layout, into, scaled, scale_dtype)
            return layout, dtype
        held = self.outs.get(scale)
        if not entry.has_scale and held is not None and final in QUANTISED:
            raise_problems(filter(None, [convertible(name, dtype, final)]))
            axes = axes_by_dims(scale, shape, block, len(held.shape))
            derived = self._derived("scale", scale, layout, block, axes)
            scaled = self._checked(scale, derived)
            if any(scaled.local_shapes(rank) != derived.local_shapes(rank) for rank in layout.ranks):
                raise refusal(
                    "layout-mismatch",
                    scale,
                    found=f"{scaled.describe()}; a receiver makes the scales of its own part of the weight",
                    hint="pass a local scale for a local weight, or leave out its layout",
                )
            self.conversions[name] = Conversion(scale, True, block, axes, layout, final, scaled, held.dtype)
            return self._derived("grown", name, layout, block, ()), dtype
        return layout, final

    def _no_layout(self, name: str, source: str) -> Problem:
        """Return the problem of a destination without a layout; of the scale of a quantised weight names the Pair."""
        if (weight := weight_beside(source, self.sources)) is not None:
            return Problem(
                "missing-argument",
                name,
                found=f"the scale of {weight}",
                hint=f"move it with its weight: pairs=Pair({weight!r}, {source!r}, block)",
            )
        hint = "name it in dst_layouts, pass an out= that has it, or leave it out: key_map={name: None}"
        if self.of_files:
            hint += ", or unexpected='ignore'; experts in files and a model of transformers: hf_key_map(model)"
        return Problem("missing-argument", name, found="no destination layout", hint=hint)

    def _scale_target(self, name: str, targets: Mapping[str, tuple[ShardMap, str]]) -> tuple[ShardMap, str]:
        """Return layout and dtype of the scale of a pair."""
        entry, (shape, dtype), out = self.scaled[name], self.shapes[name], self.outs.get(name)
        if name in self.consumed:
            return self.conversions[entry.weight].scale_layout, dtype
        if entry.weight not in targets:
            raise refusal(
                "missing-argument",
                name,
                found=f"its weight {entry.weight} has no destination",
                hint="see the problem of the weight",
            )
        layout, _ = targets[entry.weight]
        axes = scale_axes(name, layout.shape, entry.block, shape)
        derived = self._checked(name, self._derived("scale", name, layout, entry.block, axes))
        return derived, dtype if out is None else out.dtype

    def _derived(self, kind: str, name: str, layout: ShardMap, block: Block, axes: Axes) -> ShardMap:
        key = kind, id(layout), block, axes
        if key not in self.resolved:
            layout = grown_layout(name, layout, block) if kind == "grown" else scale_layout(name, layout, block, axes)
            self.resolved[key] = layout
        return self.resolved[key]

    def _checked(self, name: str, derived: ShardMap) -> ShardMap:
        """Return a scale's layout: the given one, if it has all that the weight needs, else the derived one."""
        out = self.outs.get(name)
        wanted = self.by_name.get(name)
        own = None if out is None or name in self.local else out.layout
        if wanted is None and own is None:
            return derived
        layout = resolve_layout(wanted, derived.shape, self.to_group) if wanted is not None else own
        assert layout is not None
        if layout.shape != derived.shape or not holds(layout, derived):
            raise refusal(
                "layout-mismatch",
                name,
                found=f"{layout.describe()} lacks scales of the weight on some rank",
                hint="leave out its layout",
            )
        return layout


def _moves(
    sources: Mapping[str, TensorMeta],
    routes: Sequence[Route],
    aliases: Mapping[str, str],
    targets: Mapping[str, tuple[ShardMap, str]],
    bucket_bytes: int,
) -> tuple[TensorMove, ...]:
    """Return the moves of tied tensors once, with equal plans as one object."""
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
            assert src is not None  # `_merge` gives every source a layout
            if src.shape != route.shape or route.dims is not None:
                src = ShardMapView(src, route.source_start, route.shape, route.dims)
            if route.unstacked:
                layout = ShardMapView(layout, route.start, route.shape, (None, *range(len(layout.shape))))
            elif layout.shape != route.shape:
                layout = ShardMapView(layout, route.start, route.shape)
            plans[same] = make_plan(src, layout, meta.dtype, dtype, bucket_bytes=bucket_bytes)
        moves.append(TensorMove(route.source, route.target, plans[same], route.unstacked))
    return tuple(moves)


@_collections_paused()
def in_layouts(
    plan: StateDictPlan,
    bucket_bytes: int,
    sources: Mapping[str, ShardMap] = MappingProxyType({}),
    targets: Mapping[str, ShardMap] = MappingProxyType({}),
) -> StateDictPlan:
    """Return the same moves out of other layouts of ``sources``, or into other layouts of ``targets``.

    A load has the readers of a file for its sources, and a save the writers for its targets; both follow from a first
    plan, with one rank in their place.
    """
    plans: dict[object, ReshardPlan] = {}
    moves = []
    for move in plan.moves:
        before, new_src, new_dst = move.plan, sources.get(move.source), targets.get(move.target)
        same = id(before), id(new_src), id(new_dst)
        if same not in plans:
            src, dst = new_src or before.src, new_dst or before.dst
            if new_src is not None and isinstance(before.src, ShardMapView):
                src = before.src.of(new_src)
            if new_dst is not None and isinstance(before.dst, ShardMapView):
                dst = before.dst.of(new_dst)
            plans[same] = make_plan(src, dst, before.dtype, before.out_dtype, bucket_bytes=bucket_bytes)
        moves.append(move._replace(plan=plans[same]))
    arriving = plan.targets
    if targets:
        arriving = {name: (targets.get(name, layout), dtype) for name, (layout, dtype) in arriving.items()}
    outputs = arriving if plan.outputs is plan.targets else plan.outputs
    return replace(plan, moves=tuple(moves), buckets=_buckets(moves, bucket_bytes), targets=arriving, outputs=outputs)


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
                problems.append(
                    Problem(
                        "ranks-disagree",
                        f"{side} {name}",
                        found=f"rank {rank}: {kind} of {entry.shape} {entry.dtype}, "
                        f"before: {first.shape} {first.dtype}",
                        hint="shape, dtype and kind of a tensor are the same on every rank",
                    )
                )
                break
        else:
            joined = _joined_layout(by_rank)
            layout = alike.setdefault(joined, joined)
            if layout is None and side == "out":
                problems.append(
                    Problem(
                        "ranks-disagree",
                        f"out {name}",
                        found=f"the layouts {', '.join(sorted({repr(entry.layout) for entry in by_rank.values()}))}",
                        hint="give one layout for all ranks in dst_layouts",
                    )
                )
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
    unstacked: bool = False  # the shape has a first dim of size 1 that the destination lacks

    def dst_block(self, block: Block) -> Block:
        """Return a block of the source with the destination's dims."""
        dims = range(len(block)) if self.dims is None else self.dims
        turned = tuple(1 if dim is None else block[dim] for dim in dims)
        return turned[1:] if self.unstacked else turned


def _route(name: str, shape: Index, part: Part) -> Route:
    reason, zero = f"{part!r} for a tensor of shape {shape}", (0,) * len(shape)
    order = tuple(range(len(shape))) if part.dims is None else tuple(part.dims)
    if sorted(order) != list(range(len(shape))):
        raise refusal("invalid-argument", name, found=reason, hint="dims names each dim of the source once")
    start, source_start, sizes = list(zero), list(zero), list(shape)
    if shape:
        if not -len(shape) <= part.dim < len(shape):
            raise refusal("dim-out-of-range", name, part.dim, found=reason, hint="correct key_map")
        dim = part.dim % len(shape)
        start[dim], source_start[dim] = part.start, part.source_start
        sizes[dim] = shape[dim] - part.source_start if part.size is None else part.size
        if min(sizes[dim], part.start, part.source_start) < 0 or part.source_start + sizes[dim] > shape[dim]:
            raise refusal("box-out-of-range", name, dim, found=reason, hint="correct key_map")
    if part.unstack is not None:
        if part.stack is not None or part.dims is not None or (shape and dim == 0 and sizes[0] != shape[0]):
            raise refusal(
                "conflicting-arguments",
                name,
                found=reason,
                hint="unstack takes the source's first dim: leave out stack, dims, and a window of dim 0",
            )
        if not shape or not 0 <= part.unstack < shape[0] or (dim == 0 and part.start):
            raise refusal("box-out-of-range", name, 0, found=reason, hint="correct key_map")
        source_start[0], sizes[0] = part.unstack, 1
        ends = tuple(map(add, start[1:], sizes[1:]))
        return Route(name, part.name, tuple(source_start), tuple(start[1:]), tuple(sizes), None, part.fill, ends, True)
    dims: Dims = order if part.stack is None else (None, *order)
    if part.stack is not None and part.stack < 0:
        raise refusal("box-out-of-range", name, found=reason, hint="stack is counted from 0")
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
        problems.append(
            Problem("ranks-disagree", name, found=", ".join(sorted(dtypes)), hint="parts of one tensor have one dtype")
        )
    if len({len(route.stop) for route in routes}) > 1:
        reason = ", ".join(f"{route.source} {route.shape}" for route in routes)
        problems.append(
            Problem("ranks-disagree", name, found=reason, hint="parts of one tensor have its number of dims")
        )
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
        if len(route.stop) != len(layout.shape) or any(a > b for a, b in zip(route.stop, layout.shape, strict=True)):
            reason = f"{route.source} arrives as {route.shape} at {route.start}, the destination is of {layout.shape}"
            hint = "pass a destination of that shape, or a Part of the source in key_map"
            if len(route.stop) == len(layout.shape) + 1 and route.shape[0] == 1:
                hint = f"for one index of the first dim write Part(..., unstack={route.source_start[0]})"
            raise refusal("shape-mismatch", name, found=reason, hint=hint)
    values = sorted({route.fill for route in routes if route.fill is not None})
    if len(values) > 1:
        raise refusal(
            "conflicting-arguments",
            name,
            found=f"fill of {', '.join(map(str, values))}",
            hint="give one value for a destination",
        )
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
    else:
        raise_problems(problems)


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
    by_source = by_key((route.source, route) for route in routes)
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
