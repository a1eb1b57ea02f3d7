"""A plan as one self-contained page: shards of each rank, memory of each rank, bytes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shard_spec._shared.page import human_bytes, page_parts
from shard_spec.formatting import human_count, human_ranks
from shard_spec.layout.layout import Layout
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata
from shard_spec.plan.resolve import Resolution, examine
from shard_spec.report.explain import alike, tensor_table

if TYPE_CHECKING:
    from shard_spec.estimate.communication import Communication
    from shard_spec.estimate.memory import Memory
    from shard_spec.plan.content import PlanContent

# One hue for each axis, distinct for the colour-blind too; several axes on one tensor are drawn as stripes.
_HUES = (210, 28, 145, 285, 55, 0)
_PART_COLOURS = {
    "parameters": "#3b6fb6",
    "buffers": "#8fa8c8",
    "gradients": "#e08e3a",
    "optimizer": "#5d9f6b",
    "master": "#9b6bb0",
    "activations": "#c05a5a",
    "logits and loss": "#d98c3f",
}
_MAX_ROWS, _MAX_RANKS = 200, 64


def html_report(
    plan: PlanContent,
    module: ModelMetadata,
    memory: Memory,
    communication: Communication | None = None,
    *,
    limit: int | None = None,
    title: str = "plan",
) -> str:
    """Return the page as text; it loads no external resources.

    Args:
        plan: The plan.
        module: The model's metadata.
        memory: ``plan.memory(...)``.
        communication: ``plan.communication(...)``, if there is one mesh.
        limit: Bytes of memory of one rank.
        title: Heading of the page.
    """
    found, html = examine(plan, module), page_parts()
    parts = [html.note([_summary(plan, found)])]
    if limit is not None:
        parts.append(html.note([memory.verdict(limit)], "note" if memory.max_bytes <= limit else "bad"))
    parts.append(html.cards(_cards(found, memory, communication)))
    if found.problems:
        parts += [html.heading(f"{len(found.problems)} problem(s)", "bad"), html.bullets(found.problems, "bad")]
    parts += [html.heading("Who holds what"), *_picture(html, found)]
    parts += [html.heading("Memory on each rank"), *_memory(html, memory)]
    if communication is not None:
        heading = html.heading("Bytes that each rank sends in a step")
        parts += [heading, *_communication(html, communication)]
    tensors = tensor_table(found)
    parts += [html.heading("Tensors"), html.table(tensors.head, tensors.rows, tensors.right)]
    return str(html.page(title, parts))


def _summary(plan: PlanContent, found: Resolution) -> str:
    numel = sum(tensor.numel for tensor in found.metadata.parameters)
    return f"{len(found.metadata.parameters)} parameters, {numel:,} elements; plan {plan.digest[:12]}"


def _cards(found: Resolution, memory: Memory, communication: Communication | None) -> list[tuple[str, str]]:
    """The numbers that people ask for first."""
    numel = sum(tensor.numel for tensor in found.metadata.parameters)
    mesh = " × ".join(f"{axis} {size}" for axis, size in found.mesh.axes.items()) if found.mesh else "several"
    entries = [
        (human_count(numel), "parameters"),
        (mesh, f"mesh of {len(found.ranks)} ranks"),
        (human_bytes(memory.max_bytes), f"on the fullest rank, with {memory.optimizer.name}"),
    ]
    if numel and not memory.uncounted:  # the share is unknown with Sharders
        entries.append((f"{_local_numel(found, memory) / numel:.1%}", "of the weights on that rank"))
    if memory.moment:
        rank = memory.on(memory.worst_rank)
        size = rank["activations"] + rank["logits and loss"]
        entries.append(
            (human_bytes(size), f"of activations, logits and loss at the peak ({memory.moment}), an estimate")
        )
    if communication is not None:
        sent = sum(sum(kinds.values()) for kinds in communication.by_axis().values())
        entries.append((human_bytes(sent), "sent by each rank in a step"))
        if communication.seconds:
            entries.append(
                (f"{sum(communication.seconds.values()) * 1e3:,.0f} ms", "of collectives, one after another")
            )
    return entries


def _local_numel(found: Resolution, memory: Memory) -> int:
    rank = memory.ranks[memory.totals.index(memory.max_bytes)]
    held = [(found.layouts[tensor.name], tensor.shape) for tensor in found.metadata.parameters]
    return sum(
        prod(layout.local_shape(rank, shape)) for layout, shape in held if layout.mesh.coordinate(rank) is not None
    )


# ---- the picture of the plan ----------------------------------------------------------------------------------------


def _picture(html: Any, found: Resolution) -> list[str]:
    axes = list(dict.fromkeys(axis for layout in found.layouts.values() for axis in layout.mesh.axis_names))
    hues = {axis: _HUES[at % len(_HUES)] for at, axis in enumerate(axes)}  # one hue per axis, for the full page
    ranks = list(found.ranks)[:_MAX_RANKS]  # larger worlds: the pattern repeats
    groups = alike(found)
    rows = list(groups.items())[:_MAX_ROWS]  # a page that browsers can draw
    left, width, height, top = 350, max(7, min(30, 480 // max(1, len(ranks)))), 20, 22
    right = left + len(ranks) * width + 12
    shapes = [html.text(0, 14, "rank", "soft"), html.text(right, 14, "layout", "soft")]
    for at, rank in enumerate(ranks):
        if len(ranks) <= 16 or at % 8 == 0:
            shapes.append(html.text(left + at * width + 2, 14, rank, "soft"))
    for row, ((stem, stem_layout, *_), tensors) in enumerate(rows):
        y = top + row * height
        name = stem if len(stem) <= 44 else "…" + stem[-43:]
        times = f" ×{len(tensors)}" if len(tensors) > 1 else ""
        shapes.append(html.text(0, y + 13, name + times, "mono"))
        label = stem_layout if len(stem_layout) <= 44 else stem_layout[:43] + "…"
        shapes.append(html.text(right, y + 13, label, "mono soft"))
        layout = found.layouts.get(tensors[0].name)
        for at, rank in enumerate(ranks):
            shapes += _cell(html, layout, tensors[0], rank, hues, (left + at * width, y, width - 1, height - 3))
    colours = [(f"hsl({hue} 55% 50%)", f"sharded along {axis}") for axis, hue in hues.items()]
    key = html.legend([*colours, ("#c9cfd8", "replicated"), ("none", "nothing")])
    remark = "One column is one rank. Ranks of one shade along an axis hold the same shard."
    if len(found.ranks) > len(ranks):
        remark += f" The first {len(ranks)} of {len(found.ranks)} ranks are shown."
    if len(groups) > len(rows):
        remark += f" The first {len(rows)} of {len(groups)} kinds of tensors are shown."
    return [key, html.svg("plan", right + 310, top + len(rows) * height + 4, shapes), html.note([remark])]


def _cell(
    html: Any,
    layout: Layout | None,
    tensor: TensorMetadata,
    rank: int,
    hues: dict[str, int],
    place: tuple[int, int, int, int],
) -> list[str]:
    """Draw one stripe for each sharding axis, shaded by the rank's coordinate; an outline if it is empty."""
    x, y, width, height = place
    coordinate = None if layout is None else layout.mesh.coordinate(rank)
    if layout is None or coordinate is None:
        return [html.rect(x, y, width, height, "none")]
    boxes = layout.boxes(rank, tensor.shape)
    places = " + ".join(str([f"{s.start}:{s.stop}" for s in box.slices()]).replace("'", "") for box in boxes[:4])
    tip = f"{tensor.name} on rank {rank}: {places or 'nothing'}"
    if not boxes:
        return [html.rect(x, y, width, height, "none", tip)]
    colours = []
    for at, (axis, size) in enumerate(layout.mesh.axes.items()):
        if layout.specs[at].dim is not None and size > 1:
            shade = 36 + round(36 * coordinate[at] / (size - 1))  # 36 to 72 % lightness
            colours.append(f"hsl({hues[axis]} 55% {shade}%)")
    step = height / max(1, len(colours))
    return [html.rect(x, y + at * step, width, step, each, tip) for at, each in enumerate(colours or ["#c9cfd8"])]


# ---- bars -----------------------------------------------------------------------------------------------------------


def _memory(html: Any, memory: Memory) -> list[str]:
    groups = memory.groups()
    rows = [(_ranks_text(ranks), list(sizes.items())) for ranks, sizes in groups[:32]]
    drawn = html.stacked_bars("memory", rows, _PART_COLOURS, human_bytes)
    remark = "Exact for the tensors themselves; activations and collectives' buffers come on top."
    if memory.moment:
        remark = f"State is exact; activations, logits and loss are an estimate at the peak ({memory.moment})."
        remark += "".join(f" {line[0].upper()}{line[1:]}." for line in memory.notes)
    if len(groups) > len(rows):
        remark += f" The first {len(rows)} of {len(groups)} different fillings are shown."
    return [drawn, html.note([remark])]


def _ranks_text(ranks: Sequence[int]) -> str:
    listed = human_ranks(ranks)
    return "rank " + listed if len(ranks) == 1 else f"ranks {listed if len(listed) < 28 else listed[:26] + '…'}"


def _communication(html: Any, found: Communication) -> list[str]:
    rows = [(axis, [(kind, round(size)) for kind, size in kinds.items()]) for axis, kinds in found.by_axis().items()]
    parts = [html.stacked_bars("communication", rows, _PART_COLOURS, human_bytes)]
    if found.seconds is not None:
        times = ", ".join(f"{axis} {seconds * 1e3:.1f} ms" for axis, seconds in found.seconds.items())
        parts.append(html.note([f"Time of the collectives, one after another: {times}."]))
    return [*parts, html.note(found.assumptions)]
