"""The log of what was communicated.

Bytes are logical: what the operation has to move between ranks by its meaning, not what an algorithm (ring, tree)
moves; what a rank sends to itself is not counted. ranktest's README has the table.

One call is one event, also when it coalesces several tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ranktest.intercept import Call, Execute
from ranktest.operators import num_bytes, tensors_in


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
    """What one rank communicated inside a `with ranks.record() as log:` block, in order."""

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
    return Event(
        op=call.op,
        ranks=call.global_ranks,
        bytes_sent=tuple(0 if rank == call.rank else sent for rank, sent in enumerate(_SENT[call.op](call))),
        dtype=None if call.op == "barrier" or not tensors else tensors[0].dtype,
    )


def _to(call: Call, rank: int, part: int) -> list[int]:
    return [part if p == rank else 0 for p in range(call.size)]


def _all_reduce(call: Call) -> list[int]:
    return _to(call, (call.rank + 1) % call.size, num_bytes(call.arguments["tensors"]))


def _all_gather(call: Call) -> list[int]:
    return [num_bytes(call.arguments[call.operator.reads])] * call.size


def _reduce_scatter(call: Call) -> list[int]:
    inputs = call.arguments[call.operator.reads]
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], list):
        return _parts(inputs, call.size)
    return [num_bytes(inputs) // call.size] * call.size


def _all_to_all(call: Call) -> list[int]:
    if call.name == "alltoall_":
        return [num_bytes(tensor) for tensor in call.arguments["input_tensors"]]
    tensor, sizes = call.arguments["input"], call.arguments["input_split_sizes"]
    if not sizes:
        return [num_bytes(tensor) // call.size] * call.size
    row = num_bytes(tensor) // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [size * row for size in sizes]


def _broadcast(call: Call) -> list[int]:
    return [num_bytes(call.arguments["tensors"]) if call.is_root else 0] * call.size


def _reduce(call: Call) -> list[int]:
    return _to(call, call.arguments["root_rank"], num_bytes(call.arguments["tensors"]))


def _gather(call: Call) -> list[int]:
    return _to(call, call.arguments["root_rank"], num_bytes(call.arguments[call.operator.reads]))


def _scatter(call: Call) -> list[int]:
    return _parts(call.arguments["input_tensors"], call.size) if call.is_root else [0] * call.size


def _send(call: Call) -> list[int]:
    return _to(call, call.arguments["dst"], num_bytes(call.arguments["tensors"]))


def _nothing(call: Call) -> list[int]:
    return [0] * call.size


def _parts(rows: list[list[torch.Tensor]], size: int) -> list[int]:
    """Bytes for each rank, of lists that hold one tensor for each."""
    return [sum(num_bytes(row[p]) for row in rows) for p in range(size)]


#: What a call sends to each rank of its group; the slot of the rank itself is left out later.
_SENT = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _nothing,
    "barrier": _nothing,
}
