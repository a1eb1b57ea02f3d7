"""Acting on a plan: all of it or nothing, and back again."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.handle import TPHandle
from tp_styles.plan.planned import Plan, TPPlan, plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.act import act
from tp_styles.runtime.axis import Axis
from tp_styles.runtime.parameters import Mode
from tp_styles.runtime.retired import is_retired


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | TorchParallelStyle | TPPlan,
    *,
    params: Mode = "dtensor",
    src_data_rank: int | None = 0,
    strict: bool = True,
    check: Literal["first", "always", "never"] = "first",
) -> TPHandle:
    """Make a model tensor parallel over a 1-D mesh, in place: all of the plan, or an error and nothing changed.

    Args:
        model: The model, with whole parameters on every rank; or on the meta device.
        mesh: 1-D mesh; a slice of a larger one, `mesh["tp"]`, too.
        plan: FQN pattern -> style, one style for the model, or what `plan_styles` returned for this model.
        params: `"dtensor"`: parameters are DTensors. `"local"`: they are plain tensors that carry `_sharding_info`
            (least host time). What a DTensor cannot say is local in either case.
        src_data_rank: Rank in the group whose values count; None takes each rank's own, which have to be equal where
            they are replicated.
        strict: A pattern that means no module is a problem.
        check: Compare the plan between the ranks first. In the first forward, compare the inputs of parameters that
            have no style and may stand inside a sharded region, and see that no column-wise output is cut across its
            sections. `"never"`: do not.

    Returns:
        A handle with the plan, a report and `undo()`.

    Raises:
        PlanError: Everything that is wrong with the plan, before anything is communicated or changed.
    """
    check_mesh(mesh)
    if not isinstance(plan, TPPlan):
        plan = plan_styles(model, plan, mesh.size(), strict=strict)
    if plan.tp_size != mesh.size():
        problem = Problem("tp-size", found=f"a plan for {plan.tp_size} ranks", hint=f"the mesh has {mesh.size()}")
        plan = TPPlan(plan.tp_size, plan.modules, plan.left_alone, (*plan.problems, problem))
    if params not in ("dtensor", "local"):
        raise PlanError(Problem("params", "params", found=repr(params), hint='"dtensor" or "local"'))
    plan.raise_problems()
    check_not_divided_elsewhere(model)
    axis = Axis(mesh)
    if check != "never":
        check_agreement(plan, params, axis)
    changes = act(model, plan, axis, params, src_data_rank, check=check != "never")
    return TPHandle(model, plan, axis, changes)


def apply_style(module: nn.Module, mesh: DeviceMesh, style: TorchParallelStyle, src_data_rank: int | None) -> nn.Module:
    """Put one style on one module and return the module: what torch's `parallelize_module` asks a style for.

    Raises:
        PlanError: What speaks against it.
    """
    apply_plan(module, mesh, style, src_data_rank=src_data_rank)
    return module


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse what is not a 1-D mesh that this rank is in.

    Raises:
        PlanError: It is not.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(Problem("mesh", "mesh", found=str(type(mesh)), hint="pass a torch DeviceMesh"))
    if mesh.ndim != 1:
        raise PlanError(
            Problem(
                "mesh-not-1d", "mesh", found=f"{mesh.ndim} dims", hint='pass one axis of it, for example mesh["tp"]'
            )
        )
    if mesh.get_coordinate() is None:
        raise PlanError(
            Problem("not-in-mesh", "mesh", found=f"rank {dist.get_rank()}", hint="call it on the mesh's ranks only")
        )


def check_not_divided_elsewhere(model: nn.Module) -> None:
    """Refuse a model that shares a weight with another to which a plan was applied: the two are parted already.

    Raises:
        PlanError: With every such parameter.
    """
    hint = "apply one plan to a module that holds both"
    found = "the weight was divided as a part of another module, which does not share it any more"
    names = [name for name, parameter in model.named_parameters() if is_retired(parameter)]
    if names:
        raise PlanError(Problem("tied-outside", name, found=found, hint=hint) for name in names)


def check_agreement(plan: TPPlan, params: str, axis: Axis) -> None:
    """Compare the plan between the ranks.

    Raises:
        PlanError: They differ; on every rank.
    """
    own = f"{plan.digest} {params}"
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, own, group=axis.group)
    different = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if different:
        raise PlanError(
            Problem(
                "plans-differ",
                found=f"ranks {different} have another plan, model or params= than rank 0",
                hint="compare apply_plan's arguments, and plan_styles(...).to_json() of both",
            )
        )
