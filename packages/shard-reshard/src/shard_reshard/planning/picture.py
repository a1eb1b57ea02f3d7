"""A plan as one self-contained HTML page: boxes coloured by owner, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from shard_reshard._shared.page import cards, note, page, rect, svg, table, text
from shard_reshard.planning.analyze import explain, how, human

if TYPE_CHECKING:
    from shard_reshard.layout.shard_map import Cell, ShardMap
    from shard_reshard.planning.analyze import ReshardPlan

_WIDTH = 430  # of one tensor, in pixels
_MOST_STRIPES = 16  # replicas of a box that get a stripe each
_STRIPE = 14  # how wide, in pixels
_MOST_BOXES = 4096
_MOST_RANKS = 64


def picture(plan: ReshardPlan, name: str | None = None) -> str:
    """The page; it loads nothing from anywhere."""
    shape = " × ".join(map(str, plan.shape)) or "scalar"
    times = f"{plan.wire_bytes / plan.lower_bound:.2f} × the bound" if plan.lower_bound else "on the wire"
    facts = [
        (human(plan.wire_bytes), f"as {plan.wire_dtype}, {times}"),
        (human(plan.lower_bound), "lower bound: no algorithm can send less"),
    ]
    parts = [
        cards(facts),
        note(how(plan) if plan.wire_bytes else "nothing is sent"),
        "<h2>Where it is, and where it goes</h2>",
        _tensor(plan.src, plan, "from"),
        _tensor(plan.dst, plan, "to"),
        *_traffic(plan),
        f"<details><summary>In words</summary><pre>{escape(explain(plan, name))}</pre></details>",
    ]
    return page(f"{name or 'Reshard'}: {shape} {plan.dtype}", parts)


def colour(rank: int) -> str:
    """A colour for each rank; neighbours differ clearly (the golden angle)."""
    return f"hsl({rank * 137.508 % 360:.0f} 62% {62 + 14 * (rank % 2)}%)"


def _tensor(layout: ShardMap, plan: ReshardPlan, word: str) -> str:
    """The first two dims of the tensor, each box in the colours of its ranks; to scale, unless it is very tall."""
    cells = []
    for cell in layout.cells():
        cells.append(cell)
        if len(cells) > _MOST_BOXES:
            return note(f"{word}: {layout.describe()}, too many boxes to draw")
    rows, columns = plan.shape[:2] if len(plan.shape) > 1 else (1, *plan.shape, 1)[:2]
    height = max(40, min(round(1.3 * _WIDTH), round(_WIDTH * rows / max(columns, 1)))) if len(plan.shape) > 1 else 40
    shared = sorted({tuple(_ranks(cell)) for cell in cells if len(_ranks(cell)) > 1})
    dims = f"; dims after the second are not drawn ({len(plan.shape)} in all)" if len(plan.shape) > 2 else ""
    stripes = "; stripes: each of these ranks holds the full box" if shared else ""
    if layout.num_partials > 1:
        stripes = "; stripes: each of these ranks holds an addend"
    shapes = [f"<defs>{''.join(map(_stripes, shared))}</defs>" if shared else ""]
    for cell in cells:
        shapes += _rectangle(cell, rows, columns, height)
    caption = note(f"{word} {layout.describe()}{dims}{stripes}")
    return svg(word, _WIDTH + 2, height + 2, shapes) + caption


def _ranks(cell: Cell) -> list[int]:
    return sorted({rank for owners in cell.owners for rank in owners})


def _stripes_id(ranks: tuple[int, ...]) -> str:
    return "ranks-" + "-".join(map(str, ranks[:_MOST_STRIPES]))


def _stripes(ranks: tuple[int, ...]) -> str:
    """The pattern of a box on several ranks; slanted, for straight ones would look like boxes."""
    shown = ranks[:_MOST_STRIPES]
    bars = "".join(rect(_STRIPE * at, 0, _STRIPE, _STRIPE, colour(rank)) for at, rank in enumerate(shown))
    size = f'width="{_STRIPE * len(shown)}" height="{_STRIPE}" patternUnits="userSpaceOnUse"'
    return f'<pattern id="{_stripes_id(ranks)}" {size} patternTransform="rotate(45)">{bars}</pattern>'


def _rectangle(cell: Cell, rows: int, columns: int, height: int) -> Iterator[str]:
    if len(cell.start) > 1:
        start, stop = cell.start[:2], cell.stop[:2]
    else:  # one row
        start, stop = (0, *cell.start, 0)[:2], (1, *cell.stop, 1)[:2]
    x, y = 1 + start[1] * _WIDTH / max(columns, 1), 1 + start[0] * height / max(rows, 1)
    w, h = (stop[1] - start[1]) * _WIDTH / max(columns, 1), (stop[0] - start[0]) * height / max(rows, 1)
    ranks = tuple(_ranks(cell))
    label = ",".join(map(str, ranks[:6])) + (",…" if len(ranks) > 6 else "")
    fill = colour(ranks[0]) if len(ranks) == 1 else f"url(#{_stripes_id(ranks)})"
    yield rect(x, y, w, h, fill, f"{cell.start} to {cell.stop} on ranks {label}", ' stroke="#fff"')
    if w > 8 * len(label) and h > 14:
        if len(ranks) > 1:
            wide = 7 * len(label) + 8
            yield rect(x + (w - wide) / 2, y + h / 2 - 9, wide, 18, "#fff")
        yield text(x + w / 2, y + h / 2 + 4, label, "middle")


def _traffic(plan: ReshardPlan) -> Iterator[str]:
    """Yield the matrix of bytes between ranks, and the cost of each rank."""
    if plan.world_size > _MOST_RANKS:
        yield note(f"{plan.world_size} ranks are too many for a table; see the words below.")
        return
    matrix, ranks = plan.bytes_matrix, range(plan.world_size)
    numbers = range(1, plan.world_size + 1)
    yield "<h2>Bytes from rank (row) to rank (column)</h2>"
    rows = [[str(rank), *(human(value) if value else "·" for value in row)] for rank, row in enumerate(matrix)]
    yield table(["", *map(str, ranks)], rows, numbers)
    yield "<h2>Of each rank</h2>"
    costs = [(sum(matrix[r]), sum(row[r] for row in matrix), plan.peak_bytes(r)) for r in ranks]
    rows = [[str(rank), *map(human, cost)] for rank, cost in enumerate(costs)]
    yield table(["", "sends", "receives", "peak memory: result and buffers"], rows, (1, 2, 3))
