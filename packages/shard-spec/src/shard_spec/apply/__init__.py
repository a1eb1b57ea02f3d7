"""Applying a plan to a module: compare, scatter, then replace its tensors, all or nothing."""

from typing import TYPE_CHECKING

from shard_spec._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shard_spec.apply.apply import apply_plan

__all__ = ["apply_plan"]

# Loaded when a plan is asked for them: they import torch.distributed.tensor, which takes a second or more.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {"apply": ("apply_plan",)},
)
