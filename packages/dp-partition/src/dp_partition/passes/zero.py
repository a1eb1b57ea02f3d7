"""Full parameters, sharded optimizer state (ZeRO-1 and ZeRO-2): each rank updates its rows.

The pass works on the single-device graph, where both markers are the identity: `OWN_ROWS` stands for the rows of a
parameter updated by a rank, `SHARE_ROWS` puts the rows of all ranks into the full parameter after the update. `insert`
turns the first into a view of the parameter's own memory and the second into an all-gather and a copy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from dp_partition.capture.node_meta import kind_of, meta_of
from dp_partition.capture.phases import library
from dp_partition.ops import base_of, substitution
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
