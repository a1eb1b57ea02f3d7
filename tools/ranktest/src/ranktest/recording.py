"""The log of what was communicated.

Bytes are logical: what the operation has to move between ranks by its meaning, not what an algorithm (ring, tree)
moves. What a rank sends to itself is not counted. For a group of P ranks and this rank r:

| op | `bytes_sent[p]` | `bytes_received` |
|---|---|---|
| all_reduce | the payload once, written in the slot of the next rank of the group | the payload once |
| all_gather | own shard to every other rank | the other ranks' shards |
| reduce_scatter | the part that rank p keeps | own part from every other rank |
| all_to_all | the split for p | the splits from the others |
| broadcast | root: payload to every other rank | others: payload |
| reduce | others: payload to root | root: payload from every other rank |
| gather | others: payload to root | root: the others' parts |
| scatter | root: p's part | others: own part |
| send, recv | payload to the peer | payload |
| barrier | 0 | 0 |

One call is one event, also when it coalesces several tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ranktest import _torch_compat as compat
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
        bytes_received: bytes from all other ranks of the group.
        dtype: of the (first) tensor; None for a barrier.
        async_op: whether the caller asked for a handle; point-to-point calls always do.
        group: the group's description (`default_pg`, `mesh_tp`), else its name.
        peer: the other side of a send or recv, numbered in the default group; None for collectives and any-source.
    """

    op: str
    ranks: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    bytes_received: int
    dtype: torch.dtype | None
    async_op: bool
    group: str
    peer: int | None = None


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

    def bytes_received(self, op: str | None = None) -> int:
        """Bytes this rank received from others."""
        return sum(event.bytes_received for event in self._events if op is None or event.op == op)

    def around(self, call: Call, execute: Execute) -> Any:
        """Note the call once it was accepted, then return what it returned."""
        event = describe(call)
        result = execute(call.arguments)
        self._events.append(event)
        return result


def describe(call: Call) -> Event:
    """The event of a call, from its arguments alone."""
    sent, received = _TRAFFIC[call.op](call)
    tensors = [tensor for value in call.arguments.values() for tensor in tensors_in(value)]
    peer = call.arguments.get("dst", call.arguments.get("src"))
    return Event(
        op=call.op,
        ranks=call.global_ranks,
        bytes_sent=tuple(sent),
        bytes_received=received,
        dtype=None if call.op == "barrier" or not tensors else tensors[0].dtype,
        async_op=call.async_op,
        group=compat.group_label(call.group),
        peer=None if peer is None or call.op not in ("send", "recv") else call.global_ranks[peer],
    )


def _to(call: Call, rank: int, part: int) -> list[int]:
    return [part if p == rank and p != call.rank else 0 for p in range(call.size)]


def _to_others(call: Call, parts: Sequence[int]) -> list[int]:
    return [0 if p == call.rank else part for p, part in enumerate(parts)]


Traffic = tuple[list[int], int]


def _all_reduce(call: Call) -> Traffic:
    payload = num_bytes(call.arguments["tensors"]) if call.size > 1 else 0
    return _to(call, (call.rank + 1) % call.size, payload), payload


def _all_gather(call: Call) -> Traffic:
    own = num_bytes(call.arguments[call.operator.reads])
    outputs = call.arguments[call.operator.writes]
    if isinstance(outputs, list) and outputs and isinstance(outputs[0], list):  # one list of parts per input
        received = sum(num_bytes(part) for parts in outputs for p, part in enumerate(parts) if p != call.rank)
    else:
        received = num_bytes(outputs) - own
    return _to_others(call, [own] * call.size), received


def _reduce_scatter(call: Call) -> Traffic:
    inputs = call.arguments[call.operator.reads]
    kept = num_bytes(call.arguments[call.operator.writes])
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], list):
        parts = [sum(num_bytes(rows[p]) for rows in inputs) for p in range(call.size)]
    else:
        parts = [num_bytes(inputs) // call.size] * call.size
    return _to_others(call, parts), kept * (call.size - 1)


def _all_to_all(call: Call) -> Traffic:
    if call.name == "alltoall_":
        sent = [num_bytes(tensor) for tensor in call.arguments["input_tensors"]]
        received = [num_bytes(tensor) for tensor in call.arguments["output_tensors"]]
    else:
        sent = _splits(call.arguments["input"], call.arguments["input_split_sizes"], call.size)
        received = _splits(call.arguments["output"], call.arguments["output_split_sizes"], call.size)
    return _to_others(call, sent), sum(_to_others(call, received))


def _splits(tensor: torch.Tensor, sizes: list[int], num_ranks: int) -> list[int]:
    if not sizes:
        return [num_bytes(tensor) // num_ranks] * num_ranks
    row = num_bytes(tensor) // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [size * row for size in sizes]


def _broadcast(call: Call) -> Traffic:
    payload = num_bytes(call.arguments["tensors"])
    if call.arguments["root_rank"] == call.rank:
        return _to_others(call, [payload] * call.size), 0
    return [0] * call.size, payload


def _reduce(call: Call) -> Traffic:
    payload = num_bytes(call.arguments["tensors"])
    root = call.arguments["root_rank"]
    return _to(call, root, payload), payload * (call.size - 1) if root == call.rank else 0


def _gather(call: Call) -> Traffic:
    root = call.arguments["root_rank"]
    received = 0
    if root == call.rank:
        received = sum(
            num_bytes(part)
            for parts in call.arguments["output_tensors"]
            for p, part in enumerate(parts)
            if p != call.rank
        )
    return _to(call, root, num_bytes(call.arguments["input_tensors"])), received


def _scatter(call: Call) -> Traffic:
    if call.arguments["root_rank"] != call.rank:
        return [0] * call.size, num_bytes(call.arguments["output_tensors"])
    parts = [sum(num_bytes(rows[p]) for rows in call.arguments["input_tensors"]) for p in range(call.size)]
    return _to_others(call, parts), 0


def _send(call: Call) -> Traffic:
    return _to(call, call.arguments["dst"], num_bytes(call.arguments["tensors"])), 0


def _recv(call: Call) -> Traffic:
    from_self = call.arguments.get("src") == call.rank
    return [0] * call.size, 0 if from_self else num_bytes(call.arguments["tensors"])


def _barrier(call: Call) -> Traffic:
    return [0] * call.size, 0


_TRAFFIC = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _recv,
    "barrier": _barrier,
}
