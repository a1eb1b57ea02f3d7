"""Let DistributedDataParallel wrap a tensor-parallel module, with nothing lost.

Values: ``problems``, ``layout``, ``plan``. Planning: ``survey``, ``axes``. Acting: ``transform`` and what it is made of
(``view_class``, ``view``, ``cache``, ``marks``, ``hooks``, ``stale``, ``loading``, ``optimizers``), ``wrap``,
``norms``, ``scaler``, ``replicas``, ``checkpoint``.
"""

from tp_ddp_bridge.__about__ import __version__
from tp_ddp_bridge.checkpoint import optimizer_state_to_dtensor, optimizer_state_to_local
from tp_ddp_bridge.norms import clip_grad_norm_, grad_norm
from tp_ddp_bridge.optimizers import check_optimizer
from tp_ddp_bridge.plan import BridgePlan, ViewEntry
from tp_ddp_bridge.problems import PlanError, Problem
from tp_ddp_bridge.replicas import check_replicas
from tp_ddp_bridge.scaler import GradScaler
from tp_ddp_bridge.survey import bridge_plan
from tp_ddp_bridge.transform import (
    _pre_dp_module_transform,
    dp_bridge,
    is_bridged,
    pre_dp_module_transform,
    undo_dp_transform,
)
from tp_ddp_bridge.wrap import wrap_ddp

__all__ = [
    "pre_dp_module_transform",
    "_pre_dp_module_transform",
    "undo_dp_transform",
    "dp_bridge",
    "wrap_ddp",
    "is_bridged",
    "bridge_plan",
    "clip_grad_norm_",
    "grad_norm",
    "GradScaler",
    "check_replicas",
    "check_optimizer",
    "optimizer_state_to_dtensor",
    "optimizer_state_to_local",
    "BridgePlan",
    "ViewEntry",
    "PlanError",
    "Problem",
    "__version__",
]
