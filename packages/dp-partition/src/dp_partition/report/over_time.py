"""Pictures of a step along its course: compute and messages over time, live memory over nodes."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from dp_partition.memory import KINDS
from dp_partition.report.svg import COLOURS, key, line, picture, rect, text, ticks
from dp_partition.survey import Survey
from dp_partition.text import human_bytes, human_seconds, shortened
from dp_partition.timeline import Span

_LEFT, _WIDE, _RIGHT = 96, 900, 30
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "update step"}


def timeline_picture(found: Survey) -> str:
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
    entries += [("none", "stands still")] if any(s.label == "wait" for s in times.compute) else []
    entries += [(COLOURS.get(kind, "#888"), kind) for kind in dict.fromkeys(m.kind for m in found.messages)]
    note = (
        f"A step takes {human_seconds(times.seconds)}: compute {human_seconds(times.compute_seconds)}, messages "
        f"{human_seconds(times.message_seconds)}, of which {times.overlap:.0%} behind compute."
    )
    drawn = picture("timeline", _LEFT + _WIDE + _RIGHT, 122, parts)
    return f'{key(entries)}{drawn}<p class="note">{escape(note)}</p>'


def _compute(span: Span, scale: float) -> str:
    kind = _PHASES.get(span.label, span.label)
    x, width = _LEFT + span.start * scale, span.seconds * scale
    tip = f"{'stands still' if kind == 'wait' else span.label} for {human_seconds(span.seconds)}"
    if kind == "wait":
        return rect(x, 27, width, 14, "none", tip, ' class="idle"')
    return rect(x, 20, width, 28, COLOURS.get(kind, "#888"), f"{tip}, nodes {span.first} to {span.last}")


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)


def memory_picture(found: Survey) -> str:
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
    drawn = picture("memory", _LEFT + _WIDE + _RIGHT, top + high + 22, parts)
    return f'{key(entries)}{drawn}<p class="note">{escape(note)}</p>'


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


def _phases(found: Survey, bottom: float) -> list[str]:
    """Where forward, backward and optimizer begin."""
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


__all__ = ["memory_picture", "timeline_picture"]
