"""The log of what was communicated.

Bytes are logical: what the operation has to move between ranks by its meaning, not what an algorithm (ring, tree)
moves; what a rank sends to itself is not counted. ranktest's README has the table.

One call is one event, also when it coalesces several tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ranktest.intercept import Call, Execute, num_bytes, tensors_in


@dataclass(frozen=True)
class Event:
    """One communication call of this rank.

    Attributes:
        op: canonical name (`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `scatter`,
            `gather`, `send`, `recv`, `barrier`, `reduce`).
        ranks: the group's ranks, as numbered in the default group.
        bytes_sent: bytes to each rank of the group, in group order; own slot 0.
        dtype: of the (first) tensor; None for a barrier.
    """

    op: str
    ranks: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    dtype: torch.dtype | None


class Log:
    """The communication of one rank inside a `with ranks.record() as log:` block, in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, in the order of their issue."""
        return tuple(self._events)

    @property
    def ops(self) -> tuple[str, ...]:
        """The canonical names of all events, in order."""
        return tuple(event.op for event in self._events)

    def count(self, op: str | None = None) -> int:
        """Number of events, of one op or of all."""
        return sum(op is None or event.op == op for event in self._events)

    def bytes_sent(self, op: str | None = None) -> int:
        """Bytes this rank sent to others."""
        return sum(sum(event.bytes_sent) for event in self._events if op is None or event.op == op)

    def around(self, call: Call, execute: Execute) -> Any:
        """Note the call once it was accepted, then return what it returned."""
        event = describe(call)
        result = execute(call.arguments)
        self._events.append(event)
        return result


def describe(call: Call) -> Event:
    """The event of a call, from its arguments alone."""
    tensors = [tensor for value in call.arguments.values() for tensor in tensors_in(value)]
    sent = [0 if rank == call.rank else size for rank, size in enumerate(bytes_sent(call))]
    return Event(
        call.op, call.global_ranks, tuple(sent), tensors[0].dtype if tensors and call.op != "barrier" else None
    )


def bytes_sent(call: Call) -> list[int]:
    """Bytes for each rank of the group, the own slot not yet emptied; the README has the table."""
    arguments, size = call.arguments, call.size
    payload: Any = arguments.get(call.operator.reads)

    def to(rank: int) -> list[int]:
        return [num_bytes(payload) if p == rank else 0 for p in range(size)]

    match call.op:
        case "all_reduce":
            return to((call.rank + 1) % size)
        case "all_gather":
            return [num_bytes(payload)] * size
        case "reduce_scatter" if not (isinstance(payload, list) and payload and isinstance(payload[0], list)):
            return [num_bytes(payload) // size] * size
        case "reduce_scatter" | "scatter":  # lists that hold one tensor for each rank
            return [sum(num_bytes(row[p]) for row in payload) for p in range(size)] if payload else [0] * size
        case "all_to_all" if call.name == "alltoall_":
            return [num_bytes(tensor) for tensor in payload]
        case "all_to_all" if splits := arguments["input_split_sizes"]:
            row = num_bytes(payload) // payload.shape[0] if payload.dim() and payload.shape[0] else 0
            return [split * row for split in splits]
        case "all_to_all":
            return [num_bytes(payload) // size] * size
        case "broadcast":
            return [num_bytes(payload) if call.is_root else 0] * size
        case "reduce" | "gather":
            return to(arguments["root_rank"])
        case "send":
            return to(arguments["dst"])
        case _:  # recv and barrier
            return [0] * size
