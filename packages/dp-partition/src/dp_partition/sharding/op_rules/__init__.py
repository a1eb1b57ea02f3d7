"""Rules of operators: strategies to run a call on shards. `table` keeps them. Each family has a file."""

from __future__ import annotations

import torch
from torch import fx

from dp_partition.ops import base_name
from dp_partition.sharding.op_rules import matmul, neural, pointwise, reductions, views  # noqa: F401 - their rules
from dp_partition.sharding.op_rules.table import RULES, Rule


def find_rule(node: fx.Node) -> Rule | None:
    """Return the rule of a call, by name or family (lists of tensors, elementwise operators)."""
    name = base_name(node)
    if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
        return pointwise.pointwise
    if name in RULES:
        return RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return pointwise.foreach
    return pointwise.pointwise if name in pointwise.EXTRA_POINTWISE else None
