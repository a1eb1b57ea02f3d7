"""Less memory on each rank: passes on the single-device graph, carried out by `insert_collectives`.

ZeRO-1 and ZeRO-2 shard optimizer state of full parameters: each rank updates its rows. Both markers are the identity:
`OWN_ROWS` stands for the rows of a parameter updated by a rank (then a view of the parameter's own memory),
`SHARE_ROWS` puts the rows of all ranks into the full parameter after the update (an all-gather and a copy).

Reshard after forward frees gathered parameters after forward, and gathers them again for backward. It marks sharded
parameters with their views and casts in forward. A marked parameter is gathered once for each half of the step, and
its views are taken again: forward's would keep the gathered parameter alive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Placement, Shard

from dp_partition.capture.phases import library
from dp_partition.nodes import aten, base_of, kind_of, meta_of, mutated_inputs, substitution, viewed_input
from dp_partition.sharding.propagate import is_gradient

library.define("own_rows(Tensor(a) self) -> Tensor(a)")
library.define("share_rows(Tensor(a!) self, Tensor rows) -> ()")
library.impl("own_rows", lambda param: param, "CompositeExplicitAutograd")
library.impl("share_rows", lambda param, rows: None, "CompositeExplicitAutograd")

OWN_ROWS: Any = torch.ops.dp_partition.own_rows.default
SHARE_ROWS: Any = torch.ops.dp_partition.share_rows.default


def update_own_rows(graph: fx.Graph, names: Collection[str]) -> None:
    """Make nodes after the last gradient work on the rank's rows of named parameters."""
    nodes = list(graph.nodes)
    last = max((position for position, node in enumerate(nodes) if is_gradient(node)), default=-1)
    if last < 0:  # no gradient, so no update
        return
    late = dict.fromkeys(node for node in nodes[last + 1 :] if node.op != "output")  # ordered, for the insertion point
    output = nodes[-1]
    for node in nodes:
        if kind_of(node) != "param" or meta_of(node)["input"].name not in names:
            continue
        early = [node, *_early_views(node, late)]
        users = {user for alias in early for user in alias.users if user in late}
        if not users:
            continue
        with graph.inserting_before(next(user for user in late if user in users)):
            rows = graph.call_function(OWN_ROWS, (node,))
            meta_of(rows).update({"val": node.meta["val"], "phase": "optimizer"})
            again = {node: rows}
            for view in early[1:]:  # views of the updated rows
                again[view] = graph.node_copy(view, substitution(again))
                meta_of(again[view])["phase"] = "optimizer"
        for alias in early:
            for user in [user for user in alias.users if user in users]:
                user.replace_input_with(alias, again[alias])
        with graph.inserting_before(output):
            share = graph.call_function(SHARE_ROWS, (node, rows))
        meta_of(share).update({"val": None, "phase": "optimizer"})


def _early_views(node: fx.Node, late: Collection[fx.Node]) -> list[fx.Node]:
    """Return early views of a parameter with late uses, each after its base."""
    views: list[fx.Node] = []
    for user in node.users:
        if user not in late and base_of(user) is node:
            behind = _early_views(user, late)
            if behind or any(one in late for one in user.users):
                views += [user, *behind]
    return views


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
