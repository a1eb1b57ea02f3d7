"""Reshard after forward: free gathered parameters after forward, and gather them again for backward.

A pass over the single-device graph. It chooses the sharded parameters, marks them, and gives backward its own views
in place of forward's: those would keep the gathered parameter alive. `insert` gathers a marked
parameter once for each half of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Placement, Shard

from dp_partition.capture.node_meta import kind_of, meta_of
from dp_partition.ops import aten, mutated_inputs, substitution, viewed_input

_CASTS = (aten._to_copy.default,)


@dataclass(frozen=True)
class Idle:
    """A sharded parameter used in both forward and backward.

    Attributes:
        param: Its placeholder.
        derived: Its views and casts in forward, in order.
    """

    param: fx.Node
    derived: tuple[fx.Node, ...]


def reshard_after_forward(graph: fx.Graph, homes: Mapping[fx.Node, Placement], mode: bool | frozenset[str]) -> int:
    """Mark the parameters to gather twice; return their number.

    Args:
        graph: The single-device graph, with phases.
        homes: Placements of the placeholders.
        mode: ``True``: all used in both halves. ``False``: none. Names: those, as far as both halves use them.
    """
    if mode is False:
        return 0
    nodes = list(graph.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    sharded = [n for n in nodes if kind_of(n) == "param" and isinstance(homes[n], Shard)]
    if isinstance(mode, frozenset):
        sharded = [n for n in sharded if meta_of(n)["input"].name in mode]
    chosen = [one for node in sharded if (one := _idle(node, place)) is not None]
    for one in chosen:
        meta_of(one.param)["gather_again"] = True
        _views_for_backward(graph, one)
    return len(chosen)


def _idle(node: fx.Node, place: dict[fx.Node, int]) -> Idle | None:
    """Return the parameter's idle time; None without one, or if forward or backward write it or a cast of it."""
    derived: list[fx.Node] = []
    queue = [node]
    while queue:
        for user in queue.pop().users:
            if _follows(user) and meta_of(user).get("phase") == "forward" and user not in derived:
                derived.append(user)
                queue.append(user)
    users = [user for one in (node, *derived) for user in one.users if user not in derived]
    if any(set(mutated_inputs(user)) & {node, *derived} for user in users if meta_of(user).get("phase") != "optimizer"):
        return None  # a second gather or cast would lack the written values
    forward = [place[user] for user in users if meta_of(user).get("phase") == "forward"]
    backward = [place[user] for user in users if meta_of(user).get("phase") == "backward"]
    if not forward or not backward or max(forward) >= min(backward):
        return None  # no pause between them
    return Idle(node, tuple(sorted(derived, key=place.__getitem__)))


def _follows(node: fx.Node) -> bool:
    """Return True for a view or a cast of one tensor."""
    return node.op == "call_function" and (viewed_input(node) is not None or node.target in _CASTS)


def _views_for_backward(graph: fx.Graph, one: Idle) -> None:
    """Copy forward's views and casts for their users in backward."""
    late = {n for n in one.derived if any(meta_of(user).get("phase") == "backward" for user in n.users)}
    needed = set(late)  # and the views that these are taken of
    for node in reversed(one.derived):
        if node in needed:
            needed.update(source for source in node.all_input_nodes if source in one.derived)
    users = {user for node in late for user in node.users if meta_of(user).get("phase") == "backward"}
    if not users:
        return
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(min(users)):  # fx orders nodes by position
        for node in one.derived:
            if node in needed:
                copies[node] = graph.node_copy(node, substitution(copies))
                meta_of(copies[node])["phase"] = "backward"
    for node in late:
        for user in [u for u in node.users if u in users]:
            user.replace_input_with(node, copies[node])
