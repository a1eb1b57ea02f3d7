"""Reshard after forward: free gathered parameters after forward, and gather them again for backward.

A pass over the single-device graph. It chooses the sharded parameters, and marks them with their views and casts in
forward. `insert_collectives` gathers a marked parameter once for each half of the step, and takes its views again:
forward's would keep the gathered parameter alive.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch.distributed.tensor import Placement, Shard

from dp_partition.capture.node_meta import kind_of, meta_of
from dp_partition.ops import aten, mutated_inputs, viewed_input

_CASTS = (aten._to_copy.default,)


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
    chosen = [derived for node in sharded if (derived := _idle(node, place))]
    for derived in chosen:
        for node in derived:
            meta_of(node)["gather_again"] = True
    return len(chosen)


def _idle(node: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Return a parameter's views and casts in forward, if unused between forward and backward.

    Empty otherwise, or if forward or backward write it or a cast of it.
    """
    derived: list[fx.Node] = []
    queue = [node]
    while queue:
        for user in queue.pop().users:
            follows = user.op == "call_function" and (viewed_input(user) is not None or user.target in _CASTS)
            if follows and meta_of(user).get("phase") == "forward" and user not in derived:
                derived.append(user)
                queue.append(user)
    users = [user for one in (node, *derived) for user in one.users if user not in derived]
    if any(set(mutated_inputs(user)) & {node, *derived} for user in users if meta_of(user).get("phase") != "optimizer"):
        return []  # a second gather or cast would lack the written values
    forward = [place[user] for user in users if meta_of(user).get("phase") == "forward"]
    backward = [place[user] for user in users if meta_of(user).get("phase") == "backward"]
    if not forward or not backward or max(forward) >= min(backward):
        return []  # no pause between them
    return [node, *derived]
