"""On which device the shards of this rank go."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.distributed.shard_tensor import group_device
from shard_spec.plan.content import PlanContent
from shard_spec.plan.resolve import Resolution
from shard_spec.specs import ShardMetadata, as_spec


def device_of(
    module: nn.Module, plan: PlanContent, found: Resolution, group: dist.ProcessGroup
) -> tuple[torch.device, list[Problem]]:
    """The device of this rank, and what is wrong with the devices that the specs name.

    The specs name it; where there is none, it is the device of the module's tensors; where they are all on meta, the
    kind of device that the group communicates on.
    """
    named: dict[str, str] = {}
    mine: torch.device | None = None
    for name, shard in _shards(plan, found):
        assert shard.placement is not None
        device = shard.placement.device()
        named.setdefault(device.type, name)
        if shard.rank == dist.get_rank():
            mine = mine or device
    if len(named) > 1:
        text = ", ".join(f"{kind} for {name}" for kind, name in named.items())
        hint = "name one kind of device in one call"
        return torch.device("cpu"), [Problem("device-types-differ", found=text, hint=hint)]
    device = mine or _module_device(module) or group_device(group)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found_text = f"{device}, but this rank sees {torch.cuda.device_count()} CUDA device(s)"
        problem = Problem(
            "device-missing", "placements", found=found_text, hint="name a device that exists on the rank"
        )
        return device, [problem]
    return device, []


def _shards(plan: PlanContent, found: Resolution) -> list[tuple[str, ShardMetadata]]:
    """The shards of every tensor for which a spec decides."""
    shards = []
    for name, key in found.rule_of.items():
        spec = as_spec(plan.plan[key]) if key else None
        if spec is not None and name in found.layouts:
            shards += [(name, shard) for shard in spec.shards_for(found.tensor(name).shape)]
    return shards


def _module_device(module: nn.Module) -> torch.device | None:
    tensors = [*module.parameters(), *module.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), None)
