"""Conversions: a plan in the terms of other tools. What a target cannot say is refused by name, never approximated."""

from typing import TYPE_CHECKING

from shard_spec._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shard_spec.convert.dcp import to_dcp
    from shard_spec.convert.distributed_config import from_distributed_config, to_distributed_config
    from shard_spec.convert.hf import from_hf_tp_plan, to_hf_tp_plan
    from shard_spec.convert.parallelize import to_dtensor_placements, to_parallelize_plan

__all__ = [
    "to_dcp",
    "from_distributed_config",
    "to_distributed_config",
    "from_hf_tp_plan",
    "to_hf_tp_plan",
    "to_dtensor_placements",
    "to_parallelize_plan",
]

# Loaded when a plan is asked for them: they import torch.distributed.tensor, which takes a second or more.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "dcp": ("to_dcp",),
        "distributed_config": ("from_distributed_config", "to_distributed_config"),
        "hf": ("from_hf_tp_plan", "to_hf_tp_plan"),
        "parallelize": ("to_dtensor_placements", "to_parallelize_plan"),
    },
)
