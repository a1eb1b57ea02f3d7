"""Plain-text tables, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shard_spec._shared.page import human_bytes

if TYPE_CHECKING:
    from shard_spec.estimate.communication import Communication
    from shard_spec.estimate.memory import Memory


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


Parts = list["str | Table"]


def joined(parts: Parts) -> str:
    """Join lines and tables to one text."""
    return "\n".join(map(str, parts))


def memory_parts(memory: Memory) -> Parts:
    """Return one line for each group of ranks of equal needs."""
    groups = memory.groups()
    parts = list(groups[0][1]) if groups else []
    rows = [
        [human_ranks(ranks), *map(human_bytes, sizes.values()), human_bytes(sum(sizes.values()))]
        for ranks, sizes in groups
    ]
    shown = rows if len(rows) <= 16 else [*rows[:15], [f"... {len(rows) - 15} more groups", *[""] * (len(parts) + 1)]]
    parts_of_page: Parts = [Table(["ranks", *parts, "total"], shown, range(1, len(parts) + 2))]
    parts_of_page.append(f"optimizer: {memory.optimizer.name}")
    if memory.moment:
        parts_of_page.append(f"peak: {memory.moment}; activations, logits and loss are an estimate")
    parts_of_page += [f"- {note}" for note in memory.notes]
    if memory.uncounted:
        parts_of_page.append(f"not counted (sharded by a Sharder): {', '.join(memory.uncounted)}")
    return parts_of_page


def communication_parts(found: Communication) -> Parts:
    """Return one line for each axis and kind of collective."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for transfer in found.transfers:
        entry = sums.setdefault((transfer.axis, transfer.what, transfer.op), [0, 0.0])
        entry[0] += transfer.count
        entry[1] += transfer.sent_bytes
    rows = [[*key, str(int(count)), human_bytes(sent)] for key, (count, sent) in sums.items()]
    head = ["axis", "what", "collective", "count", "sent by each rank"]
    parts: Parts = [Table(head, rows, (3, 4)) if rows else "nothing moves"]
    if found.seconds is not None:
        times = ", ".join(f"{axis} {seconds * 1e3:.2f} ms" for axis, seconds in found.seconds.items())
        parts.append(f"time of the collectives, one after another: {times}")
    return [*parts, *(f"- {line}" for line in found.assumptions)]
