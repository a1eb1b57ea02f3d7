"""Movement of tensors between ranks: groups and meshes in any order, scatter and gather, and agreement of ranks."""

from typing import TYPE_CHECKING

from shard_spec._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shard_spec.distributed.parameter_format import shard_tensor

__all__ = ["shard_tensor"]

# Loaded when a plan is asked for them: they import torch.distributed.tensor, which takes a second or more.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {"parameter_format": ("shard_tensor",)},
)
