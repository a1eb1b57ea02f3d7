"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def human_seconds(seconds: float) -> str:
    """``0.0015 -> "1.50 ms"``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table with columns as wide as their widest cell; columns in ``right`` are aligned to the right."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        aligned = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in aligned).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])
