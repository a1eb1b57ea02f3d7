"""Weights of a check's runs: copies of one module's parameters and buffers, sharded or full.

A zero-initialised projection (LoRA's B, Fixup, adaLN-Zero, a gate of 0) makes every gradient behind it zero, in both
runs and whatever the mistake; norms of ones hide a wrong slice of them; a parameter frozen now may learn later. So the
copies have no such weights: a constant parameter, and every zero element of another, is drawn anew, and all floating
parameters take a gradient. Both runs and all ranks draw the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tp_styles._shared.dtensor import as_dtensor
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import local_of, without_dispatch_modes
from tp_styles.check.inputs import varied
from tp_styles.runtime.parameters import ShardParameter, agreed_values, full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup

DRAWABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# A weight without a larger element hides what is behind it like one of zeros.
TINY = 1e-5


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Numbers in place of one parameter's constants.

    Attributes:
        index: The parameter's place in its module: weights of one shape get different numbers.
        shape: Its global shape.
        constant: Every element of it is about this; None if only its zeros are drawn.
    """

    index: int
    shape: torch.Size
    constant: float | None

    def full(self) -> torch.Tensor:
        """Return float64 numbers of the global shape, of the size of an ordinary initialisation."""
        value = varied(torch.empty(self.shape, dtype=torch.float64, device="cpu"), self.index)
        if self.constant is not None and abs(self.constant) > TINY:
            return self.constant * (1 + 0.25 * value)
        columns = self.shape.numel() // self.shape[0] if len(self.shape) > 1 else 4
        return value / math.sqrt(columns)

    def applied(self, value: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values, full or one rank's, with the drawn ones of the same rows."""
        drawn = drawn.to(value.device, value.dtype)
        return drawn if self.constant is not None else torch.where(value == 0, drawn, value)


class Weights:
    """Copies of a module's parameters for both runs of a comparison. Every rank makes one: it communicates.

    Args:
        module: The module, sharded.
        axis: Its ranks.
        dtype: Type of floating parameters and buffers in the copies; None leaves them.
        lively: Draw constants anew, and give every floating parameter a gradient.
    """

    def __init__(self, module: nn.Module, axis: TPGroup, dtype: torch.dtype | None, *, lively: bool) -> None:
        self.axis, self.dtype, self.lively = axis, dtype, lively
        with without_dispatch_modes():  # the check's mode would see each of these small operations
            self._drawings = _drawings(module, axis) if lively else {}

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy, even in the same type. A forward may write to tensors it reads, like a teacher's weights."""
        return x.to(self.dtype if self.dtype is not None and x.is_floating_point() else x.dtype, copy=True)

    def learns(self, parameter: torch.Tensor) -> bool:
        """True if the copies of a parameter take a gradient."""
        return parameter.requires_grad or (self.lively and parameter.is_floating_point())

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's shard as a new leaf."""
        drawing = self._drawings.get(id(parameter))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = local_of(parameter).detach()
            if drawing is not None:
                full = drawing.full().to(value.device)
                value = drawing.applied(value, distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())
            wrapped = as_dtensor(self.cast(value), mesh, placements, parameter.shape, parameter.stride())
            return nn.Parameter(wrapped, self.learns(parameter))
        value = parameter.detach().as_subclass(torch.Tensor)
        info = sharding_info_of(parameter)
        if info is None:  # a replica
            value = agreed_values(value, self.axis, 0)
        if drawing is not None:
            full = drawing.full()
            rows = full if info is None else split_of(info).take(full, self.axis.rank, self.axis.size)
            value = drawing.applied(value, rows)
        kind = ShardParameter if isinstance(parameter, ShardParameter) else nn.Parameter
        shard: Any = kind(self.cast(value), self.learns(parameter))
        if info is not None:  # also plain parameters of the bridge
            shard._sharding_info = info
        result: nn.Parameter = shard
        return result

    def full(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the full parameter as a new leaf, gathered from the shards."""
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif (info := sharding_info_of(parameter)) is not None:
            value = full_tensor(value.as_subclass(torch.Tensor), self.axis, split_of(info))
        else:
            # Replicas are compared elsewhere, and may differ by rounding: both runs take the first rank's.
            value = agreed_values(value.as_subclass(torch.Tensor), self.axis, 0)
        if (drawing := self._drawings.get(id(parameter))) is not None:
            value = drawing.applied(value, drawing.full())
        return nn.Parameter(self.cast(value), self.learns(parameter))


def _drawings(module: nn.Module, axis: TPGroup) -> dict[int, Drawing]:
    """Return a drawing for each parameter with constants; the same ones on every rank."""
    parameters = list({id(p): p for m in module.modules() for p in m._parameters.values() if p is not None}.values())
    candidates = [(index, p) for index, p in enumerate(parameters) if _is_drawable(p, axis)]
    if not candidates:
        return {}
    table = torch.stack([_extremes(p) for _, p in candidates]).to(axis.mesh.device_type)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=axis.group)
    drawings = {}
    for (index, parameter), (largest, minus_smallest, has_zeros) in zip(candidates, table.tolist(), strict=True):
        size = max(abs(largest), abs(minus_smallest))
        if not math.isfinite(size):
            continue  # a mask of -inf has a meaning
        shape = parameter.shape if (info := sharding_info_of(parameter)) is None else info.shape
        is_constant = size <= TINY or largest + minus_smallest <= 1e-3 * size
        if is_constant and (shape.numel() > 1 or size <= TINY):  # a scale of one element hides nothing unless it is 0
            drawings[id(parameter)] = Drawing(index, shape, largest)
        elif has_zeros and not is_constant:
            drawings[id(parameter)] = Drawing(index, shape, None)
    return drawings


def _is_drawable(parameter: torch.Tensor, axis: TPGroup) -> bool:
    """True for an ordinary floating parameter, or a shard of one over the axis alone."""
    if parameter.dtype not in DRAWABLE:
        return False
    if isinstance(parameter, DTensor):
        return parameter.device_mesh == axis.mesh
    info = sharding_info_of(parameter)
    return info is None or info.mesh == axis.mesh


def _extremes(parameter: torch.Tensor) -> torch.Tensor:
    """Return the largest element of a rank's shard, minus the smallest one, and 1 if there are zeros."""
    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    local = local.detach().as_subclass(torch.Tensor)
    if not local.numel():
        return torch.full((3,), -math.inf, dtype=torch.float64, device=local.device)
    smallest, largest = torch.aminmax(local)
    return torch.stack([x.double() for x in (largest, -smallest, (local == 0).any())])
