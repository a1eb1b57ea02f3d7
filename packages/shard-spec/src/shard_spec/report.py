"""Explanations of a plan, and of differences between two plans: in words, and as a page.

Readers need no knowledge of this package. Plans differ by rule and, with a model, by tensor. The self-contained page
shows the shards of each rank, the memory of each rank, and the bytes of a step.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from torch import nn

from shard_spec._shared.page import human_bytes, page_parts
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.communication import Communication
from shard_spec.estimate.memory import PARTS, STEP_PARTS, Memory, memory_of
from shard_spec.formatting import Table, human_count, human_ranks
from shard_spec.plan.content import PlanContent, Rule, pattern_of
from shard_spec.plan.resolve import ModelMetadata, Resolution, TensorMetadata, examine, resolve


def explain(plan: PlanContent, name: str | None = None, module: nn.Module | ModelMetadata | None = None) -> str:
    """Explain the plan, or one tensor of it, in words; see ``ShardingPlan.explain``."""
    if module is not None:
        resolution = examine(plan, module)
        if name is not None:
            return _explain_tensor(resolution, name)
        lines = [
            f"mesh: {resolution.mesh}",
            str(tensor_table(resolution)),
            *(f"tied: {' = '.join(names)}" for names in resolution.tied),
        ]
        return "\n".join([*lines, *_outputs(plan), *_problem_lines(resolution.problems)])
    rest = "a problem (strict)" if plan.strict else "replicated"
    if name is None:
        lines = [f"mesh: {plan.mesh if plan.mesh else 'not stated'}"]
        lines.append(str(Table(["rule", "gives"], [[rule.key, _value_text(rule)] for rule in plan.rules])))
        lines += [*_outputs(plan), f"parameters that no rule mentions: {rest}"]
        return "\n".join(lines + _problem_lines(plan.problems))
    matching = [rule for rule in plan.rules if rule.pattern is not None and rule.pattern.matches(name)]
    if not matching:
        return f"{name}: no rule mentions it, so it is {rest}"
    lines = [
        f"{name}: matched by",
        *(f"  {rule.key!r}: {_value_text(rule)}" for rule in matching),
        *(["an exact name decides; globs have to agree"] if len(matching) > 1 else []),
    ]
    return "\n".join(lines)


def alike(found: Resolution) -> dict[tuple[str, str, str, str], list[TensorMetadata]]:
    """Group tensors by pattern of FQN (without numbers), layout, shape and rule, as text."""
    groups: dict[tuple[str, str, str, str], list[TensorMetadata]] = {}
    for tensor in found.metadata.tensors:
        layout = found.layouts.get(tensor.name)
        if tensor.kind == "buffer" and (layout is None or layout.is_replicated):  # the default needs no row
            continue
        layout_text = str(layout) if layout is not None else "by its Sharder"
        key = pattern_of(tensor.name), layout_text, str(list(tensor.shape)), found.rule_of.get(tensor.name, "")
        groups.setdefault(key, []).append(tensor)
    return {(key[0] if len(tensors) > 1 else tensors[0].name, *key[1:]): tensors for key, tensors in groups.items()}


def tensor_table(found: Resolution) -> Table:
    """Return a table with one row for each group of equal layouts."""
    rows = []
    for (name, text, shape, rule), tensors in alike(found).items():
        layout, local = found.layouts.get(tensors[0].name), ["?"]
        if layout is not None:
            ends = (layout.mesh.ranks[0], layout.mesh.ranks[-1])
            local = list(dict.fromkeys(str(list(layout.local_shape(rank, tensors[0].shape))) for rank in ends))
        rows.append([name, str(len(tensors)), shape, text, " .. ".join(local), rule or "-"])
    return Table(["tensor", "count", "global shape", "layout", "local shape", "rule"], rows, (1,))


def _explain_tensor(found: Resolution, name: str) -> str:
    try:
        tensor = found.tensor(name)
    except KeyError:
        names = [alias for tensor in found.metadata.tensors for alias in tensor.aliases]
        hint = near_names(name, names, "give its fully qualified name")
        text = "the model has no such parameter or buffer"
        raise PlanError(Problem("unknown-name", name, found=text, hint=hint)) from None
    size = human_bytes(tensor.bytes_of(tensor.numel))
    lines = [f"{name}: {tensor.kind}, global shape {list(tensor.shape)}, {tensor.dtype}, {size}"]
    if len(tensor.aliases) > 1:
        lines.append(f"tied: {' = '.join(tensor.aliases)}")
    layout, rule = found.layouts.get(tensor.name), found.rule_of.get(tensor.name, "")
    others = [key for key in found.matched.get(tensor.name, ()) if key != rule]
    if tensor.name not in found.rule_of:  # taken by a Sharder
        owner = next((path for path in found.sharders if tensor.name.startswith(path + ".")), "")
        lines.append(f"sharded by the Sharder of module {owner!r}")
    elif rule:
        beaten = f"; {', '.join(map(repr, others))} match too" if others else ""
        lines.append(f"rule {rule!r} decides{beaten}")
    else:
        lines.append("no rule mentions it: replicated")
    if layout is not None:
        lines.append(f"layout {layout} on mesh {layout.mesh}")
        for axis, spec in zip(layout.mesh.axis_names, layout.specs, strict=True):
            count, dim = layout.mesh.axis_size(axis), spec.dim
            where = f"dim {dim % len(tensor.shape)} is sharded over" if dim is not None else "the same on all"
            where = f"on the ranks of stage {layout.stages[axis]} alone, of" if axis in layout.stages else where
            lines.append(f"  along {axis}: {where} {count} ranks")
        ranks = list(layout.mesh.ranks)
        for rank in ranks[:8]:  # enough to see the pattern
            boxes = layout.boxes(rank, tensor.shape)
            places = " + ".join("[" + ", ".join(f"{s.start}:{s.stop}" for s in box.slices()) + "]" for box in boxes[:4])
            more = f" + {len(boxes) - 4} more" if len(boxes) > 4 else ""
            local = list(layout.local_shape(rank, tensor.shape))
            lines.append(f"  rank {rank}: local shape {local}, holds {places or 'nothing'}{more}")
        if len(ranks) > 8:  # the list above is capped
            lines.append(f"  ... and ranks {human_ranks(ranks[8:])}")
    return "\n".join(lines + _problem_lines(p for p in found.problems if p.name in tensor.aliases))


def near_names(name: str, names: Sequence[str], otherwise: str) -> str:
    """Return a hint with the names nearest to a misspelt ``name``, which may lack the first segments of its path."""
    segments = name.count(".") + 1
    ends: dict[str, str] = {}  # the last segments of a name to the first name with these
    for each in names[:5000]:  # the search is quadratic
        ends.setdefault(each, each)
        ends.setdefault(".".join(each.split(".")[-segments:]), each)
    near = dict.fromkeys(ends[each] for each in difflib.get_close_matches(name, ends, n=3))
    return f"did you mean {', '.join(near)}?" if near else otherwise


def _value_text(rule: Rule) -> str:
    if rule.layout is not None:
        return str(rule.layout)
    return repr(rule.value) if rule.kind != "sharder" else f"Sharder {type(rule.value).__qualname__}"


def _outputs(plan: PlanContent) -> list[str]:
    lines = [f"output of {path or 'the root'!r} -> {value!s}" for path, value in (plan.output_plan or {}).items()]
    if plan.return_local_tensor:
        lines.append("handed on as local tensors: " + ", ".join(repr(name) for name in plan.return_local_tensor))
    return lines


def _problem_lines(problems: object) -> list[str]:
    listed = list(problems)  # type: ignore[call-overload]  # an iterable of Problem
    return [f"{len(listed)} problem(s):", *[f"  {problem}" for problem in listed]] if listed else []


@dataclass(frozen=True)
class Change:
    """One rule or tensor that differs; None on the side without it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class PlanDiff:
    """Changes from one plan to another.

    Attributes:
        settings: Mesh, strictness, output plan and local outputs that differ.
        rules: Added, removed or changed rules.
        tensors: Tensors of different layout (bytes on ranks, not text); None without a model.
        memory: ``(before, after)`` bytes of parameters on the fullest rank; None without a model.
    """

    settings: tuple[Change, ...]
    rules: tuple[Change, ...]
    tensors: tuple[Change, ...] | None = None
    memory: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        """Return True if anything differs: with a model a tensor or setting, without one a rule."""
        return bool(self.settings) or bool(self.rules if self.tensors is None else self.tensors)

    def to_json(self) -> str:
        """Return the differences as JSON."""
        document: dict[str, Any] = {"format": "shard-spec/diff", "version": 1}
        for name in ("settings", "rules", "tensors"):
            changes = getattr(self, name)
            document[name] = None if changes is None else [[c.name, c.before, c.after] for c in changes]
        document["memory"] = None if self.memory is None else list(self.memory)
        return json.dumps(document, indent=1, sort_keys=True)

    def __str__(self) -> str:
        lines = []
        for title, changes in (("setting", self.settings), ("rule", self.rules), ("tensor", self.tensors)):
            if changes:
                rows = [[c.name, *("-" if side is None else side for side in (c.before, c.after))] for c in changes]
                lines.append(str(Table([title, "before", "after"], rows)))
        if self.memory is not None:
            before, after = self.memory
            lines.append(f"parameters on the fullest rank: {human_bytes(before)} -> {human_bytes(after)}")
        return "\n\n".join(lines) if self or self.rules else "no difference"


def diff(plan: PlanContent, other: PlanContent, module: nn.Module | ModelMetadata | None = None) -> PlanDiff:
    """Return the changes from ``plan`` to ``other``; see ``ShardingPlan.diff``."""
    before, after = plan.document(), other.document()
    settings = tuple(
        Change(key, json.dumps(before[key]), json.dumps(after[key]))
        for key in ("mesh", "strict", "output_plan", "return_local_tensor")
        if before[key] != after[key]
    )
    old_rules, new_rules = dict(before["rules"]), dict(after["rules"])
    rules = []
    for key in sorted({*old_rules, *new_rules}):
        sides = (each.get(key) for each in (old_rules, new_rules))
        old, new = (side if side is None or isinstance(side, str) else json.dumps(side) for side in sides)
        if old != new:
            rules.append(Change(key, old, new))
    if module is None:
        return PlanDiff(settings, tuple(rules))
    resolutions = resolve(plan, module), resolve(other, module)
    tensors = []
    same: dict[Any, bool] = {}  # layers share it
    for tensor in resolutions[0].metadata.tensors:
        first, second = (each.layouts.get(tensor.name) for each in resolutions)
        key = (first, second, tensor.shape)
        if key not in same:  # None: a Sharder's
            both = first is not None and second is not None
            same[key] = first.equivalent_to(second, tensor.shape) if both else first is second  # type: ignore[union-attr, arg-type]  # `both` says neither is None
        if not same[key]:
            tensors.append(Change(tensor.name, *(str(layout) if layout else None for layout in (first, second))))
    sizes = [max(memory_of(each, optimizer="none").parts["parameters"], default=0) for each in resolutions]
    return PlanDiff(settings, tuple(rules), tuple(tensors), (sizes[0], sizes[1]))


# One hue for each axis, distinct for the colour-blind too; several axes on one tensor are drawn as stripes.
_HUES = (210, 28, 145, 285, 55, 0)
_GREY = "#c9cfd8"
_COLOURS = ("#3b6fb6", "#8fa8c8", "#e08e3a", "#5d9f6b", "#9b6bb0", "#c05a5a", "#7fb3d3", "#d98c3f", "#3f7f5a")
_DRAWN = [part for part in (*PARTS, *STEP_PARTS) if part != "gradients to come"]  # negative: taken off the gradients
_PART_COLOURS = dict(zip(_DRAWN, (*_COLOURS, "#6b7f3f"), strict=True))
_MAX_ROWS, _MAX_RANKS, _MAX_FILLINGS = 200, 64, 32  # a page that browsers can draw; larger worlds repeat the pattern


def html_report(
    plan: PlanContent,
    module: ModelMetadata,
    memory: Memory,
    communication: Communication | None = None,
    *,
    limit: int | None = None,
    title: str = "plan",
) -> str:
    """Return the page as text, written by ``plan.html.j2``; it loads no external resources.

    ``communication`` is that of a plan on one mesh, ``limit`` the bytes of memory of one rank.
    """
    from jinja2 import Environment  # torch brings it; a program that draws no page need not import it

    resolution = examine(plan, module)
    axes = dict.fromkeys(axis for layout in resolution.layouts.values() for axis in layout.mesh.axis_names)
    hues = {axis: _HUES[at % len(_HUES)] for at, axis in enumerate(axes)}
    ranks, kinds, fillings = list(resolution.ranks)[:_MAX_RANKS], alike(resolution), memory.groups()
    rows = []
    for (name, text, *_), (first, *others) in list(kinds.items())[:_MAX_ROWS]:
        cells: list[tuple[list[str], str]] = []  # colours of a cell, shaded by the rank's coordinate, and its tip
        for rank in ranks:
            layout = resolution.layouts.get(first.name)
            coordinate = None if layout is None else layout.mesh.coordinate(rank)
            if layout is None or coordinate is None:
                cells.append((["none"], ""))
                continue
            boxes = layout.boxes(rank, first.shape)
            places = " + ".join("[" + ", ".join(f"{s.start}:{s.stop}" for s in box.slices()) + "]" for box in boxes[:4])
            colours = [] if boxes else ["none"]  # an empty rank is an outline
            for at, (axis, size) in enumerate(layout.mesh.axes.items() if boxes else ()):
                if layout.specs[at].dim is not None and size > 1:
                    shade = 36 + round(36 * coordinate[at] / (size - 1))  # 36 to 72 % lightness
                    colours.append(f"hsl({hues[axis]} 55% {shade}%)")
            cells.append((colours or [_GREY], f"{first.name} on rank {rank}: {places or 'nothing'}"))
        rows.append((name, text, 1 + len(others), cells))
    bars = []
    for group, sizes in fillings[:_MAX_FILLINGS]:
        listed = human_ranks(group)
        to_come = sizes.pop("gradients to come", 0)
        sizes = {part: size + to_come * (part == "gradients") for part, size in sizes.items()}
        shown = listed if len(listed) < 28 else f"{listed[:26]}…"
        bars.append((f"rank {listed}" if len(group) == 1 else f"ranks {shown}", list(sizes.items())))
    by_axis = {} if communication is None else communication.by_axis()
    moved = [(axis, [(kind, round(size)) for kind, size in sizes.items()]) for axis, sizes in by_axis.items()]
    sent = sum(sum(sizes.values()) for sizes in by_axis.values())
    page = Environment(autoescape=True)
    # What every page has; what the plan says; what the pictures show.
    page.globals.update(
        html=page_parts(),
        human_bytes=human_bytes,
        human_count=human_count,
        grey=_GREY,
        title=title,
        plan=plan,
        found=resolution,
        tensors=tensor_table(resolution),
        limit=limit,
        memory=memory,
        communication=communication,
        transfers=moved,
        sent=sent,
        hues=hues,
        ranks=ranks,
        rows=rows,
        num_kinds=len(kinds),
        bars=bars,
        num_fillings=len(fillings),
        part_colours=_PART_COLOURS,
    )
    return page.from_string(resources.files(__package__).joinpath("plan.html.j2").read_text(encoding="utf-8")).render()
