"""Pictures of a step along its course: compute and messages over time, live memory over nodes."""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise

from torch.distributed.tensor import Placement, Shard

from dp_partition._shared.page import human_bytes, legend, line, rect, svg, table, text
from dp_partition.analysis.analyze import StepAnalysis
from dp_partition.analysis.comms import Message
from dp_partition.analysis.formatting import human_seconds, shortened
from dp_partition.analysis.memory import KINDS
from dp_partition.analysis.timeline import Span
from dp_partition.plan.placements import chunk_bounds, describe, local_shape
from dp_partition.plan.plan import ParamPlan, PartitionPlan

# The same hue means the same thing in every picture of a page.
COLOURS = {
    "parameters": "#3b6fb6",
    "optimizer": "#5d9f6b",
    "buffers": "#8fa8c8",
    "batch": "#b0b7c3",
    "activations": "#c05a5a",
    "gathered": "#7fa3d6",
    "gradients": "#e08e3a",
    "collectives": "#9b6bb0",
    "update": "#a3c46f",
    "forward": "#9aa7bb",
    "backward": "#6d7a90",
    "update step": "#c3b58a",
    "wait": "none",
    "all_gather": "#3b6fb6",
    "reduce_scatter": "#e08e3a",
    "all_reduce": "#9b6bb0",
    "all_to_all": "#5d9f6b",
    "broadcast": "#c05a5a",
}
_LEFT, _WIDE, _RIGHT = 96, 900, 30
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "update step"}


def timeline_picture(found: StepAnalysis) -> str:
    """Two lanes over one axis of time: what the device does, what the link does."""
    times = found.timeline
    scale = _WIDE / (times.seconds or 1.0)
    parts = [text(0, 38, "compute"), text(0, 84, "messages")]
    for span in times.compute:
        parts.append(_compute(span, scale))
    for span, message in zip(times.messages, found.messages, strict=True):
        x, width = _LEFT + span.start * scale, span.seconds * scale
        tip = (
            f"{message.kind} of {human_bytes(message.whole_bytes)}, {human_seconds(span.seconds)}, "
            f"in {message.phase}; carries {shortened(message.carries, 4) or 'no parameter'}; "
            f"issued at node {message.issued}, awaited at node {message.awaited}"
        )
        parts.append(rect(x, 66, width - 0.4, 28, COLOURS.get(message.kind, "#888"), tip))
        if width > 62:
            parts.append(text(x + width / 2, 84, human_bytes(message.whole_bytes), "middle", "on"))
    unit, factor = _unit(times.seconds)
    for at in ticks(times.seconds * factor):
        x = _LEFT + at / factor * scale
        parts += [line(x, 16, x, 100), text(x, 114, f"{at:g}", "middle", "small")]
    parts.append(text(_LEFT + _WIDE + 6, 114, unit, kind="small"))
    words = {"forward": "forward", "backward": "backward", "update step": "optimizer"}
    seen = [kind for kind in dict.fromkeys(_PHASES.get(s.label, s.label) for s in times.compute) if kind != "wait"]
    entries = [(COLOURS[kind], words[kind]) for kind in seen]
    entries += [("none", "waits")] if any(s.label == "wait" for s in times.compute) else []
    entries += [(COLOURS.get(kind, "#888"), kind) for kind in dict.fromkeys(m.kind for m in found.messages)]
    note = (
        f"A step takes {human_seconds(times.seconds)}: compute {human_seconds(times.compute_seconds)}, messages "
        f"{human_seconds(times.message_seconds)}, of which {times.overlap:.0%} behind compute."
    )
    drawn = svg("timeline", _LEFT + _WIDE + _RIGHT, 122, parts)
    return f'{legend(entries)}{drawn}<p class="note">{escape(note)}</p>'


def _compute(span: Span, scale: float) -> str:
    kind = _PHASES.get(span.label, span.label)
    x, width = _LEFT + span.start * scale, span.seconds * scale
    tip = f"{'waits' if kind == 'wait' else span.label} for {human_seconds(span.seconds)}"
    if kind == "wait":
        return rect(x, 27, width, 14, "none", tip, ' class="idle"')
    return rect(x, 20, width, 28, COLOURS.get(kind, "#888"), f"{tip}, nodes {span.first} to {span.last}")


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)


def memory_picture(found: StepAnalysis) -> str:
    """Stacked areas over the nodes of the graph: what lives while each of them runs."""
    memory = found.memory
    high, top = 230, 24
    most = memory.peak_bytes or 1
    columns = _columns(memory.live, min(len(memory.live), 450))
    wide = _WIDE / max(1, len(columns))
    parts = []
    lower = [0] * len(columns)
    used = [at for at in range(len(KINDS)) if any(column[at] for column in columns)]
    for at in used:
        upper = [low + column[at] for low, column in zip(lower, columns, strict=True)]
        parts.append(_area(lower, upper, wide, high / most, top + high, COLOURS[KINDS[at]], KINDS[at]))
        lower = upper
    unit, factor = _byte_unit(most)
    for size in ticks(most / factor):
        y = top + high - size * factor * high / most
        parts += [line(_LEFT, y, _LEFT + _WIDE, y), text(_LEFT - 6, y + 4, f"{size:g} {unit}", "end", "small")]
    parts += _phases(found, top + high)
    x = _LEFT + (memory.peak + 0.5) / max(1, len(memory.live)) * _WIDE
    side = "end" if x > _LEFT + _WIDE / 2 else "start"
    parts += [
        line(x, top - 8, x, top + high, "mark"),
        text(
            x + (-5 if side == "end" else 5), top - 10, f"peak {human_bytes(most)} at {memory.nodes[memory.peak]}", side
        ),
    ]
    entries = [(COLOURS[KINDS[at]], _WORDS.get(KINDS[at], KINDS[at])) for at in used]
    at_peak = ", ".join(f"{_WORDS.get(k, k)} {human_bytes(v)}" for k, v in memory.peak_kinds.items())
    note = f"At the peak: {at_peak}. Between steps {human_bytes(memory.resident_bytes)} stay, the batch included."
    drawn = svg("memory", _LEFT + _WIDE + _RIGHT, top + high + 22, parts)
    return f'{legend(entries)}{drawn}<p class="note">{escape(note)}</p>'


_WORDS = {
    "gathered": "gathered parameters",
    "optimizer": "optimizer state",
    "collectives": "buffers of collectives",
    "update": "values of the update",
}


def _columns(live: tuple[tuple[int, ...], ...], count: int) -> list[tuple[int, ...]]:
    """At most ``count`` columns: of each stretch of nodes the one with most memory, so that no peak is lost."""
    if not live:
        return []
    edges = [round(at * len(live) / count) for at in range(count + 1)]
    return [max(live[a:b], key=sum) for a, b in pairwise(edges) if b > a]


def _area(lower: list[int], upper: list[int], wide: float, scale: float, bottom: float, colour: str, kind: str) -> str:
    there: list[str] = []
    back: list[str] = []
    for at, (low, up) in enumerate(zip(lower, upper, strict=True)):
        x1, x2 = _LEFT + at * wide, _LEFT + (at + 1) * wide
        there.append(f"{x1:.1f},{bottom - up * scale:.1f} {x2:.1f},{bottom - up * scale:.1f}")
        back.append(f"{x2:.1f},{bottom - low * scale:.1f} {x1:.1f},{bottom - low * scale:.1f}")
    most = max((up - low for low, up in zip(lower, upper, strict=True)), default=0)
    title = f"<title>{escape(_WORDS.get(kind, kind))}: at most {human_bytes(most)}</title>"
    return f'<polygon points="{" ".join(there)} {" ".join(reversed(back))}" fill="{colour}">{title}</polygon>'


def _phases(found: StepAnalysis, bottom: float) -> list[str]:
    """Mark where forward, backward and optimizer begin."""
    parts = []
    count = max(1, len(found.phases))
    begin = 0
    for at in range(1, count + 1):
        if at == count or found.phases[at] != found.phases[begin]:
            x1, x2 = _LEFT + begin / count * _WIDE, _LEFT + at / count * _WIDE
            if x2 - x1 > 40:
                parts += [line(x2, bottom, x2, bottom + 14, "axis")]
                parts += [text((x1 + x2) / 2, bottom + 14, found.phases[begin], "middle", "small")]
            begin = at
    return parts


def _byte_unit(most: float) -> tuple[str, float]:
    for unit, factor in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if most >= factor:
            return unit, factor
    return "B", 1.0


_MAX_ROWS, _MAX_RANKS = 120, 32
_PARTS = (("parameter", 213, "param"), ("gradient", 28, "grad"), ("optimizer state", 136, "state"))


def rows_of(plan: PartitionPlan) -> list[tuple[str, list[ParamPlan]]]:
    """Parameters that differ in the numbers of their names alone and lie alike, under one name."""
    groups: dict[tuple[object, ...], list[ParamPlan]] = {}
    for param in plan.params:
        stem = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", param.info.name)
        lies = (param.param, param.grad, param.state, param.info.shape, param.info.dtype, param.info.requires_grad)
        groups.setdefault((stem, *lies, param.reason, bool(param.aliases)), []).append(param)
    return [(str(k[0]) if len(found) > 1 else found[0].info.name, found) for k, found in groups.items()]


def placement_picture(plan: PartitionPlan, rank: int) -> str:
    """For each parameter three bars over the ranks: which ranks hold it, its gradient, its state, and how much."""
    rows = rows_of(plan)
    shown = rows[:_MAX_ROWS]
    ranks = list(range(min(plan.world, _MAX_RANKS)))
    wide, gap, left, height, top = 190.0, 26.0, 330, 17, 38
    parts = []
    for column, (words, _, _) in enumerate(_PARTS):
        x = left + column * (wide + gap)
        parts.append(text(x, 13, words))
        parts.append(text(x, 29, "rank 0", kind="small"))
        if len(ranks) > 1:
            parts.append(text(x + wide, 29, f"rank {ranks[-1]}", "end", "small"))
    for row, (name, params) in enumerate(shown):
        y = top + row * height
        label = name if len(name) <= 44 else "…" + name[-43:]
        parts.append(text(0, y + 12, label + (f" ×{len(params)}" if len(params) > 1 else "")))
        for column, (words, hue, attribute) in enumerate(_PARTS):
            if attribute != "param" and not params[0].info.requires_grad:
                continue
            x = left + column * (wide + gap)
            placement: Placement = getattr(params[0], attribute)
            parts += _bar(params[0], placement, words, hue, ranks, plan.world, rank, (x, y, wide, height - 3.0))
    note = "A grey bar is replicated on every rank. A coloured cell is a rank's own part; an empty one holds nothing."
    note += f" The rank with the frame is {rank}." if rank < len(ranks) else ""
    note += f" The first {len(ranks)} of {plan.world} ranks are shown." if plan.world > len(ranks) else ""
    note += f" The first {len(shown)} of {len(rows)} kinds of parameters are shown." if len(rows) > len(shown) else ""
    entries = [(f"hsl({hue} 50% 50%)", f"{words}, sharded") for words, hue, _ in _PARTS]
    drawn = svg("placements", left + 3 * (wide + gap), top + len(shown) * height + 4, parts)
    return f'{legend([*entries, ("#c9cfd8", "replicated")])}{drawn}<p class="note">{escape(note)}</p>'


def _bar(
    param: ParamPlan,
    placement: Placement,
    words: str,
    hue: int,
    ranks: list[int],
    world: int,
    rank: int,
    place: tuple[float, float, float, float],
) -> list[str]:
    x, y, wide, height = place
    if not isinstance(placement, Shard):
        size = human_bytes(param.info.num_bytes)
        return [rect(x, y, wide, height, "#c9cfd8", f"{words} of {param.info.name}: replicated, {size}")]
    cell = wide / len(ranks)
    size_all = param.info.shape[placement.dim]
    most = max(1, -(-size_all // world))
    parts = []
    for at in ranks:
        start, end = chunk_bounds(size_all, world, at)
        tip = f"{words} of {param.info.name} on rank {at}: rows {start}:{end} of dim {placement.dim}"
        frame = ' class="own"' if at == rank else ""
        space = 1.0 if cell > 3 else 0.0
        if end == start:
            parts.append(rect(x + at * cell, y, cell - space, height, "none", tip, ' class="idle"'))
            continue
        shade = 62 - round(22 * (end - start) / most)
        parts.append(rect(x + at * cell, y, cell - space, height, f"hsl({hue} 50% {shade}%)", tip, frame))
    return parts


def placement_table(plan: PartitionPlan, rank: int, messages: tuple[Message, ...]) -> str:
    """One row for each kind of parameter: shapes, placements, bytes on the rank, what carries it, and why."""
    rows = []
    for name, params in rows_of(plan):
        first = params[0]
        info = first.info
        here = local_shape(info.shape, first.param, plan.world, rank)
        size = first.local_numel(first.param, plan.world, rank) * info.dtype.itemsize
        kinds = list(dict.fromkeys(m.kind for m in messages if info.name in m.carries))
        note = first.reason + ("" if info.requires_grad else "; frozen")
        note += f"; also {', '.join(first.aliases)}" if first.aliases else ""
        rows.append(
            [
                f"<code>{escape(name)}</code>", str(len(params)), str(info.dtype).removeprefix("torch."),
                str(list(info.shape)), str(list(here)), describe(first.param),
                describe(first.grad) if info.requires_grad else "–",
                describe(first.state) if info.requires_grad else "–",
                human_bytes(size * len(params)), f'<span class="w">{", ".join(kinds) or "–"}</span>', escape(note),
            ]
        )  # fmt: skip
    head = [
        "parameter",
        "count",
        "dtype",
        "global shape",
        "local shape",
        "param",
        "grad",
        "state",
        "bytes",
        "carried by",
        "why",
    ]
    return table(head, rows, (1, 8))


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to about ``most``."""
    if most <= 0:
        return [0.0]
    step = 10.0 ** len(str(int(most))) if most >= 1 else 1.0
    while most / step < count:
        for factor in (2.0, 2.5, 2.0):
            step /= factor
            if most / step >= count:
                break
    return [step * at for at in range(int(most / step) + 1)]
