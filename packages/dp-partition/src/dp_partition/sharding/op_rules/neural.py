"""Layers: arguments with the batch in dim 0, replicated arguments, and outputs.

A row reads: operator -> positions of the arguments with the batch, and for each output ``"b"`` (has the
batch), ``"p"`` (partial sum over the batch: a parameter's gradient) or ``"r"`` (replicated). All other tensor
arguments are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.distributed.tensor import Placement, Shard

from dp_partition.sharding.op_rules.table import SUM, Call, Candidate, OutputPlacement, R, rule

_ROWS: dict[str, tuple[tuple[int, ...], str]] = {
    "convolution": ((0,), "b"),
    "convolution_backward": ((0, 1), "bpp"),
    "max_pool2d_with_indices": ((0,), "bb"),
    "max_pool2d_with_indices_backward": ((0, 1, 7), "b"),
    "avg_pool2d": ((0,), "b"),
    "avg_pool2d_backward": ((0, 1), "b"),
    "_adaptive_avg_pool2d": ((0,), "b"),
    "_adaptive_avg_pool2d_backward": ((0, 1), "b"),
    "native_group_norm": ((0,), "bbb"),
    "native_group_norm_backward": ((0, 1, 2, 3), "bpp"),
    "upsample_nearest2d": ((0,), "b"),
    "upsample_bilinear2d": ((0,), "b"),
    "_scaled_dot_product_flash_attention_for_cpu": ((0, 1, 2), "bb"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ((0, 1, 2, 3, 4, 5), "bbb"),
    "_scaled_dot_product_efficient_attention": ((0, 1, 2), "bbrr"),
}


@rule(*_ROWS)
def layer(call: Call) -> Iterator[Candidate]:
    positions, outputs = _ROWS[call.name]
    batched = [call.arg(position) for position in positions]
    batched = [node for node in batched if isinstance(node, fx.Node)]
    if len(call.shape(batched[0])) < 3 or not any(dim == 0 for _, dim in call.shards(batched)):  # no batch dim
        return
    inputs: dict[fx.Node, Placement] = {}
    query = call.shape(batched[0])
    for node in call.tensors():
        carries = node in batched
        if call.name.startswith("_scaled_dot_product"):  # a mask with the query's dims, unless it broadcasts
            carries = carries or (len(call.shape(node)) == len(query) and call.shape(node)[0] == query[0])
        inputs[node] = Shard(0) if carries else R
    states = tuple({"b": Shard(0), "p": SUM, "r": R}[kind] for kind in outputs)
    value = call.node.meta.get("val")
    yield Candidate(inputs, states if isinstance(value, tuple | list) else states[0])


@rule("native_layer_norm")
def layer_norm(call: Call) -> Iterator[Candidate]:
    source = call.arg(0)
    num_batch_dims = len(call.shape(source)) - len(call.arg(1))  # leading dims, not normalised
    for _, dim in call.shards([source]):
        if dim < num_batch_dims:
            yield Candidate({source: Shard(dim)}, (Shard(dim), Shard(dim), Shard(dim)))


@rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Iterator[Candidate]:
    grad, source, _, mean, rstd = (call.arg(i) for i in range(5))
    num_batch_dims = len(call.shape(source)) - len(call.arg(2))
    for dim in dict.fromkeys(d for _, d in call.shards([grad, source])):
        if dim < num_batch_dims:
            inputs: dict[fx.Node, Placement] = dict.fromkeys((grad, source, mean, rstd), Shard(dim))
            yield Candidate(inputs, (Shard(dim), SUM, SUM))  # gradients of weight and bias


@rule("embedding")
def embedding(call: Call) -> Iterator[Candidate]:
    weight, indices = call.arg(0), call.arg(1)
    for _, dim in call.shards([indices]):
        yield Candidate({weight: R, indices: Shard(dim)}, Shard(dim))


@rule("embedding_dense_backward")
def embedding_backward(call: Call) -> Iterator[Candidate]:
    grad, indices = call.arg(0), call.arg(1)
    scales = bool(call.arg(4, False))  # by counts over all rows
    for dim in dict.fromkeys(d for _, d in call.shards([grad, indices])):
        if dim < len(call.shape(indices)) and not scales:
            yield Candidate({grad: Shard(dim), indices: Shard(dim)}, SUM)


@rule("nll_loss_forward")
def nll_loss(call: Call) -> Iterator[Candidate]:
    """Row losses and their sums; decompositions have replaced a mean before."""
    scores, target, weight, reduction = (call.arg(i) for i in range(4))
    if len(call.shape(scores)) != 2 or reduction == 1:
        return
    inputs: dict[fx.Node, Placement] = {scores: Shard(0), target: Shard(0)}
    if isinstance(weight, fx.Node):
        inputs[weight] = R
    out: OutputPlacement = (Shard(0), R) if reduction == 0 else (SUM, SUM)
    if any(dim == 0 for _, dim in call.shards([scores, target])):
        yield Candidate(inputs, out)
