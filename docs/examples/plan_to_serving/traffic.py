"""What a step sends, as the packages tell it: one line for each kind of collective."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import shard_spec
from torch import Tensor, fx, nn

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # a ring sends (n - 1) / n of the buffer in each


@dataclass(frozen=True)
class Line:
    """Collectives of one kind in one step (or in one move of weights)."""

    run: str
    op: str
    what: str
    count: int
    sent_bytes: int  # by each rank, with the fewest that a ring needs

    def row(self) -> tuple[str, str, str, int, str]:
        return self.run, self.op, self.what, self.count, f"{self.sent_bytes / 2**10:,.0f} KiB"


def of_plan(run: str, plan: shard_spec.ShardingPlan, model: nn.Module, batch: tuple[int, int]) -> list[Line]:
    """What the plan foretells for a batch of `(sequences, length)` over all ranks."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for transfer in plan.communication(model, batch=batch).transfers:
        entry = totals[transfer.op, f"{transfer.what}, {transfer.axis}"]
        entry[0] += transfer.count
        entry[1] += transfer.sent_bytes
    return [Line(run, op, what, int(count), round(size)) for (op, what), (count, size) in totals.items()]


def of_graph(run: str, graph: fx.GraphModule, num_ranks: int) -> list[Line]:
    """The collectives that stand in a partitioned graph."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in graph.graph.nodes:
        namespace, _, name = str(node.target).partition(".")
        op = next((op for op in PASSES if name.startswith(op)), None)
        if namespace != "_c10d_functional" or op is None:  # compute, or the wait of an earlier one
            continue
        full: Tensor = node.meta["val"] if op == "all_gather" else node.args[0].meta["val"]
        totals[op][0] += 1
        totals[op][1] += full.numel() * full.element_size() * PASSES[op] * (num_ranks - 1) // num_ranks
    return [Line(run, op, "parameters and gradients", count, size) for op, (count, size) in totals.items()]
