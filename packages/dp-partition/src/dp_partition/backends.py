"""Another way to run a rank's graph: gloo's collectives.

Gloo's own reduce_scatter is an all_reduce of a copy, twice the bytes (torch 2.13). An all_to_all sends only the bytes
of the operation, and the sum of a rank's rows is one read of them: about half the time, on two ranks and on four,
from 100 KiB to 16 MiB. Rows are added in the order of the ranks, half precision in float32, and rounded once. The
partitioned graph keeps ``reduce_scatter``, the operation of the step and of `estimate`; the all_to_all is only its
execution.
"""

from __future__ import annotations

import torch
from torch import fx

from dp_partition._torch_compat import collectives
from dp_partition.nodes import is_wait
from dp_partition.passes.insert_collectives import REDUCTIONS


def reduce_scatter_as_all_to_all(graph: fx.Graph) -> None:
    """Replace a graph's reduce-scatters by all-to-alls and sums, in place."""
    for node in list(graph.nodes):
        if node.target is collectives.reduce_scatter_tensor.default and node.args[1] in REDUCTIONS:
            users = list(node.users)
            if len(users) != 1 or not is_wait(users[0]):
                continue
            wait = users[0]
            sent, op, world, group = node.args
            node.target, node.args = exchanged, (sent, world, group)  # its wait stays, with a sum behind it
            with graph.inserting_after(wait):
                total = graph.call_function(combined, (wait, sent, op, world))
            wait.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
            total.meta = dict(wait.meta)
            if "val" in sent.meta:
                node.meta["val"] = wait.meta["val"] = torch.empty_like(sent.meta["val"])


def gather_into_buffers(graph: fx.Graph) -> None:
    """Let a graph's all-gathers fill a buffer of ours, in place.

    After each collective gloo's two worker threads write its name into one string of the group, without a lock (torch
    2.11 to 2.15). A name of more than 15 letters is on the heap: two threads free it twice, or write it after it was
    freed. Of all collectives here only the all-gather that makes its own output has such a name.
    """
    for node in graph.nodes:
        if node.target is collectives.all_gather_into_tensor.default:
            node.target = gathered


def gathered(tensor: torch.Tensor, world: int, group: str) -> torch.Tensor:
    """Return all ranks' rows. Not valid before the wait."""
    rows = tensor.new_empty((world * tensor.shape[0], *tensor.shape[1:]))
    sent, received = [torch.view_as_real(x) if x.is_complex() else x for x in (tensor, rows)]
    collectives.all_gather_into_tensor_out(sent, world, group, out=received)
    return rows  # of the memory that the wait goes by


def exchanged(tensor: torch.Tensor, world: int, group: str) -> torch.Tensor:
    """Return all ranks' rows for this one, in the order of ranks. Not valid before the wait.

    Complex numbers are sent as pairs of real ones: gloo does not support them.
    """
    rows = [tensor.shape[0] // world] * world
    sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    result: torch.Tensor = collectives.all_to_all_single(sent, rows, rows, group)
    return result


def combined(received: torch.Tensor, sent: torch.Tensor, op: str, world: int) -> torch.Tensor:
    """Return the sum, average, ... of the ranks' rows, each as large as the rank's own."""
    values = torch.view_as_complex(received) if sent.is_complex() else received
    return REDUCTIONS[op](values.view(world, sent.shape[0] // world, *sent.shape[1:]))
