"""Operators along one dim; every other dim is a batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from dp_partition.sharding.op_rules.table import Call, Candidate, rule

_NAMES = [
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "sort",
    "topk",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "gather",
    "scatter",
    "scatter_add",
    "flip",
    "roll",
    "glu",
    "glu_backward",
    "index_select",
]
_OF_FIRST_ONLY = frozenset(["index_select"])  # the index has one dim of its own


@rule(*_NAMES)
def along(call: Call) -> Iterator[Candidate]:
    ndim = len(call.shape(call.arg(0)))
    dims = call.named("dim", call.named("dims", -1))
    if call.name == "roll" and not call.named("dims"):
        return  # rolls the flat tensor: rows do not stay rows
    touched = {d % ndim for d in ([dims] if isinstance(dims, int) else dims)} if ndim else set()
    nodes = call.tensors(call.arg(0)) if call.name in _OF_FIRST_ONLY else call.tensors()
    if any(len(call.shape(node)) != ndim for node in nodes):
        return
    for dim in dict.fromkeys(d for _, d in call.shards(nodes)):
        # Gather and scatter may use fewer rows of one operand than of another; then rows do not correspond.
        if dim not in touched and len({call.shape(node)[dim] for node in nodes}) == 1:
            yield Candidate(dict.fromkeys(nodes, Shard(dim)), call.outputs(Shard(dim)))
