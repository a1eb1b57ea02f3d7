"""Plans: what a user or a planner decided about every tensor of a model, checked, counted and explained."""

from typing import TYPE_CHECKING

from shard_spec._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shard_spec.plan.from_module import layouts_of_module

__all__ = ["layouts_of_module"]

# Loaded when a plan is asked for them: they import torch.distributed.tensor, which takes a second or more.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {"from_module": ("layouts_of_module",)},
)
