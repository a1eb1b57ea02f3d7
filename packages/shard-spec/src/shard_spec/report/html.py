"""A plan as one self-contained page: shards of each rank, memory of each rank, bytes of a step."""

from __future__ import annotations

from importlib import resources

from shard_spec._shared.page import human_bytes, page_parts
from shard_spec.estimate.communication import Communication
from shard_spec.estimate.memory import PARTS, STEP_PARTS, Memory
from shard_spec.formatting import human_count, human_ranks
from shard_spec.plan.content import PlanContent
from shard_spec.plan.metadata import ModelMetadata
from shard_spec.plan.resolve import examine
from shard_spec.report.explain import alike, tensor_table

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
