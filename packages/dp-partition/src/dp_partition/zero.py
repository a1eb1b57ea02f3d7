"""Parameters whole, optimizer state sharded (ZeRO-1 and ZeRO-2): the optimizer updates this rank's rows of each
parameter.

The pass works on the single-device graph, where both markers are the identity: `OWN_ROWS` names the rows of a parameter
that a rank updates, `SHARE_ROWS` puts the rows of all ranks back into the whole parameter after the update. `insert`
turns the first into a view of the parameter's own memory and the second into an all-gather and a copy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from dp_partition.capture.tagging import library
from dp_partition.propagate import is_gradient

library.define("own_rows(Tensor(a) self) -> Tensor(a)")
library.define("share_rows(Tensor(a!) self, Tensor rows) -> ()")


def _own_rows(param: torch.Tensor) -> torch.Tensor:
    return param


def _share_rows(param: torch.Tensor, rows: torch.Tensor) -> None:
    return None


library.impl("own_rows", _own_rows, "CompositeExplicitAutograd")
library.impl("share_rows", _share_rows, "CompositeExplicitAutograd")

OWN_ROWS: Any = torch.ops.dp_partition.own_rows.default
SHARE_ROWS: Any = torch.ops.dp_partition.share_rows.default


def update_own_rows(graph: fx.Graph, names: Collection[str]) -> None:
    """Let everything after the last gradient work on the rank's rows of the named parameters."""
    nodes = list(graph.nodes)
    last = max((position for position, node in enumerate(nodes) if is_gradient(node)), default=-1)
    if last < 0:
        return
    late = set(nodes[last + 1 :])
    output = nodes[-1]
    for node in nodes:
        entry = node.meta.get("input")
        if node.op != "placeholder" or getattr(entry, "kind", "") != "param" or entry.name not in names:
            continue
        users = [user for user in node.users if user in late and user is not output]
        if not users:
            continue
        with graph.inserting_before(next(user for user in nodes if user in users)):
            rows = graph.call_function(OWN_ROWS, (node,))
        rows.meta.update(val=node.meta["val"], phase="optimizer")
        for user in users:
            user.replace_input_with(node, rows)
        with graph.inserting_before(output):
            share = graph.call_function(SHARE_ROWS, (node, rows))
        share.meta.update(val=None, phase="optimizer")
