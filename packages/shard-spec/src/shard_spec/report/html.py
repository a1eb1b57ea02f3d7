"""A plan as one self-contained page: which rank holds what, memory of each rank, bytes of a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from math import prod
from typing import TYPE_CHECKING

from shard_spec.layout import Layout
from shard_spec.plan.facts import ModelFacts, TensorFacts
from shard_spec.plan.resolve import Resolution, examine
from shard_spec.report.text import human_bytes, human_count, human_ranks

if TYPE_CHECKING:
    from shard_spec.plan.communication import Communication
    from shard_spec.plan.content import PlanContent
    from shard_spec.plan.memory import Memory

# One hue for each axis, chosen to differ for the colour-blind too; several axes on one tensor are drawn as stripes.
_HUES = (210, 28, 145, 285, 55, 0)
_PART_COLOURS = {
    "parameters": "#3b6fb6",
    "buffers": "#8fa8c8",
    "gradients": "#e08e3a",
    "optimizer": "#5d9f6b",
    "master": "#9b6bb0",
    "activations": "#c05a5a",
}
_MAX_ROWS, _MAX_RANKS = 200, 64

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;color:#1d2430;background:#fff}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem;border-bottom:1px solid #d8dde6}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.7rem;list-style:none;
margin:1rem 0 0;padding:0}
.cards li{border:1px solid #d8dde6;border-radius:8px;padding:.5rem .8rem}
.cards b{display:block;font-size:1.25rem;font-weight:650;font-variant-numeric:tabular-nums}
.cards span{color:#5a6475;font-size:12px}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 14px 2px 0;text-align:left;white-space:nowrap}
th{color:#5a6475;font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:12px}
.key span{display:inline-block;width:12px;height:12px;margin:0 5px 0 16px;vertical-align:-1px;border-radius:2px}
.note{color:#5a6475}.bad{color:#a3212d}svg text{font:12px system-ui,sans-serif;fill:#1d2430}
svg .mono{font:11px ui-monospace,monospace}svg .soft{fill:#5a6475}svg .in{fill:#fff;font-weight:600}
svg .end{font-weight:650}.scroll{overflow-x:auto}
@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}svg text{fill:#dfe5ee}
th,.note,.cards span{color:#98a3b5}h2,.cards li{border-color:#333c4a}svg .soft{fill:#98a3b5}.bad{color:#ff8590}}
"""


def html_report(
    plan: PlanContent,
    module: ModelFacts,
    memory: Memory,
    communication: Communication | None = None,
    *,
    title: str = "plan",
) -> str:
    """The page as text; it loads nothing from anywhere.

    Args:
        plan: The plan.
        module: The model's facts.
        memory: ``plan.memory(...)``.
        communication: ``plan.communication(...)``, where there is one mesh.
        title: Heading of the page.
    """
    found = examine(plan, module)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(_summary(plan, found))}</p>',
        _cards(found, memory, communication),
        _problems(found),
        "<h2>Who holds what</h2>",
        _picture(found),
        "<h2>Memory on each rank</h2>",
        _memory(memory),
    ]
    if communication is not None:
        parts += ["<h2>Bytes that each rank sends in a step</h2>", _communication(communication)]
    parts += ["<h2>Tensors</h2>", _tensors(found)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f"<!doctype html>\n<html lang=en><head>{head}{view}</head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _summary(plan: PlanContent, found: Resolution) -> str:
    numel = sum(tensor.numel for tensor in found.facts.parameters)
    return f"{len(found.facts.parameters)} parameters, {numel:,} elements; plan {plan.digest[:12]}"


def _cards(found: Resolution, memory: Memory, communication: Communication | None) -> str:
    """The numbers that people ask for first."""
    numel = sum(tensor.numel for tensor in found.facts.parameters)
    mesh = " × ".join(f"{axis} {size}" for axis, size in found.mesh.axes.items()) if found.mesh else "several"
    cards = [
        (human_count(numel), "parameters"),
        (mesh, f"mesh of {len(found.ranks)} ranks"),
        (human_bytes(memory.max_bytes), f"on the fullest rank, with {memory.optimizer.name}"),
    ]
    if numel and not memory.uncounted:
        cards.append((f"{_local_numel(found, memory) / numel:.1%}", "of the weights on that rank"))
    if communication is not None:
        sent = sum(sum(kinds.values()) for kinds in communication.by_axis().values())
        cards.append((human_bytes(sent), "sent by each rank in a step"))
        if communication.seconds:
            cards.append((f"{sum(communication.seconds.values()) * 1e3:,.0f} ms", "of collectives, one after another"))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(text)}</span></li>" for value, text in cards)
    return f'<ul class="cards">{items}</ul>'


def _local_numel(found: Resolution, memory: Memory) -> int:
    """Elements of parameters on the fullest rank."""
    rank = memory.ranks[memory.totals.index(memory.max_bytes)]
    held = [(found.layouts[tensor.name], tensor.shape) for tensor in found.facts.parameters]
    return sum(
        prod(layout.local_shape(rank, shape)) for layout, shape in held if layout.mesh.coordinate(rank) is not None
    )


def _problems(found: Resolution) -> str:
    if not found.problems:
        return ""
    items = "".join(f"<li>{escape(str(problem))}</li>" for problem in found.problems)
    return f'<h2 class="bad">{len(found.problems)} problem(s)</h2><ul class="bad">{items}</ul>'


# ---- the picture of the plan ----------------------------------------------------------------------------------------


def stems(found: Resolution) -> dict[tuple[str, str, tuple[int, ...]], list[TensorFacts]]:
    """Tensors that differ only in numbers of their FQNs, lie alike and have one shape, as one row."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorFacts]] = {}
    for tensor in found.facts.tensors:
        layout = found.layouts.get(tensor.name)
        if tensor.kind == "buffer" and (layout is None or layout.is_replicated):
            continue
        stem = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", tensor.name)
        said = "by its Sharder" if layout is None else str(layout)
        groups.setdefault((stem, said, tensor.shape), []).append(tensor)
    return groups


def _picture(found: Resolution) -> str:
    axes = list(dict.fromkeys(axis for layout in found.layouts.values() for axis in layout.mesh.axis_names))
    hues = {axis: _HUES[at % len(_HUES)] for at, axis in enumerate(axes)}
    ranks = list(found.ranks)[:_MAX_RANKS]
    rows = [(key, tensors) for key, tensors in stems(found).items()][:_MAX_ROWS]
    left, width, height, top = 350, max(7, min(30, 480 // max(1, len(ranks)))), 20, 22
    right = left + len(ranks) * width + 12
    cells = []
    for at, rank in enumerate(ranks):
        if len(ranks) <= 16 or at % 8 == 0:
            cells.append(f'<text class="soft" x="{left + at * width + 2}" y="14">{rank}</text>')
    cells.append(f'<text class="soft" x="0" y="14">rank</text><text class="soft" x="{right}" y="14">layout</text>')
    for row, ((stem, stem_layout, _), tensors) in enumerate(rows):
        y = top + row * height
        name = stem if len(stem) <= 44 else "…" + stem[-43:]
        times = f" ×{len(tensors)}" if len(tensors) > 1 else ""
        cells.append(f'<text class="mono" x="0" y="{y + 13}">{escape(name + times)}</text>')
        said = stem_layout if len(stem_layout) <= 44 else stem_layout[:43] + "…"
        cells.append(f'<text class="mono soft" x="{right}" y="{y + 13}">{escape(said)}</text>')
        layout = found.layouts.get(tensors[0].name)
        for at, rank in enumerate(ranks):
            cells.append(_cell(layout, tensors[0], rank, hues, (left + at * width, y, width - 1, height - 3)))
    colours = [(f"hsl({hue} 55% 50%)", f"cut along {axis}") for axis, hue in hues.items()]
    key = _key([*colours, ("#c9cfd8", "whole"), ("none;outline:1px solid #999", "nothing")])
    note = "One column is one rank. The shade says which piece: ranks of one shade along an axis hold the same piece."
    if len(found.ranks) > len(ranks):
        note += f" The first {len(ranks)} of {len(found.ranks)} ranks are shown."
    total = len(stems(found))
    if total > len(rows):
        note += f" The first {len(rows)} of {total} kinds of tensors are shown."
    size = f'width="{right + 310}" height="{top + len(rows) * height + 4}"'
    drawn = f'<div class="scroll"><svg id="plan" role="img" {size}>{"".join(cells)}</svg></div>'
    return f'<p class="key">{key}</p>{drawn}<p class="note">{note}</p>'


def _cell(
    layout: Layout | None, tensor: TensorFacts, rank: int, hues: dict[str, int], place: tuple[int, int, int, int]
) -> str:
    x, y, width, height = place
    coordinate = None if layout is None else layout.mesh.coordinate(rank)
    if layout is None or coordinate is None:
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>'
    boxes = layout.boxes(rank, tensor.shape)
    places = " + ".join(str([f"{s.start}:{s.stop}" for s in box.slices()]).replace("'", "") for box in boxes[:4])
    title = f"<title>{escape(tensor.name)} on rank {rank}: {escape(places) or 'nothing'}</title>"
    if not boxes:
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#bbb">{title}</rect>'
    colours = []
    for at, (axis, size) in enumerate(layout.mesh.axes.items()):
        if layout.terms[at].dim is not None and size > 1:
            shade = 36 + round(36 * coordinate[at] / (size - 1))
            colours.append(f"hsl({hues[axis]} 55% {shade}%)")
    stripes = []
    for at, colour in enumerate(colours or ["#c9cfd8"]):
        step = height / max(1, len(colours))
        stripes.append(f'<rect x="{x}" y="{y + at * step:.1f}" width="{width}" height="{step:.1f}" fill="{colour}"/>')
    return f"<g>{title}{''.join(stripes)}</g>"


# ---- bars -----------------------------------------------------------------------------------------------------------


def _memory(memory: Memory) -> str:
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for at, rank in enumerate(memory.ranks):
        kinds = tuple((part, values[at]) for part, values in memory.parts.items() if any(values))
        groups.setdefault(kinds, []).append(rank)
    rows = [(_ranks_text(ranks), list(kinds)) for kinds, ranks in list(groups.items())[:32]]
    drawn = _bars("memory", rows, _PART_COLOURS)
    text = "Exact for the tensors themselves; activations and collectives' buffers come on top."
    if len(groups) > len(rows):
        text += f" The first {len(rows)} of {len(groups)} different fillings are shown."
    return f'{drawn}<p class="note">{text}</p>'


def _ranks_text(ranks: Sequence[int]) -> str:
    text = human_ranks(ranks)
    return "rank " + text if len(ranks) == 1 else f"ranks {text if len(text) < 28 else text[:26] + '…'}"


def _communication(found: Communication) -> str:
    rows = [(axis, [(kind, round(size)) for kind, size in kinds.items()]) for axis, kinds in found.by_axis().items()]
    drawn = _bars("communication", rows, _PART_COLOURS)
    if found.seconds is not None:
        times = ", ".join(f"{axis} {seconds * 1e3:.1f} ms" for axis, seconds in found.seconds.items())
        drawn += f"<p>Time of the collectives, one after another: {escape(times)}.</p>"
    return drawn + f'<p class="note">{"<br>".join(escape(line) for line in found.assumptions)}</p>'


def _bars(identity: str, rows: list[tuple[str, list[tuple[str, int]]]], colours: dict[str, str]) -> str:
    """Horizontal stacked bars, one a row, all on one scale."""
    most = max((sum(size for _, size in parts) for _, parts in rows), default=0) or 1
    left, wide, height = 150, 760, 30
    drawn: list[str] = []
    seen: dict[str, str] = {}
    for row, (name, parts) in enumerate(rows):
        x, y = float(left), row * height
        drawn.append(f'<text x="0" y="{y + 16}">{escape(name)}</text>')
        for part, size in parts:
            if not size:
                continue
            width = wide * size / most
            seen[part] = colours.get(part, "#888")
            tip = f"<title>{escape(part)}: {human_bytes(size)}</title>"
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{seen[part]}">{tip}</rect>')
            label = human_bytes(size)
            if width > 8 * len(label) + 8:
                drawn.append(f'<text class="in" x="{x + 6:.1f}" y="{y + 16}">{label}</text>')
            x += width
        total = sum(size for _, size in parts)
        drawn.append(f'<text class="end" x="{x + 6:.1f}" y="{y + 16}">{human_bytes(total)}</text>')
    key = _key([(colour, part) for part, colour in seen.items()])
    size_text = f'width="{left + wide + 110}" height="{max(1, len(rows)) * height}"'
    picture = f'<svg id="{identity}" role="img" {size_text}>{"".join(drawn)}</svg>'
    return f'<p class="key">{key}</p><div class="scroll">{picture}</div>'


def _key(entries: Sequence[tuple[str, str]]) -> str:
    """What the colours mean."""
    return "".join(f'<span style="background:{colour}"></span>{escape(text)}' for colour, text in entries)


def _tensors(found: Resolution) -> str:
    rows = []
    for (stem, said, shape), tensors in stems(found).items():
        layout = found.layouts.get(tensors[0].name)
        local = "?" if layout is None else str(list(layout.local_shape(layout.mesh.ranks[0], shape)))
        rule = found.rule_of.get(tensors[0].name, "") or "–"
        shown = '<span class="note">its name</span>' if rule == stem else f"<code>{escape(rule)}</code>"
        cells = [f"<code>{escape(stem)}</code>", f"<code>{escape(said)}</code>", escape(str(list(shape))), local]
        numbers = f'<td class="n">{len(tensors)}</td>'
        rows.append(
            f"<tr><td>{cells[0]}</td>{numbers}<td>{cells[1]}</td><td>{cells[2]}</td><td>{cells[3]}</td>"
            f"<td>{shown}</td></tr>"
        )
    head = "<tr><th>tensor<th>count<th>layout<th>global shape<th>local shape<th>rule</tr>"
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'
