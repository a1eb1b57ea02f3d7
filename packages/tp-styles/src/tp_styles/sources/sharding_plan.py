"""A plan of shard-spec as styles of one axis, and applied on every axis of its mesh (extra `[shard-spec]`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tp_styles import _torch_compat
from tp_styles._shared.consensus import assert_consistent
from tp_styles._shared.problems import own_errors
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles.apply import apply_plan
from tp_styles.plan.planned import plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.sources.axis_splits import AxisCuts, cuts_on_axis
from tp_styles.sources.blocks import Conversion
from tp_styles.styles.expert_parallel import ExpertParallel, expert_modules
from tp_styles.values import Split, describe, is_below, names_of_parameters

if TYPE_CHECKING:
    from shard_spec import Layout, ShardingPlan
    from torch.distributed.device_mesh import DeviceMesh

    from tp_styles.check.checker import Check
    from tp_styles.plan.model import TPPlan
    from tp_styles.styles.base import ParallelStyle


@own_errors()  # of shard-spec, which it calls
def from_sharding_plan(plan: ShardingPlan, module: nn.Module, *, axis: str = "tp") -> dict[str, ParallelStyle]:
    """Convert a `shard_spec.ShardingPlan` to styles, for one axis of its mesh.

    The axis is tensor parallel: activations between blocks are the same on all of its ranks. Sharded layers of one of
    the planner's blocks (attention by heads, a feed-forward block by channels, experts, the vocabulary's ends) keep
    their activations sharded in between. Head counts inside become local, gradients of parameters inside (norms of
    heads) are summed. Where the axis shards by expert, tokens are sent to them (`ExpertParallel`). `apply_plan`
    compares each block with the original in its first call.

    Args:
        plan: The plan; its other axes are for other packages.
        module: The model; on the meta device too.
        axis: Name of the tensor-parallel axis.

    Returns:
        FQN -> style, for `apply_plan`; without layers not sharded by the axis.

    Raises:
        PlanError: Layouts without a style, blocks that cannot be sharded; all of them at once. A plan for a
            data-parallel axis (FSDP) is refused, too.
    """
    cuts = cuts_on_axis(plan, module, axis)
    if not cuts.splits and getattr(plan, "certificate", None) is not None:  # it divides the batch along the axis
        raise PlanError(Problem("plan-not-executable", axis=axis, found="no shards", hint="plan with MegatronPlanner"))
    experts = _whole_experts(module, cuts)
    rest = {name: split for name, split in cuts.splits.items() if not any(is_below(name, other) for other in experts)}
    if experts and not rest:
        return experts
    return experts | Conversion(module, replace(cuts, splits=rest), refuses=True).styles()


def _whole_experts(module: nn.Module, cuts: AxisCuts) -> dict[str, ParallelStyle]:
    """Return styles of experts that the plan shards by expert, with all of their parameters."""
    styles: dict[str, ParallelStyle] = {}
    for name in expert_modules(module):
        info, style = describe(module.get_submodule(name), name), ExpertParallel()
        spec = style.spec(info, cuts.tp_size)
        splits = {info.where(key): parameter.split for key, parameter in spec.parameters}
        wanted = {key: split for key, split in splits.items() if not split.is_replicated}
        if wanted and all(cuts.agree(key, split) for key, split in wanted.items()):
            styles[name] = style
    return styles


# Data axes, along which ranks have different samples; the same names as in shard_spec's estimates.
_DATA_AXES = frozenset(
    {"dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "dp_replicate", "dp_shard", "dp_shard_cp", "batch"}
)


def apply_sharding_plan(model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, check: Check = "first") -> nn.Module:
    """Apply a `shard_spec.ShardingPlan` for training, in place; every rank calls it.

    `from_sharding_plan` and `apply_plan` apply its model axis, `fully_shard` a data axis with shards (each child of a
    `ModuleList`, then the rest), torch's `replicate` a data axis without. Inputs stay plain tensors: equal along the
    model axis, each rank's own along data axes; gradients are averaged over data axes.

    Args:
        model: The model, with equal values on all ranks.
        mesh: The mesh of the plan, with its axis names.
        plan: Any plan with at most one model axis, one data axis with shards, and before it one without.
        check: As in `apply_plan`.

    Returns:
        The model.

    Raises:
        PlanError: The model is unchanged: `plan-not-executable`, errors of `from_sharding_plan` and `apply_plan`, and
            `layout-mismatch` if a parameter's shard would differ from the plan.
    """
    names = mesh.mesh_dim_names or ()
    layouts: dict[str, Layout] = {}
    styles: dict[str, dict[str, ParallelStyle]] = {}
    digest, fault = "", None
    try:
        digest = plan.digest
        layouts, styles = _decided(model, mesh, plan)
    except Exception as error:  # raised below, on all ranks together: other ranks would wait in `apply_plan`
        fault = error
    assert_consistent(mesh, "apply_sharding_plan", (digest, *sorted(styles)), fault)
    sharding = {axis for layout in layouts.values() for axis in names if _dim(layout, axis) is not None}
    data = tuple(axis for axis in names if axis in _DATA_AXES and mesh[axis].size() > 1)
    for axis in names:
        if axis in styles:
            apply_plan(model, mesh[axis], styles[axis], check=check)
    if data:
        local = _local(model)
        # By identity: FSDP2 passes a parameter without its name, before it replaces it.
        axis_dims = {id(p): [_dim(layouts[name], axis) for axis in data] for name, p in model.named_parameters()}
        dims = {key: next((dim for dim in dims if dim is not None), 0) for key, dims in axis_dims.items()}
        for block in [*_repeated_blocks(model), model]:
            if sharding & set(data):
                fully_shard(block, mesh=mesh[data], shard_placement_fn=lambda p: Shard(dims[id(p)]))
            else:
                _torch_compat.replicate(block, mesh[data[0]], set(local.values()))
        for parameter in local.values():  # torch would make DTensors of them, without sections
            parameter.register_post_accumulate_grad_hook(AverageGradient(mesh[data[0]]))
    return model


def _local(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if sharding_info_of(p) is not None}


class AverageGradient:
    """Average a local shard's gradient over a data axis, after each backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, parameter: torch.Tensor) -> None:
        """Reduce the gradient in place."""
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self.mesh.get_group())  # earlier accumulated parts are equal already
        parameter.grad /= self.mesh.size()


@own_errors()  # of shard-spec, which it calls
def _decided(
    model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan
) -> tuple[dict[str, Layout], dict[str, dict[str, ParallelStyle]]]:
    """Return each parameter's layout, and the styles along each model axis; no communication, no changes."""
    names, resolution = mesh.mesh_dim_names or (), plan.resolve(model)
    layouts: dict[str, Layout] = {name: resolution[name] for name, _ in model.named_parameters()}
    problems = _axis_problems(names, mesh, layouts)
    if problems:
        raise PlanError(problems, "the plan cannot be carried out on this mesh:")
    sharding = [axis for axis in names if any(_dim(layout, axis) is not None for layout in layouts.values())]
    shards_data = any(axis in _DATA_AXES and mesh[axis].size() > 1 for axis in sharding)
    styles: dict[str, dict[str, ParallelStyle]] = {}
    for axis in (axis for axis in sharding if axis not in _DATA_AXES):
        styles[axis] = from_sharding_plan(plan, model, axis=axis)
        planned = plan_styles(model, styles[axis], mesh[axis].size())
        planned.raise_problems()
        problems += _differences(model, cuts_on_axis(plan, model, axis), planned)
        if shards_data:
            # FSDP2 would take a local shard for the full parameter, and store it so in a checkpoint.
            problems += [
                Problem(
                    "plan-not-executable",
                    name,
                    found="a shard that no DTensor describes cannot be sharded again by FSDP2",
                    hint="use DistributedDataParallel (tp_ddp_bridge), or plan without kv copies and fused order",
                )
                for name, spec in planned.parameters.items()
                if not spec.split.is_plain(planned.tp_size)
            ]
    if problems:
        raise PlanError(problems)
    return layouts, styles


def _axis_problems(names: tuple[str, ...], mesh: DeviceMesh, layouts: dict[str, Layout]) -> list[Problem]:
    """List reasons against the axes of a plan: no counterpart in torch or the styles."""
    problems: list[Problem] = []
    for name, layout in layouts.items():
        if tuple(layout.mesh.axis_names) != tuple(names) or layout.mesh.shape != tuple(mesh.shape):
            text, hint = f"{layout.mesh}; the mesh has {names} of {tuple(mesh.shape)}", "plan for the axes of the mesh"
            return [Problem("mesh-mismatch", name, found=text, hint=hint)]
    sharding = [axis for axis in names if any(_dim(layout, axis) is not None for layout in layouts.values())]
    data = [axis for axis in names if axis in _DATA_AXES and mesh[axis].size() > 1]
    model, shards = [a for a in sharding if a not in _DATA_AXES], [a for a in data if a in sharding]
    replicates = [axis for axis in data if axis not in sharding]
    if len(model) > 1 or len(shards) > 1 or len(replicates) > 1 or [*replicates, *shards] != data:
        problems.append(
            Problem(
                "plan-not-executable",
                "mesh",
                found=f"model axes {model}, data axes that shard {shards} and that replicate {replicates}",
                hint="one model axis, one data axis that shards, and one that replicates before it",
            )
        )
    for name, layout in layouts.items() if shards else ():
        if not isinstance(layout.placements[names.index(shards[0])], Shard):
            problems.append(
                Problem(
                    "plan-not-executable",
                    name,
                    axis=shards[0],
                    found=f"{layout}: fully_shard shards every parameter along {shards[0]!r}",
                    hint="plan with FullyShardPlanner, and without rules that replicate",
                )
            )
    return problems


def _differences(model: nn.Module, cuts: AxisCuts, planned: TPPlan) -> Iterator[Problem]:
    """Compare the splits of the styles with those of the plan, before anything is changed."""
    for tied in names_of_parameters(model):
        split = next((planned.parameters[name].split for name in tied if name in planned.parameters), None)
        wanted = cuts.splits.get(tied[0], Split.replicated())
        both_full = wanted.is_replicated and (split is None or split.is_replicated)
        if not both_full and (split is None or not cuts.agree(tied[0], split)):
            yield Problem(
                "layout-mismatch",
                tied[0],
                found=f"{split or Split.replicated()}, planned is {wanted}",
                hint="report this: the plan was accepted",
            )


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return children of the outermost `ModuleList`s of several modules, in order."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    inner = {id(below) for each in lists for child in each for below in child.modules() if below is not child}
    return [child for each in lists if id(each) not in inner for child in each]


def _dim(layout: Layout, axis: str) -> int | None:
    dim: int | None = layout.specs[layout.mesh.axis_index(axis)].dim
    return dim
