"""The collectives of a rank's graph: payload, bytes, positions of issue and wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dp_partition._shared.page import human_bytes
from dp_partition._torch_compat import pytree
from dp_partition.capture.phases import TAG_GRAD
from dp_partition.nodes import is_collective, is_op, is_wait, kind_of, meta_of, phases_of, value_of

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


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
    phases = zip(graph.nodes, phases_of(graph), strict=True)
    return tuple(_message(node, world, positions, phase) for node, phase in phases if is_collective(node))


def _message(node: fx.Node, world: int, positions: dict[fx.Node, int], phase: str) -> Message:
    target: Any = node.target
    name = target._schema.name.split("::")[-1]
    kind = next((pattern for pattern in _KINDS if name.startswith(pattern)), name)  # coalesced and in-place ones too
    payload = [value_of(n) for n in node.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
    mine = sum(num_bytes(tensor) for tensor in payload)
    world = int(meta_of(node).get("ranks", world))
    full = mine * world if kind == "all_gather" else mine
    sent = {"all_gather": mine * (world - 1), "all_reduce": mine}.get(kind, mine * (world - 1) // world)
    waits = wait_positions(node, positions)
    carried = tuple(dict.fromkeys(name for source in node.all_input_nodes for name in carried_names(source)))
    dtype = str(payload[0].dtype).removeprefix("torch.") if payload else "-"
    return Message(kind, dtype, full, sent, carried, phase, positions[node], max(waits), node.name, world)


def wait_positions(node: fx.Node, positions: dict[fx.Node, int]) -> list[int]:
    """Return the positions of waits for a collective's results; its own if there are none."""
    users: list[fx.Node] = list(node.users)
    waits = [user for user in users if is_wait(user)]
    waits += [inner for user in users if not is_wait(user) for inner in user.users if is_wait(inner)]  # through getitem
    return [positions[wait] for wait in waits] or [positions[node]]


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def carried_names(node: fx.Node, depth: int = 12) -> Iterable[str]:
    """Yield names of parameters with values or gradients that reach a node through packing alone."""
    name = name_of(node)
    if name is not None:
        yield name
        return
    operator = str(node.target).split(".")[1] if is_op(node) else ""
    if operator in _PACKING and depth:
        sources = node.all_input_nodes if operator in ("cat", "_chunk_cat") else node.all_input_nodes[:1]
        for source in sources:
            yield from carried_names(source, depth - 1)


_PACKING = frozenset([
    "cat", "_chunk_cat", "reshape", "view", "constant_pad_nd", "contiguous", "transpose", "slice", "clone", "_to_copy",
    "wait_tensor", "reduce_scatter_tensor", "all_reduce_",  # on the way to a second collective
    "div", "add",  # the average over micro-batches
])  # fmt: skip


def name_of(node: fx.Node) -> str | None:
    """Return the parameter of a node: itself, or that of its gradient."""
    if node.target is TAG_GRAD:
        return str(node.args[1])
    if "gradient" in meta_of(node):
        return meta_of(node)["gradient"]
    return meta_of(node)["input"].name if kind_of(node) == "param" else None


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, torch.Tensor)]


def explain_sums(messages: tuple[Message, ...]) -> list[str]:
    """Return a line for each kind of collective: number and bytes sent by a rank."""
    lines = []
    for kind in dict.fromkeys(message.kind for message in messages):
        sizes = [message.sent_bytes for message in messages if message.kind == kind]
        lines.append(
            f"  {len(sizes)} {kind} send {sum(sizes):,} bytes ({human_bytes(sum(sizes))}) a step from each rank"
        )
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
