"""Names of torch 2.1's SPMD data parallelism, over this package's own stages.

Here stands the decorator of torch 2.1, over `dp_partition.compile`. `graph_interface` partitions a graph from
elsewhere. New code calls `dp_partition.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.api import compile as compile_step
from dp_partition.plan.placements import DataParallelStyle
from dp_partition.plan.plan import Style

__all__ = ["compile", "DataParallel"]


@dataclass(frozen=True)
class DataParallel:
    """Data parallelism over all ranks: ``"replicate"``, ``"fully_shard"``, ``"default"``, or a `DataParallelStyle`."""

    parallel_style: Style | DataParallelStyle = "replicate"


def compile(parallel_mode: DataParallel | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a train step to run data-parallel, each rank with its own rows.

    A decorated function takes ``last_train_step=`` as well, without effect, and has its `Step` as ``.step``.

    Raises:
        PlanError: At the first call, before ``torch.distributed`` was initialised (code ``no-process-group``).
    """
    mode = DataParallel() if parallel_mode is None else parallel_mode
    if not isinstance(mode, DataParallel):
        raise TypeError(f"parallel_mode must be a DataParallel, found {type(mode).__name__}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("last_train_step", None)
            if "step" not in vars(wrapper):  # at the first call torch.distributed is ready
                if not dist.is_available() or not dist.is_initialized():
                    hint = "call torch.distributed.init_process_group first"
                    raise PlanError(
                        Problem("no-process-group", found="torch.distributed is not initialised", hint=hint)
                    )
                modules = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)]
                device = next((p.device.type for module in modules for p in module.parameters()), "cpu")
                mesh = init_device_mesh(device, (dist.get_world_size(),))  # all ranks, as in torch 2.1
                vars(wrapper)["step"] = compile_step(function, mesh=mesh, style=mode.parallel_style)
            return vars(wrapper)["step"](*args, **kwargs)

        return wrapper

    return decorate
