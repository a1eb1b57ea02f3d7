"""Refuses calls that gloo takes without an error and then carries out wrongly.

gloo's `all_to_all_single` accepts split sizes that disagree between ranks and a dim 0 that does not divide (rows stay
stale, or the process aborts), and fills a non-contiguous output wrongly. In ranks each is a ValueError on every rank of
the group, before any data moves: the ranks first exchange what they are about to send and expect. That makes the call
a meeting point of its ranks also where it was asked to be asynchronous.
"""

from __future__ import annotations

from typing import Any

import torch

from ranktest import _torch_compat as compat
from ranktest import intercept
from ranktest.intercept import Call, Execute


class GlooChecks:
    """The listener that every rank runs with."""

    def around(self, call: Call, execute: Execute) -> Any:
        """Check an all_to_all_single over gloo; let everything else through.

        Raises:
            ValueError: this rank's tensors and splits do not fit, another rank's do not, or two ranks disagree.
        """
        if call.name == "alltoall_base_" and compat.is_gloo(call.group, call.device):
            problem, sizes = "", [-1] * (2 * call.size)
            try:
                sizes = sent_and_expected(call)
            except ValueError as error:
                problem = str(error)
            table = torch.empty(call.size, len(sizes), dtype=torch.int64)
            row, group = torch.tensor([sizes]), call.arguments["process_group"]
            arguments = {"output_tensor": table, "input_tensor": row, "process_group": group}
            _, work = intercept.unseen("_allgather_base_", arguments, row.device)
            compat.unbox_work(work).wait()
            if refused := [rank for rank, row in zip(call.global_ranks, table.tolist(), strict=True) if row[0] < 0]:
                others = f"refused on ranks {refused}, whose tensors or splits do not fit; their errors say why"
                raise ValueError(f"all_to_all_single: {problem or others}")
            if problem := disagreements(table.tolist(), call.global_ranks):
                raise ValueError(f"all_to_all_single: {problem}")
        return execute(call.arguments)


def sent_and_expected(call: Call) -> list[int]:
    """Return the bytes that this rank sends to each rank, then those that it expects from each.

    Raises:
        ValueError: non-contiguous tensors, or split sizes that do not fit them.
    """
    sizes_sent = []
    for side in ("input", "output"):
        tensor, splits = call.arguments[side], list(call.arguments[f"{side}_split_sizes"])
        what = f"{side} {list(tensor.shape)}"
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what} with strides {list(tensor.stride())} is not contiguous; gloo would read or fill it as if it "
                "were, and overwrite memory beside it. Pass a contiguous tensor."
            )
        rows = tensor.shape[0] if tensor.dim() else 1
        if splits:
            if len(splits) != call.size or sum(splits) != rows or min(splits) < 0:
                raise ValueError(f"{what}: {side}_split_sizes {splits} do not fit dim 0 and {call.size} ranks")
        elif rows % call.size:
            raise ValueError(
                f"{what}: dim 0 does not divide by {call.size} ranks, and no {side}_split_sizes were given; gloo "
                "would leave rows out. Pass split sizes."
            )
        row_bytes = tensor.numel() * tensor.element_size() // rows if rows else 0
        sizes_sent += [size * row_bytes for size in splits or [rows // call.size] * call.size]
    return sizes_sent


def disagreements(sizes: list[list[int]], ranks: tuple[int, ...]) -> str:
    """Name the pairs whose sizes differ; `sizes[r]` is rank r's bytes to each rank, then from each rank."""
    size = len(ranks)
    pairs = [
        f"rank {ranks[a]} sends {sizes[a][b]} bytes to rank {ranks[b]}, which expects {sizes[b][size + a]}"
        for a in range(size)
        for b in range(size)
        if sizes[a][b] != sizes[b][size + a]
    ]
    return "\n  ".join(["split sizes disagree between ranks:", *pairs]) if pairs else ""
