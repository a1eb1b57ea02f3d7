"""A loss of one rank's features, outside of the model: compared between the ranks when its backward starts.

A model may hand out a shard of its logits as a plain tensor, if its plan declares that. `vocab_parallel_cross_entropy`
takes it; `logits.logsumexp(-1)` (a z-loss) or `logits.mean()` of it is another number on each rank, and trains on in
silence. So in the first call of each mode these outputs note what is computed of them, up to the loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tp_styles._shared.full_reads import REDUCTIONS
from tp_styles._torch_compat import is_compiling, tree_map
from tp_styles.check.inputs import tensors_in
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.redistribute import TPGroup

SAME = 1e-6  # Losses of equal inputs differ by a few roundings of float32 at most; a z-loss may be 1e-5 of them.


class WatchedShard(torch.Tensor):
    """One rank's features, or what was computed of them."""

    _axis: TPGroup
    _reads: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; note one that reduces, and compare a loss before its backward."""
        if is_compiling():  # a compiled loss is traced without the notes
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
        shards = [x for _, x in tensors_in((args, kwargs)) if isinstance(x, WatchedShard)]
        if shards and func in (torch.Tensor.backward, torch.autograd.grad):
            compare_loss(shards[0])
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
        if not shards:
            return result
        reads = [*shards[0]._reads, *([REDUCTIONS[func]] if func in REDUCTIONS else [])]
        return tree_map(lambda x: watched(x, shards[0]._axis, reads) if isinstance(x, WatchedShard) else x, result)


def watched(x: torch.Tensor, axis: TPGroup, reads: list[str]) -> WatchedShard:
    """Return the same tensor object, watched from here on."""
    shard: Any = x
    shard.__class__ = WatchedShard
    shard._axis, shard._reads = axis, reads
    return shard  # type: ignore[no-any-return]  # the class was assigned


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose reader knows that it is a shard."""
    return x.as_subclass(torch.Tensor) if isinstance(x, WatchedShard) else x


def compare_loss(loss: WatchedShard) -> None:
    """Compare a loss between the ranks.

    Raises:
        PlanError: It was reduced from one rank's features, and is another number on each rank; on every rank.
    """
    values = loss._axis.all_gather_objects(float(plain(loss).detach().double().sum()), "the first loss")
    same = max(SAME, 0 if loss.dtype.itemsize > 2 else 2 * torch.finfo(loss.dtype).eps)
    if not all(map(math.isfinite, values)) or max(values) - min(values) <= same * max(map(abs, values)):
        return
    reads = ", ".join(dict.fromkeys(loss._reads)) or "functions"
    raise PlanError(
        Problem(
            "local-shard-as-full",
            "loss",
            found=f"{[float(f'{value:.9g}') for value in values]} on the ranks: {reads} of one rank's features",
            hint="for the loss of all features: vocab_parallel_logsumexp(logits, mesh=) and its like; or a DTensor"
            " (use_local_output=False), whose sum, mean or logsumexp is of all of them (add its full_tensor() to the"
            " loss),"
            " and which vocab_parallel_cross_entropy takes; or output_layouts=Replicate(), which gives all features."
            " For a"
            " loss of each rank's own features, whose gradients are those of the sum over the ranks: write it as such a"
            ' DTensor\'s sum, or skip the comparison with check="never"',
        )
    )


def watch_loss(module: nn.Module, paths: tuple[str, ...] | None, axis: TPGroup) -> None:
    """Watch outputs of the call that is about to run, and of no later one.

    Args:
        module: The root.
        paths: Outputs that are shards. None for all: the loss of a full output is the same on all ranks.
        axis: Its ranks.
    """

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        for place, x in tensors_in(output):
            is_shard = not place.is_state if paths is None else place.path in paths
            if is_shard and type(x) is torch.Tensor and x.is_floating_point():
                watched(x, axis, [])

    handle = module.register_forward_hook(watch)
