"""Where every parameter lies: a picture and a table, parameters that differ in numbers alone on one row."""

from __future__ import annotations

import re
from html import escape

from torch.distributed.tensor import Placement, Shard

from dp_partition.collectives import chunk_bounds, local_shape
from dp_partition.messages import Message
from dp_partition.placements import describe
from dp_partition.plan import ParamPlan, PartitionPlan
from dp_partition.report.svg import html_table, key, picture, rect, text
from dp_partition.text import human_bytes

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
    note = "A grey bar is whole on every rank. A coloured cell is a rank's own part; an empty one holds nothing."
    note += f" The rank with the frame is {rank}." if rank < len(ranks) else ""
    note += f" The first {len(ranks)} of {plan.world} ranks are shown." if plan.world > len(ranks) else ""
    note += f" The first {len(shown)} of {len(rows)} kinds of parameters are shown." if len(rows) > len(shown) else ""
    entries = [(f"hsl({hue} 50% 50%)", f"{words}, sharded") for words, hue, _ in _PARTS]
    drawn = picture("placements", left + 3 * (wide + gap), top + len(shown) * height + 4, parts)
    return f'{key([*entries, ("#c9cfd8", "whole")])}{drawn}<p class="note">{escape(note)}</p>'


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
        return [rect(x, y, wide, height, "#c9cfd8", f"{words} of {param.info.name}: whole on every rank, {size}")]
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
    return html_table(head, rows, (1, 8))


__all__ = ["placement_picture", "placement_table", "rows_of"]
