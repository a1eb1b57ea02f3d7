"""The planning of state dicts: what all ranks know of their tensors becomes one list of moves."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from difflib import get_close_matches

from shard_spec import Layout, MeshSpec

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.base import ShardMap
from shard_reshard.layout.boxes import BoxShardMap
from shard_reshard.layout.dtypes import ITEMSIZES
from shard_reshard.layout.mesh import MeshShardMap
from shard_reshard.layout.parse import LayoutLike, ToGroup, layout_value, resolve_layout
from shard_reshard.layout.view import ShardMapView
from shard_reshard.planning.analyze import ReshardPlan
from shard_reshard.planning.planner import make_plan
from shard_reshard.state_dict.plan import DstLayouts, KeyMap, Part, RankMeta, StateDictPlan, TensorMeta, TensorMove


@contextmanager
def _collections_paused() -> Iterator[None]:
    # A plan of a large model is a million objects that all stay: each full collection on the way would visit every
    # object of the process, for 40 % of the planning time, and free nothing.
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
    """Plan the moves of all tensors from what all ranks know, in rank order. Pure, the same answer on every rank.

    Raises:
        PlanError: With the problems of all tensors.
    """
    problems: list[Problem] = [p for facts in everyone for p in facts.problems]
    sources = _merge("source", [facts.sources for facts in everyone], problems)
    parts = _parts(sources, key_map or {}, problems)
    shapes = _target_shapes(sources, parts, problems)
    given = {name: given_layout(name, shape, dst_layouts) for name, (shape, _) in shapes.items()}
    located = {name for name, layout in given.items() if layout is not None}
    outs = _merge("out", [facts.outs for facts in everyone], problems, located)
    targets: dict[str, tuple[ShardMap, str]] = {}
    # Large models have many tensors and few layouts: what is equal is resolved, planned and scheduled once.
    resolved: dict[object, ShardMap] = {}
    for name, (shape, dtype) in shapes.items():
        out, wanted = outs.get(name), given[name]
        key = id(wanted), id(out.layout) if out is not None and wanted is None else 0, shape
        try:
            if key not in resolved:
                resolved[key] = _dst_layout(name, shape, wanted, out, to_group)
            targets[name] = resolved[key], dtype if out is None else out.dtype
        except PlanError as error:
            problems += [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    if strict:
        problems += _unfilled(outs, targets)
        problems += _unknown_layouts(dst_layouts, shapes, key_map or {})
    if problems:
        raise PlanError(dict.fromkeys(problems))
    aliases = _aliases(sources, outs, parts, targets)
    plans: dict[object, ReshardPlan] = {}
    moves = []
    for source, part in parts:
        if part.name in aliases:
            continue
        layout, dtype = targets[part.name]
        known = sources[source]
        same = id(known.layout), known.dtype, part[1:], id(layout), dtype
        if same not in plans:
            plans[same] = _plan_of_move(known, part, targets[part.name], bucket_bytes)
        moves.append(TensorMove(source, part.name, plans[same]))
    tied = _tied_apart([names for facts in everyone for names in facts.shared], targets, aliases)
    return StateDictPlan(tuple(moves), _buckets(moves, bucket_bytes), targets, aliases, tied)


def _merge(
    side: str, tables: Sequence[Mapping[str, TensorMeta]], problems: list[Problem], located: Set[str] = frozenset()
) -> dict[str, TensorMeta]:
    """One entry for each name, whose layout has the ranks of all.

    Plain tensors among ``located`` are shards of a layout that the caller gives, each of its own shape.
    """
    merged: dict[str, TensorMeta] = {}
    times = Counter(name for table in tables for name in table)
    several: dict[str, dict[int, TensorMeta]] = {}
    alike: dict[ShardMap | None, ShardMap | None] = {}  # equal layouts as one object
    for rank, table in enumerate(tables):
        for name, known in table.items():
            if times[name] == 1 and known.layout:
                merged[name] = known
            else:
                several.setdefault(name, {})[rank] = known
    for name, by_rank in sorted(several.items()):
        first = next(iter(by_rank.values()))
        for rank, known in by_rank.items():
            if name in located and known.layout is first.layout is None and known.dtype == first.dtype:
                continue
            if known[:2] != first[:2] or (known.layout is None) != (first.layout is None):
                kind = "a plain tensor" if known.layout is None else "a sharded tensor"
                found = f"rank {rank}: {kind} of {known.shape} {known.dtype}, before: {first.shape} {first.dtype}"
                hint = "shape, dtype and kind of a tensor are the same on every rank"
                problems.append(Problem("ranks-disagree", f"{side} {name}", found=found, hint=hint))
                break
        else:
            joined = _joined_layout(by_rank)
            layout = alike.setdefault(joined, joined)
            if layout is None and side == "out":
                found = f"the layouts {', '.join(sorted({repr(known.layout) for known in by_rank.values()}))}"
                hint = "give one layout for all ranks in dst_layouts"
                problems.append(Problem("ranks-disagree", f"out {name}", found=found, hint=hint))
            tied = {known.tied_to for known in by_rank.values() if known.tied_to}
            merged[name] = first._replace(layout=layout or first.layout, tied_to=tied.pop() if len(tied) == 1 else name)
    return dict(sorted(merged.items()))


def _joined_layout(by_rank: Mapping[int, TensorMeta]) -> ShardMap | None:
    """The layout of all ranks: one that all name; or several of one make on separate ranks, as replicas; else None."""
    first = next(iter(by_rank.values()))
    layouts = list(dict.fromkeys(known.layout for known in by_rank.values()))
    if layouts == [None]:  # plain tensors: full on each rank that has one
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


def _parts(sources: Mapping[str, TensorMeta], key_map: KeyMap, problems: list[Problem]) -> list[tuple[str, Part]]:
    """Return the destination of every source, with dims counted from the front and sizes filled in."""
    parts: list[tuple[str, Part]] = []
    for name in key_map:
        if name not in sources:
            problems.append(_unknown("key_map", name, sources, "key_map names tensors of the source state dict"))
    for name, known in sources.items():
        given = key_map.get(name, name)
        listed = [] if given is None else [given] if isinstance(given, str | Part) else list(given)
        for entry in listed:
            if isinstance(entry, str):
                parts.append((name, Part(entry, size=known.shape[0] if known.shape else None)))
                continue
            part = entry
            ndim = len(known.shape)
            if not ndim:
                parts.append((name, Part(part.name)))
                continue
            if not -ndim <= part.dim < ndim:
                found = f"{part!r} for a tensor of shape {known.shape}"
                problems.append(Problem("dim-out-of-range", name, part.dim, found=found, hint="correct key_map"))
                continue
            dim = part.dim % ndim
            size = known.shape[dim] - part.source_start if part.size is None else part.size
            if size < 0 or part.start < 0 or part.source_start < 0 or part.source_start + size > known.shape[dim]:
                found = f"{part!r} for a tensor of shape {known.shape}"
                problems.append(Problem("box-out-of-range", name, dim, found=found, hint="correct key_map"))
                continue
            parts.append((name, Part(part.name, part.start, dim, part.source_start, size)))
    return parts


def _target_shapes(
    sources: Mapping[str, TensorMeta], parts: list[tuple[str, Part]], problems: list[Problem]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every destination; its parts have to tile it."""
    times = Counter(part.name for _, part in parts)
    by_name: dict[str, list[tuple[str, Part]]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for source, part in parts:
        known = sources[source]
        if times[part.name] == 1 and not part.start and (not known.shape or part.size == known.shape[part.dim]):
            shapes[part.name] = known.shape, known.dtype
        else:
            by_name.setdefault(part.name, []).append((source, part))
    for name, found in sorted(by_name.items()):
        first = sources[found[0][0]]
        dim = found[0][1].dim
        end, rests = 0, set()
        for source, part in sorted(found, key=lambda entry: entry[1].start):
            known = sources[source]
            rests.add((known.shape[:dim], known.shape[dim + 1 :], part.dim))
            if part.start != end:
                what = "overlaps the part before it" if part.start < end else f"leaves {end}..{part.start} empty"
                hint = "the parts of a tensor follow each other without gaps"
                problems.append(Problem("boxes-incomplete", name, dim, found=f"{source} {what}", hint=hint))
            end = part.start + (part.size or 0)
        if len(rests) > 1:
            hint = "parts of one tensor differ along one dim only"
            listed = ", ".join(f"{source} {sources[source].shape}" for source, _ in found)
            problems.append(Problem("ranks-disagree", name, dim, found=listed, hint=hint))
        dtypes = {sources[source].dtype for source, _ in found}
        if len(dtypes) > 1:
            hint = "parts of one tensor have one dtype"
            problems.append(Problem("ranks-disagree", name, found=", ".join(sorted(dtypes)), hint=hint))
        shape = (*first.shape[:dim], end, *first.shape[dim + 1 :]) if first.shape else ()
        shapes[name] = shape, first.dtype
    return dict(sorted(shapes.items()))


def _dst_layout(
    name: str, shape: tuple[int, ...], layout: LayoutLike | None, out: TensorMeta | None, to_group: ToGroup | None
) -> ShardMap:
    if layout is None and out is not None:
        assert out.layout is not None  # merged
        return out.layout
    if layout is None:
        hint = "name it in dst_layouts, or pass an out= that has it"
        raise PlanError(Problem("missing-argument", name, found="no destination layout", hint=hint))
    return resolve_layout(layout, shape, to_group)


class LayoutAnswers:
    """A caller's function of layouts, asked once for each tensor: planning and results go by the same answers."""

    def __init__(self, function: Callable[[str, tuple[int, ...]], LayoutLike]) -> None:
        self.function = function
        self.answers: dict[tuple[str, tuple[int, ...]], LayoutLike] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> LayoutLike:
        if (name, shape) not in self.answers:
            self.answers[name, shape] = self.function(name, shape)
        return self.answers[name, shape]

    def hold(self) -> bool:
        """Return True if the function answers as it did; answers that are no plain values may differ unseen."""
        known = {asked: layout_value(answer) for asked, answer in self.answers.items()}
        return None not in known.values() and all(
            layout_value(self.function(*asked)) == answer for asked, answer in known.items()
        )


def kept_layouts(dst_layouts: DstLayouts) -> DstLayouts:
    """Return layouts that a caller's later changes do not reach."""
    if isinstance(dst_layouts, Mapping):
        return dict(dst_layouts)
    return LayoutAnswers(dst_layouts) if callable(dst_layouts) else dst_layouts


def given_layout(name: str, shape: tuple[int, ...], dst_layouts: DstLayouts) -> LayoutLike | None:
    """Return the layout of one tensor in ``dst_layouts``."""
    if isinstance(dst_layouts, Mapping):
        return dst_layouts.get(name)
    return dst_layouts(name, shape) if callable(dst_layouts) else dst_layouts


def _unfilled(outs: Mapping[str, TensorMeta], targets: Mapping[str, object]) -> list[Problem]:
    """Destination tensors that keep what they had; one that is tied to a filled one is filled with it."""
    filled = {outs[name].tied_to for name in targets if name in outs}
    hint = "pass its source, name it in key_map, or pass strict=False"
    return [
        Problem("missing-source", name, found="a tensor of out that nothing fills", hint=hint)
        for name, known in outs.items()
        if name not in targets and known.tied_to not in filled
    ]


def _unknown_layouts(dst_layouts: DstLayouts, shapes: Collection[str], key_map: KeyMap) -> list[Problem]:
    """Names of ``dst_layouts`` that no tensor arrives under; those of tensors that ``key_map`` leaves out are none."""
    hint = "dst_layouts names destination tensors; leave it out, or pass strict=False"
    names = [name for name in dst_layouts if name not in shapes] if isinstance(dst_layouts, Mapping) else []
    return [_unknown("dst_layouts", name, shapes, hint) for name in names if key_map.get(name, name) is not None]


def _unknown(argument: str, name: object, names: Collection[str], hint: str) -> Problem:
    near = get_close_matches(str(name), names, n=1)
    return Problem(
        "unknown-name", argument, found=repr(name), hint=f"did you mean {near[0]!r}? {hint}" if near else hint
    )


def _aliases(
    sources: Mapping[str, TensorMeta],
    outs: Mapping[str, TensorMeta],
    parts: list[tuple[str, Part]],
    targets: Mapping[str, tuple[ShardMap, str]],
) -> dict[str, str]:
    """Tied tensors that move once: one memory at the source, one at the destination, one layout."""
    whole = dict(parts)
    num_parts = Counter(source for source, _ in parts)
    times = Counter(part.name for _, part in parts)
    aliases: dict[str, str] = {}
    for source, known in sources.items():
        first = known.tied_to
        if first == source or first not in whole or source not in whole or num_parts[source] + num_parts[first] > 2:
            continue
        part, first_part = whole[source], whole[first]
        if part[1:] != first_part[1:]:  # other stretches of the one tensor
            continue
        target, first_target = part.name, first_part.name
        simple = times[target] == 1 and times[first_target] == 1 and target != first_target
        outs_tied = target not in outs or outs[target].tied_to == outs[first_target].tied_to
        if simple and outs_tied and targets[target] == targets[first_target]:
            aliases[target] = first_target
    return aliases


def _tied_apart(
    shared: Sequence[Sequence[str]], targets: Collection[str], aliases: Mapping[str, str]
) -> frozenset[str]:
    """Destinations that are one memory on some rank, and are moved one by one."""
    groups = [[name for name in names if name in targets] for names in shared]
    return frozenset(name for names in groups if len({aliases.get(name, name) for name in names}) > 1 for name in names)


def _plan_of_move(known: TensorMeta, part: Part, target: tuple[ShardMap, str], bucket_bytes: int) -> ReshardPlan:
    layout, dtype = target
    src = known.layout
    assert src is not None  # merged
    if known.shape:
        window = (*known.shape[: part.dim], part.size or 0, *known.shape[part.dim + 1 :])
        src = _window(src, part.dim, part.source_start, window)
        layout = _window(layout, part.dim, part.start, window)
    itemsize = max(ITEMSIZES[known.dtype], ITEMSIZES[dtype])
    limit = bucket_bytes if (src.largest + layout.largest) * itemsize > bucket_bytes else None
    return make_plan(src, layout, known.dtype, dtype, limit)


def _window(layout: ShardMap, dim: int, start: int, shape: tuple[int, ...]) -> ShardMap:
    if layout.shape == shape:
        return layout
    return ShardMapView(layout, tuple(start if at == dim else 0 for at in range(len(shape))), shape)


def _buckets(moves: Sequence[TensorMove], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Moves that share a collective: neighbours in the list, until the buffers of some rank are large enough."""
    buckets: list[list[int]] = []
    loads: dict[int, tuple[int, dict[int, int]]] = {}
    everywhere, on_rank, most = bucket_bytes + 1, dict[int, int](), 0  # no bucket to go on with
    for at, move in enumerate(moves):
        plan = move.plan
        if plan.max_workspace_bytes is not None:
            buckets.append([at])
            everywhere, on_rank, most = bucket_bytes + 1, {}, 0
            continue
        if id(plan) not in loads:
            loads[id(plan)] = _loads(plan)
        shared, single = loads[id(plan)]
        highest = max([most, *(on_rank.get(rank, 0) + size for rank, size in single.items())])
        if not buckets or everywhere + shared + highest > bucket_bytes:
            buckets.append([])
            everywhere, on_rank, highest = 0, {}, max(single.values(), default=0)
        buckets[-1].append(at)
        everywhere, most = everywhere + shared, highest
        for rank, size in single.items():
            on_rank[rank] = on_rank.get(rank, 0) + size
    return tuple(map(tuple, buckets))


_FEW_RANKS = 32  # beyond that a layout counts as one of all ranks


def _loads(plan: ReshardPlan) -> tuple[int, dict[int, int]]:
    """Return the buffer bytes of a move: on every rank, and on ranks of their own."""
    shared, single = 0, dict[int, int]()
    for side in (plan.src, plan.dst):
        size = side.largest * plan.itemsize
        if len(side.ranks) > _FEW_RANKS:
            shared += size
        else:
            for rank in side.ranks:
                single[rank] = single.get(rank, 0) + size
    return shared, single
