"""A plan as one self-contained HTML page: boxes coloured by owner, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from shard_reshard.explain import explain, how, human

if TYPE_CHECKING:
    from shard_reshard.bound import BoundLayout, Cell
    from shard_reshard.plan import ReshardPlan

_WIDTH = 360  # of one tensor, in pixels
_MOST_BOXES = 4096
_MOST_RANKS = 64

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.3rem}h2{font-size:1rem;margin-top:2rem}svg text{font:11px system-ui,sans-serif;fill:#1b1f24}
figure{margin:0;display:inline-block;vertical-align:top;margin-right:2rem}figcaption{color:#57606a;max-width:24rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .5rem;text-align:right}
th{font-weight:600;color:#57606a}dl{display:grid;grid-template-columns:max-content auto;gap:.1rem 1rem}dt{color:#57606a}
dd{margin:0}pre{overflow-x:auto;background:#f6f8fa;padding:1rem}
"""


def picture(plan: ReshardPlan, name: str | None = None) -> str:
    """The page; it loads nothing from anywhere."""
    shape = " × ".join(map(str, plan.shape)) or "scalar"
    title = f"{name or 'Reshard'}: {shape} {plan.dtype}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        "".join(_facts(plan)),
        "<h2>Where it is, and where it goes</h2>",
        _tensor(plan.src, plan, "from"),
        _tensor(plan.dst, plan, "to"),
        "<h2>Bytes from rank (row) to rank (column)</h2>",
        _matrix(plan),
        f"<h2>In words</h2><pre>{escape(explain(plan, name))}</pre></html>",
    ]
    return "\n".join(parts)


def _facts(plan: ReshardPlan) -> Iterator[str]:
    peak = max((plan.peak_bytes(rank) for rank in range(plan.world_size)), default=0)
    rows = [
        ("on the wire", human(plan.wire_bytes)),
        ("lower bound", human(plan.lower_bound)),
        ("how", "nothing is sent" if plan.stays else how(plan)),
        ("peak memory", f"{human(peak)} on the busiest rank, result and buffers"),
        ("plan", plan.digest[:12]),
    ]
    yield "<dl>"
    for term, text in rows:
        yield f"<dt>{term}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"


def colour(rank: int) -> str:
    """A colour for each rank; neighbours differ clearly (the golden angle)."""
    return f"hsl({rank * 137.508 % 360:.0f} 62% {62 + 14 * (rank % 2)}%)"


def _tensor(layout: BoundLayout, plan: ReshardPlan, word: str) -> str:
    """The first two dims of the tensor to scale, each box in the colour of the rank that holds it."""
    cells = []
    for cell in layout.cells():
        cells.append(cell)
        if len(cells) > _MOST_BOXES:
            return (
                f"<figure><figcaption>{word}: {escape(layout.describe())}, too many boxes to draw</figcaption></figure>"
            )
    rows, columns = (*plan.shape, 1, 1)[:2]
    height = max(24, min(2 * _WIDTH, round(_WIDTH * rows / max(columns, 1)))) if plan.shape else 40
    drawn = "".join(_rectangle(cell, rows, columns, height) for cell in cells)
    dims = f"; dims after the second are not drawn ({len(plan.shape)} in all)" if len(plan.shape) > 2 else ""
    caption = f"{word}: {layout.describe()}{dims}"
    box = f'<svg width="{_WIDTH + 2}" height="{height + 2}" role="img" aria-label="{escape(caption)}">{drawn}</svg>'
    return f"<figure>{box}<figcaption>{escape(caption)}</figcaption></figure>"


def _rectangle(cell: Cell, rows: int, columns: int, height: int) -> str:
    start, stop = (*cell.start, 0, 0)[:2], (*cell.stop, 1, 1)[:2]
    if len(cell.start) == 1:
        start, stop = (cell.start[0], 0), (cell.stop[0], 1)
    x, y = 1 + start[1] * _WIDTH / max(columns, 1), 1 + start[0] * height / max(rows, 1)
    w, h = (stop[1] - start[1]) * _WIDTH / max(columns, 1), (stop[0] - start[0]) * height / max(rows, 1)
    ranks = sorted({rank for held in cell.holders for rank in held})
    label = ",".join(map(str, ranks[:6])) + (",…" if len(ranks) > 6 else "")
    rectangle = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{colour(ranks[0])}" stroke="#fff">'
        f"<title>{escape(str(cell.start))} to {escape(str(cell.stop))} on ranks {label}</title></rect>"
    )
    if w > 8 * len(label) and h > 13:
        rectangle += f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle">{label}</text>'
    return rectangle


def _matrix(plan: ReshardPlan) -> str:
    if plan.world_size > _MOST_RANKS:
        return f"<p>{plan.world_size} ranks are too many to draw; see the words below.</p>"
    most = max((value for row in plan.bytes_matrix for value in row), default=0) or 1
    head = "".join(f"<th>{rank}" for rank in range(plan.world_size))
    lines = [f"<table><tr><th>{head}"]
    for rank, row in enumerate(plan.bytes_matrix):
        cells = "".join(
            f'<td style="background:hsl(211 80% {98 - 45 * value / most:.0f}%)">{human(value) if value else ""}'
            for value in row
        )
        lines.append(f"<tr><th>{rank}{cells}")
    return "\n".join(lines) + "</table>"
