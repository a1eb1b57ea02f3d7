"""A plan as one self-contained HTML page: boxes coloured by owner, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from shard_reshard.planning.analyze import explain, how, human

if TYPE_CHECKING:
    from shard_reshard.layout.base import Cell, ShardMap
    from shard_reshard.planning.analyze import ReshardPlan

_WIDTH = 430  # of one tensor, in pixels
_BAR = 160  # the longest bar, in pixels
_MOST_STRIPES = 16  # replicas of a box that get a stripe each
_STRIPE = 14  # how wide, in pixels
_MOST_BOXES = 4096
_MOST_RANKS = 64

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.3rem}h2{font-size:1rem;margin-top:2rem}svg text{font:12px system-ui,sans-serif;fill:#1b1f24}
.two{display:flex;flex-wrap:wrap;gap:2rem}figure{margin:0}figcaption{color:#57606a;max-width:27rem;margin-top:.3rem}
figcaption b{color:#1b1f24}.bar{display:inline-block;height:.7rem;background:#8db9ee;margin-right:.5rem}
.own{background:#eceff2}td.left,th.left{text-align:left}summary{cursor:pointer;margin-top:2rem;font-weight:600}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
td,th{padding:.2rem .55rem;text-align:right}
th{font-weight:600;color:#57606a}dl{display:grid;grid-template-columns:max-content auto;gap:.1rem 1rem}dt{color:#57606a}
dd{margin:0}pre{overflow-x:auto;background:#f6f8fa;padding:1rem}svg{max-width:100%;height:auto}td{white-space:nowrap}
@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}figcaption b{color:#dfe5ee}
pre{background:#1b212b}dt,th,figcaption{color:#98a3b5}td[style]{color:#1b1f24}.own{background:#333c4a}}
"""


def picture(plan: ReshardPlan, name: str | None = None) -> str:
    """The page; it loads nothing from anywhere."""
    shape = " × ".join(map(str, plan.shape)) or "scalar"
    title = f"{name or 'Reshard'}: {shape} {plan.dtype}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        f'<meta name=viewport content="width=device-width, initial-scale=1"><style>{_STYLE}</style>',
        f"<h1>{escape(title)}</h1>",
        "".join(_facts(plan)),
        "<h2>Where it is, and where it goes</h2><div class=two>",
        _tensor(plan.src, plan, "from"),
        _tensor(plan.dst, plan, "to"),
        "</div>",
        *_traffic(plan),
        f"<details><summary>In words</summary><pre>{escape(explain(plan, name))}</pre></details></html>",
    ]
    return "\n".join(parts)


def _facts(plan: ReshardPlan) -> Iterator[str]:
    times = f", {plan.wire_bytes / plan.lower_bound:.2f} × the bound" if plan.lower_bound else ""
    rows = [
        ("on the wire", f"{human(plan.wire_bytes)} as {plan.wire_dtype}{times}"),
        ("lower bound", f"{human(plan.lower_bound)}: no algorithm can send less"),
        ("how", "nothing is sent" if plan.is_local else how(plan)),
        ("plan", plan.digest[:12]),
    ]
    yield "<dl>"
    for term, text in rows:
        yield f"<dt>{term}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"


def colour(rank: int) -> str:
    """A colour for each rank; neighbours differ clearly (the golden angle)."""
    return f"hsl({rank * 137.508 % 360:.0f} 62% {62 + 14 * (rank % 2)}%)"


def _tensor(layout: ShardMap, plan: ReshardPlan, word: str) -> str:
    """The first two dims of the tensor, each box in the colours of its ranks; to scale, unless it is very tall."""
    cells = []
    for cell in layout.cells():
        cells.append(cell)
        if len(cells) > _MOST_BOXES:
            return (
                f"<figure><figcaption>{word}: {escape(layout.describe())}, too many boxes to draw</figcaption></figure>"
            )
    rows, columns = plan.shape[:2] if len(plan.shape) > 1 else (1, *plan.shape, 1)[:2]
    height = max(40, min(round(1.3 * _WIDTH), round(_WIDTH * rows / max(columns, 1)))) if len(plan.shape) > 1 else 40
    several = {tuple(_ranks(cell)) for cell in cells if len(_ranks(cell)) > 1}
    drawn = f"<defs>{''.join(_stripes(list(ranks)) for ranks in sorted(several))}</defs>" if several else ""
    drawn += "".join(_rectangle(cell, rows, columns, height) for cell in cells)
    dims = f"; dims after the second are not drawn ({len(plan.shape)} in all)" if len(plan.shape) > 2 else ""
    held = "" if all(len(_ranks(cell)) == 1 for cell in cells) else "; stripes: each of these ranks holds the full box"
    if layout.num_partials > 1:
        held = "; stripes: each of these ranks holds an addend"
    caption = f"{layout.describe()}{dims}{held}"
    label = escape(f"{word} {caption}")
    size = f'width="{_WIDTH + 2}" height="{height + 2}" viewBox="0 0 {_WIDTH + 2} {height + 2}"'
    box = f'<svg {size} role="img" aria-label="{label}">{drawn}</svg>'
    return f"<figure>{box}<figcaption><b>{word}</b> {escape(caption)}</figcaption></figure>"


def _ranks(cell: Cell) -> list[int]:
    return sorted({rank for held in cell.owners for rank in held})


def _stripes_id(ranks: list[int]) -> str:
    return "ranks-" + "-".join(map(str, ranks[:_MOST_STRIPES]))


def _stripes(ranks: list[int]) -> str:
    """The pattern of a box on several ranks; slanted, for straight ones would look like boxes."""
    shown = ranks[:_MOST_STRIPES]
    bars = "".join(
        f'<rect x="{_STRIPE * at}" width="{_STRIPE}" height="{_STRIPE}" fill="{colour(rank)}"/>'
        for at, rank in enumerate(shown)
    )
    size = f'width="{_STRIPE * len(shown)}" height="{_STRIPE}" patternUnits="userSpaceOnUse"'
    return f'<pattern id="{_stripes_id(ranks)}" {size} patternTransform="rotate(45)">{bars}</pattern>'


def _rectangle(cell: Cell, rows: int, columns: int, height: int) -> str:
    if len(cell.start) > 1:
        start, stop = cell.start[:2], cell.stop[:2]
    else:  # one row
        start, stop = (0, *cell.start, 0)[:2], (1, *cell.stop, 1)[:2]
    x, y = 1 + start[1] * _WIDTH / max(columns, 1), 1 + start[0] * height / max(rows, 1)
    w, h = (stop[1] - start[1]) * _WIDTH / max(columns, 1), (stop[0] - start[0]) * height / max(rows, 1)
    ranks = _ranks(cell)
    label = ",".join(map(str, ranks[:6])) + (",…" if len(ranks) > 6 else "")
    size = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    fill = colour(ranks[0]) if len(ranks) == 1 else f"url(#{_stripes_id(ranks)})"
    rectangle = (
        f'<rect {size} fill="{fill}" stroke="#fff">'
        f"<title>{escape(str(cell.start))} to {escape(str(cell.stop))} on ranks {label}</title></rect>"
    )
    if w > 8 * len(label) and h > 14:
        if len(ranks) > 1:
            wide = 7 * len(label) + 8
            place = f'x="{x + (w - wide) / 2:.1f}" y="{y + h / 2 - 9:.1f}" width="{wide}" height="18"'
            rectangle += f'<rect {place} rx="4" fill="#fff"/>'
        rectangle += f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle">{label}</text>'
    return rectangle


def _traffic(plan: ReshardPlan) -> Iterator[str]:
    """Yield the matrix of bytes between ranks, and the cost of each rank."""
    if plan.world_size > _MOST_RANKS:
        yield f"<p>{plan.world_size} ranks are too many for a table; see the words below.</p>"
        return
    yield "<h2>Bytes from rank (row) to rank (column)</h2>"
    most = max((value for row in plan.bytes_matrix for value in row), default=0) or 1
    head = "".join(f"<th>{rank}" for rank in range(plan.world_size))
    yield f"<table><tr><th>{head}"
    for rank, row in enumerate(plan.bytes_matrix):
        cells = "".join(
            "<td class=own>"
            if peer == rank
            else f'<td style="background:hsl(211 80% {99 - 24 * value / most:.0f}%)">{human(value) if value else "·"}'
            for peer, value in enumerate(row)
        )
        yield f"<tr><th>{rank}{cells}"
    yield "</table><h2>Of each rank</h2>"
    yield from _by_rank(plan)


def _by_rank(plan: ReshardPlan) -> Iterator[str]:
    matrix, ranks = plan.bytes_matrix, range(plan.world_size)
    columns = {
        "sends": [sum(matrix[rank]) for rank in ranks],
        "receives": [sum(row[rank] for row in matrix) for rank in ranks],
        "peak memory: result and buffers": [plan.peak_bytes(rank) for rank in ranks],
    }
    most = max([max(values, default=0) for values in columns.values()], default=0) or 1
    yield "<table><tr><th>" + "".join(f"<th class=left>{word}" for word in columns)
    for rank in ranks:
        cells = "".join(
            f'<td class=left><span class=bar style="width:{_BAR * values[rank] / most:.0f}px"></span>'
            f"{human(values[rank]) if values[rank] else '0'}"
            for values in columns.values()
        )
        yield f"<tr><th>{rank}{cells}"
    yield "</table>"
