"""Let DistributedDataParallel wrap a tensor-parallel module, with nothing lost.

A local *leaf* permanently replaces every DTensor parameter, and is read as a DTensor; DDP and optimizers
see leaves. ``api`` has the calls: survey the module, compare the ranks, transform the module (``module``) and
wrap it in DDP (``ddp``). ``optim`` does on shards the same as torch on full tensors; ``consistency`` compares ranks.
Importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_ddp_bridge.__about__ import __version__ as __version__
from tp_ddp_bridge._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from tp_ddp_bridge._shared.norms import clip_grad_norm_, grad_norm
    from tp_ddp_bridge._shared.problems import PlanError, Problem
    from tp_ddp_bridge.api import _pre_dp_module_transform, dp_bridge, pre_dp_module_transform, wrap_ddp
    from tp_ddp_bridge.consistency.replicas import check_replicas
    from tp_ddp_bridge.module.transform import is_bridged, undo_dp_transform
    from tp_ddp_bridge.optim.scaler import GradScaler
    from tp_ddp_bridge.optim.state import check_optimizer, optimizer_state_to_dtensor, optimizer_state_to_local

__all__ = [
    "pre_dp_module_transform",
    "_pre_dp_module_transform",
    "undo_dp_transform",
    "dp_bridge",
    "wrap_ddp",
    "is_bridged",
    "clip_grad_norm_",
    "grad_norm",
    "GradScaler",
    "check_replicas",
    "check_optimizer",
    "optimizer_state_to_dtensor",
    "optimizer_state_to_local",
    "PlanError",
    "Problem",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "_shared.norms": ("clip_grad_norm_", "grad_norm"),
        "_shared.problems": ("PlanError", "Problem"),
        "api": ("_pre_dp_module_transform", "dp_bridge", "pre_dp_module_transform", "wrap_ddp"),
        "consistency.replicas": ("check_replicas",),
        "module.transform": ("is_bridged", "undo_dp_transform"),
        "optim.scaler": ("GradScaler",),
        "optim.state": ("check_optimizer", "optimizer_state_to_dtensor", "optimizer_state_to_local"),
    },
)
