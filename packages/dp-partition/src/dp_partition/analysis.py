"""Analysis of one rank's graph: its collectives, and its live memory at every node, from fake values. Nothing is run.

A tensor's memory begins at its first node and ends after the last use of any view of it: fx
deletes names after their last use. A collective's payload is held until its wait. Gloo, the backend of CPU
tensors, makes copies of its own. Temporary memory of kernels within one node is not
counted, except that of packing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from dp_partition._shared.page import human_bytes
from dp_partition._torch_compat import collectives, storage_key
from dp_partition.capture.phases import carried_names, parameter_of
from dp_partition.nodes import Phase, aten, is_collective, is_tensor, is_wait, kind_of, meta_of, tensors_of
from dp_partition.plan.placements import NodeType

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
        dtype: Dtype of the payload, as torch names it.
        whole_bytes: Bytes of the full tensor: the sum, the gathered or the scattered one.
        sent_bytes: Bytes sent by the rank, by the meaning of the operation: a sum's payload once, its own shard to
            each other rank, the others' shards to them. Extra traffic of algorithms (rings, trees) belongs to the link.
        carries: Names of the parameters with values or gradients in it.
        phase: Part of the step at its issue.
        issued: Position of its node in the graph.
        awaited: Position of its wait.
        node: Name of its node.
        ranks: Number of its ranks.
    """

    kind: str
    dtype: str
    whole_bytes: int
    sent_bytes: int
    carries: tuple[str, ...]
    phase: str
    issued: int
    awaited: int
    node: str
    ranks: int


def messages_of(graph: fx.Graph, world: int) -> tuple[Message, ...]:
    """Return every collective of a graph with local values in ``meta["val"]``, in issue order."""
    positions = {node: index for index, node in enumerate(graph.nodes)}
    messages: list[Message] = []
    phase: Phase = "forward"
    for node in graph.nodes:
        phase = meta_of(node).get("phase", phase)  # packing is in the phase of the node before
        if not is_collective(node):
            continue
        name = node.target._schema.name.split("::")[-1]
        kind = next((kind for kind in _COLLECTIVES if name.startswith(kind)), name)  # coalesced and in-place ones too
        payload: list[torch.Tensor] = [n.meta["val"] for n in node.all_input_nodes if is_tensor(n)]
        mine = sum(tensor.nbytes for tensor in payload)
        ranks = int(meta_of(node).get("ranks", world))
        full = mine * ranks if kind == "all_gather" else mine
        sent = {"all_gather": mine * (ranks - 1), "all_reduce": mine}.get(kind, mine * (ranks - 1) // ranks)
        awaited = max(wait_positions(node, positions))
        carried = tuple(dict.fromkeys(name for source in node.all_input_nodes for name in carried_names(source)))
        dtype = str(payload[0].dtype).removeprefix("torch.") if payload else "-"
        messages.append(Message(kind, dtype, full, sent, carried, phase, positions[node], awaited, node.name, ranks))
    return tuple(messages)


def wait_positions(node: fx.Node, positions: dict[fx.Node, int]) -> list[int]:
    """Return the positions of waits for a collective's results; its own if there are none."""
    users: list[fx.Node] = list(node.users)
    waits = [user for user in users if is_wait(user)]
    waits += [inner for user in users if not is_wait(user) for inner in user.users if is_wait(inner)]  # through getitem
    return [positions[wait] for wait in waits] or [positions[node]]


def explain_sums(messages: tuple[Message, ...]) -> list[str]:
    """Return a line for each kind of collective: number and bytes sent by a rank."""
    lines = []
    for kind in dict.fromkeys(message.kind for message in messages):
        sent = [message.sent_bytes for message in messages if message.kind == kind]
        lines.append(f"  {len(sent)} {kind} send {sum(sent):,} bytes ({human_bytes(sum(sent))}) a step from each rank")
    return lines or ["  nothing is sent"]


def explain_messages(messages: tuple[Message, ...], name: str) -> list[str]:
    """Return lines about the collectives of one parameter or its gradient."""
    lines = []
    for number, message in enumerate(messages):
        if name in message.carries:
            others = [other for other in message.carries if other != name]
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            along = f", with {', '.join(others[:3])}{more}" if others else ""
            which = f"  {message.kind} {number} of {len(messages)} in {message.phase}"
            lines.append(f"{which}: {human_bytes(message.whole_bytes)}{along}")
    return lines or ["  no collective carries it"]


KINDS = ("parameters", "optimizer", "buffers", "batch", "activations", "gathered", "gradients", "collectives", "update")

_COPYING = (collectives.all_reduce.default, collectives.all_reduce_coalesced.default)  # they send their result's memory

# Gloo's own copy, while it gathers (torch 2.13), and what it receives to sum where that is awaited (`backends`).
_GLOO_COPIES = ("all_gather", "reduce_scatter")

_PLACEHOLDERS = {"param": "parameters", "buffer": "buffers", "state": "optimizer", "arg": "batch"}


@dataclass(frozen=True)
class Memory:
    """Live bytes on a rank while each node runs."""

    nodes: tuple[str, ...]
    # for every node the bytes of each of `KINDS`: tensors alive while it runs, its result included
    live: tuple[tuple[int, ...], ...]
    resident: tuple[int, ...]  # bytes of each kind alive before and after the step

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, self.live))

    @property
    def peak(self) -> int:
        """Position of the node with the most live memory."""
        return max(range(len(self.live)), key=self.totals.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=sum(self.resident))

    @property
    def peak_kinds(self) -> dict[str, int]:
        """Bytes of each kind at the peak, without empty kinds."""
        at = self.live[self.peak] if self.live else self.resident
        return {kind: size for kind, size in zip(KINDS, at, strict=True) if size}

    @property
    def resident_bytes(self) -> int:
        """Bytes alive between steps: parameters, buffers, optimizer state, the batch."""
        return sum(self.resident)


@dataclass(eq=False)
class _Block:
    kind: str
    size: int
    born: int
    last: int = field(default=-1)
    resident: bool = False


def live_memory(graph: fx.Graph, *, late: bool = False, on_cpu: bool = True) -> Memory:
    """Follow every block of memory through a graph with local values in ``meta["val"]``.

    Args:
        graph: A rank's graph.
        on_cpu: Tensors of the CPU stay there: gloo, and packing on the CPU, then make copies.
        late: The backend's copies live until the waits, as for ranks apart in time;
            else a collective is over when the next node runs.
    """
    nodes = list(graph.nodes)
    blocks = _blocks(nodes, late, on_cpu)
    changes = {kind: [0] * (len(nodes) + 1) for kind in KINDS}
    for block in set(blocks.values()):
        changes[block.kind][0 if block.resident else block.born] += block.size
        changes[block.kind][len(nodes) if block.resident else min(block.last + 1, len(nodes))] -= block.size
    columns = [list(accumulate(changes[kind]))[: len(nodes)] for kind in KINDS]
    for position, node in enumerate(nodes):
        if on_cpu and node.target is aten._chunk_cat.default:
            # Packing on the CPU copies and pads rows that do not divide.
            values, world = [member.meta["val"] for member in node.args[0]], node.args[2]
            padded = [x for x in values if x.device.type == "cpu" and x.shape[0] % world]
            temporary = sum(-(-x.shape[0] // world) * world * x[0].nbytes for x in padded)
            columns[KINDS.index("collectives")][position] += temporary
    resident = [sum(b.size for b in set(blocks.values()) if b.resident and b.kind == kind) for kind in KINDS]
    live = tuple(zip(*columns, strict=True))
    return Memory(tuple(node.name for node in nodes), live, tuple(resident))


def _blocks(nodes: list[fx.Node], late: bool, on_cpu: bool) -> dict[Any, _Block]:
    positions = {node: position for position, node in enumerate(nodes)}
    blocks: dict[Any, _Block] = {}
    for position, node in enumerate(nodes):
        last = max((positions[user] for user in node.users), default=position)
        for index, tensor in enumerate(tensors_of(node)):
            key = storage_key(tensor)
            block = blocks.get(key)
            if block is None and is_wait(node):  # the collective's own result; a fake one is another tensor
                block = blocks[key] = blocks[storage_key(tensors_of(node.all_input_nodes[0])[index])]
            if block is None:
                size = tensor.untyped_storage().nbytes()
                resident = node.op in ("placeholder", "get_attr")  # alive between steps
                block = blocks[key] = _Block(_kind_of_memory(node), size, position, resident=resident)
            block.last = max(block.last, last)  # views prolong it
        if is_collective(node) and node.target not in _COPYING:  # the backend holds its payload until the wait
            waited = max(wait_positions(node, positions))
            for source in node.all_input_nodes:
                for tensor in tensors_of(source):
                    held = blocks[storage_key(tensor)]
                    held.last = max(held.last, waited)
            target: Any = node.target
            name = target._schema.name.split("::")[-1]
            sent = [x for source in node.all_input_nodes for x in tensors_of(source) if x.device.type == "cpu"]
            if on_cpu and sent and name.startswith(_GLOO_COPIES):
                is_gather = name.startswith("all_gather")
                copied = sum(x.nbytes for x in (tensors_of(node) if is_gather else sent))
                ends = waited if late or not is_gather else position
                blocks[node] = _Block("collectives", copied, position, ends)
                if not is_gather:  # the sum of what was received is made behind the wait (`backends`), not at the issue
                    blocks[storage_key(tensors_of(node)[0])].born = waited
    return blocks


def _kind_of_memory(node: fx.Node) -> str:
    if node.op == "placeholder":
        return _PLACEHOLDERS.get(kind_of(node), "batch")
    if node.op == "get_attr":
        return "buffers"
    if meta_of(node).get("node_type") is NodeType.GRAD or parameter_of(node) is not None:
        return "gradients"
    if is_collective(node) or any(is_collective(user) for user in node.users):
        return "collectives"
    if meta_of(node).get("node_type") is NodeType.PARAM and meta_of(node).get("phase") != "optimizer":
        return "gathered"
    return "update" if meta_of(node).get("phase") == "optimizer" else "activations"
