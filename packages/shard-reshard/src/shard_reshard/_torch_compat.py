"""Everything of torch that is only to be had under an underscore. Read against torch 2.13.0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._guards import detect_fake_mode


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source to its target, on CUDA in as few kernels as torch knows how to; dtypes are converted."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


def is_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors, or the mode that is on, have no data: nothing can be compared between ranks then."""
    return detect_fake_mode(list(tensors)) is not None


def torch_shard(tensor: torch.Tensor, metadata: object) -> object:
    """A ``Shard`` of torch's ShardedTensor."""
    from torch.distributed._shard.sharded_tensor.shard import Shard

    return Shard(tensor, metadata)  # type: ignore[arg-type]  # torch's own metadata, by construction
