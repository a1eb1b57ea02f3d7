"""Text for people: tables for terminals and logs, ranks, and sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shard_spec._shared.problems import PlanError, Problem

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def bytes_of(size: object, argument: str) -> int:
    """Return a number of bytes: ``"80GiB" -> 85899345920``. A number is bytes already; text needs a unit.

    Raises:
        PlanError: ``invalid-argument`` about ``argument``.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise PlanError(
            Problem(
                "invalid-argument",
                argument,
                found=f"{size!r:.100}",
                hint="write the unit, for example 80GiB (2**30 bytes each), 80GB (10**9) or 85899345920B",
            )
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def human_count(number: int) -> str:
    """Format a count: ``8030261248 -> "8.03 B"``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def human_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: ``[0, 1, 2, 5] -> "0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):  # runs of consecutive ranks
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@dataclass(frozen=True)
class Table:
    """Rows under a head. As text, columns have the width of their widest cell, right-aligned for ``right``."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()

    def __str__(self) -> str:
        cells = [list(map(str, self.head)), *[list(map(str, row)) for row in self.rows]]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.head))]

        def line(row: list[str]) -> str:
            aligned = enumerate(zip(row, widths, strict=True))  # numbers to the right
            parts = [cell.rjust(width) if at in self.right else cell.ljust(width) for at, (cell, width) in aligned]
            return "  ".join(parts).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([line(cells[0]), rule, *[line(row) for row in cells[1:]]])
