"""LocalParameter: a plain parameter that is one rank's shard of a fused weight, and remembers of which."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_spec._shared.sharding_info import Section, ShardingInfo
from shard_spec.distributed.parameter_format import ParameterFormat


class LocalParameter(nn.Parameter):
    """A local parameter with ``_sharding_info``, which copies and pickles keep (those of ``nn.Parameter`` lose it).

    ``_sharding_info`` is ``(device_mesh, placements, global_shape, global_stride, sections)`` with one
    ``(size, unit, copies)`` for each section of the sharded dim; each section is cut on its own.
    """

    _sharding_info: ShardingInfo

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalParameter:
        if id(self) not in memo:
            copied = LocalParameter(self.detach().clone(), self.requires_grad)
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        found: LocalParameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.detach(), self.requires_grad, dict(self.__dict__))


def _rebuild(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> LocalParameter:
    parameter = LocalParameter(data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


def sharding_info(mesh: DeviceMesh, expression: ParameterFormat, shape: tuple[int, ...]) -> ShardingInfo:
    """Return the description of a shard of a tensor of global ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    sections = tuple(Section(size) for size in expression.sections)
    return ShardingInfo(mesh, expression.placements, torch.Size(shape), stride, sections)
