"""The mesh of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dp_partition.problems import PlanError, Problem


def whole_world(model: nn.Module) -> DeviceMesh:
    """A one-dimensional mesh of all ranks, on the kind of device that the model is on.

    Raises:
        PlanError: Before ``torch.distributed`` was initialised (code ``no-process-group``).
    """
    if not dist.is_available() or not dist.is_initialized():
        hint = "call torch.distributed.init_process_group first"
        raise PlanError(Problem("no-process-group", found="torch.distributed is not initialised", hint=hint))
    tensor = next(iter([*model.parameters(), *model.buffers()]), torch.empty(0))
    return init_device_mesh(tensor.device.type, (dist.get_world_size(),))
