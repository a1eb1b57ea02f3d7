"""A table of the operators of torch's `c10d` namespace: names in logs, arguments that are read and written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        op: name in logs.
        reads: argument that the backend reads ("" if none).
        writes: argument that the backend writes ("" if none).
        rooted: which side only the root (`root_rank`) has: "reads" for broadcast and scatter, "writes" for reduce and
            gather, "" if all ranks do the same.
    """

    op: str
    reads: str
    writes: str
    rooted: str = ""


OPERATORS = {
    "allreduce_": Operator("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": Operator("all_reduce", "tensors", "tensors"),
    "allgather_": Operator("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": Operator("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": Operator("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": Operator("all_gather", "inputs", "outputs"),
    "reduce_scatter_": Operator("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": Operator("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", "inputs", "outputs"),
    "alltoall_": Operator("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": Operator("all_to_all", "input", "output"),
    "broadcast_": Operator("broadcast", "tensors", "tensors", rooted="either"),
    "reduce_": Operator("reduce", "tensors", "tensors", rooted="writes"),
    "gather_": Operator("gather", "input_tensors", "output_tensors", rooted="writes"),
    "gather_into_tensor_": Operator("gather", "input_tensor", "output_tensor", rooted="writes"),  # from torch 2.15 on
    "scatter_": Operator("scatter", "input_tensors", "output_tensors", rooted="reads"),
    "send": Operator("send", "tensors", ""),
    "recv_": Operator("recv", "", "tensors"),
    "recv_any_source_": Operator("recv", "", "tensors"),
    "barrier": Operator("barrier", "", ""),
    "monitored_barrier_": Operator("barrier", "", ""),
}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def num_bytes(value: Any) -> int:
    """Bytes of all tensors of an argument."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
