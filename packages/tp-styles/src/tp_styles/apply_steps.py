"""Carries a plan out: first all that communicates or may fail, then the model is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tp_styles._shared.stale_parameters import current_parameter, is_stale
from tp_styles.check.checker import Check, Checker, install_check, scopes_of, watch_registrations
from tp_styles.check.runs import originals
from tp_styles.plan.planned import PlannedModule, TPPlan
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.changes import ModuleChange, restore, settle
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.dropout import checked_modules, install_regions, regions_of
from tp_styles.runtime.install import install_module
from tp_styles.runtime.optimizer_checks import check_optimizers
from tp_styles.runtime.parameters import ShardParameter, make_parameter
from tp_styles.runtime.state_hooks import (
    GlobalOnSave,
    LocalOnLoad,
    PreserveShardingOnApply,
    ResetFullParameters,
)
from tp_styles.runtime.torch_styles import apply_torch_style
from tp_styles.values.spec import ParameterSpec, PerRank
from tp_styles.values.split import Split


def apply_steps(
    model: nn.Module,
    plan: TPPlan,
    axis: TPGroup,
    src_data_rank: int | None,
    *,
    check: Check,
    compares: bool,
    is_staged: bool,
    may_leave: bool,
) -> tuple[list[ModuleChange], Checker | None]:
    """Make the parameters, then change the modules: all of it or nothing.

    Args:
        model: As `apply_plan`, and so the others.
        plan: What to do; it has no problems.
        axis: Over which ranks.
        src_data_rank: As `apply_plan`.
        check: As `apply_plan`.
        compares: Ranks compare values now.
        is_staged: The root's inputs may be shards.
        may_leave: A shard may leave the root as a plain tensor.

    Raises:
        PlanError: Ranks hold different values of what is replicated.
    """
    modules = {found.name: model.get_submodule(found.name) for found in plan.modules}
    # Everything that communicates or may fail comes first; nothing of the model is changed by it.
    made = _new_parameters(plan, modules, axis, src_data_rank, compares)
    changes: list[ModuleChange] = []
    checker = None
    try:
        for found in plan.modules:
            if found.spec.compute == "foreign":
                changes += apply_torch_style(found, modules[found.name], axis.mesh, src_data_rank)
            else:
                changes += _apply_own(found, modules[found.name], axis, made)
        regions = regions_of(plan)
        changes.append(ModuleChange(model, removers=install_regions(model, plan, axis, regions)))
        if check != "never" and plan.modules:
            checker = Checker(
                model, axis, originals(changes), always=check == "always", is_staged=is_staged, may_leave=may_leave
            )
            scopes = scopes_of(model, plan, checked_modules(plan, regions))
            changes.append(ModuleChange(model, removers=install_check(checker, scopes)))
    except BaseException:
        restore(changes)
        raise
    settle(model, changes)
    watch_registrations()
    if check != "never":
        check_optimizers()
    return changes, checker


def _new_parameters(
    plan: TPPlan, modules: dict[str, nn.Module], axis: TPGroup, src_data_rank: int | None, compares: bool
) -> dict[int, nn.Parameter]:
    """Original parameter (by id) -> this rank's part of it; tied ones once."""
    made: dict[int, nn.Parameter] = {}
    unequal: list[str] = []
    for found in plan.modules:
        for name, original, spec in parameters_of(found, modules[found.name]):
            if id(original) in made:
                continue
            if is_stale(original):  # a staged call has sharded it in another module, in the same way
                made[id(original)] = current_parameter(original)  # type: ignore[assignment]  # a parameter's is one
                continue
            if compares and src_data_rank is None and spec.split.is_replicated and not original.is_meta:
                same = _is_same_everywhere(original.detach(), axis)
                unequal += [] if same else [found.info.where(name)]
            made[id(original)] = make_parameter(original, spec, axis, src_data_rank)
    if unequal:
        raise PlanError(
            Problem(
                "replicas-differ",
                name,
                found="other values than on rank 0 of the group",
                hint="src_data_rank=0 broadcasts them",
            )
            for name in unequal
        )
    return made


def parameters_of(found: PlannedModule, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """Name below the module, parameter and spec of everything that a style divides or makes equal."""
    for name, spec in found.spec.parameters:
        path, _, attribute = name.rpartition(".")
        original = module.get_submodule(path)._parameters[attribute]
        if original is None:
            raise KeyError(name)
        yield name, original, spec


def _is_same_everywhere(value: torch.Tensor, axis: TPGroup) -> bool:
    reference = value.clone(memory_format=torch.contiguous_format)
    dist.broadcast(reference, group=axis.group, group_src=0)
    found = axis.all_gather_objects(bool(torch.equal(reference, value)), "apply_plan")
    return all(found)


def _apply_own(
    found: PlannedModule, module: nn.Module, axis: TPGroup, made: dict[int, nn.Parameter]
) -> list[ModuleChange]:
    changes: dict[str, ModuleChange] = {"": ModuleChange(module)}
    for name, original, spec in parameters_of(found, module):
        path, _, attribute = name.rpartition(".")
        change = changes.setdefault(path, ModuleChange(module.get_submodule(path)))
        change.parameters[attribute] = original
        change.splits[attribute] = spec.split
        change.module._parameters[attribute] = made[id(original)]
    for name, value in found.spec.attributes:
        path, _, attribute = name.rpartition(".")
        change = changes.setdefault(path, ModuleChange(module.get_submodule(path)))
        before = change.attributes[attribute] = getattr(change.module, attribute)
        if isinstance(value, Split):
            value = value.local_size(axis.rank, axis.size)
        setattr(change.module, attribute, before // axis.size if isinstance(value, PerRank) else value)
    for name, dim in found.spec.buffers:
        path, _, attribute = name.rpartition(".")
        change = changes.setdefault(path, ModuleChange(module.get_submodule(path)))
        buffer = change.module._buffers[attribute]
        assert buffer is not None
        change.attributes[attribute] = buffer
        local = Split.along(dim, buffer.shape[dim]).take(buffer, axis.rank, axis.size)
        change.module._buffers[attribute] = local
    for change in changes.values():
        if change.parameters:
            _keep(change)
    changes[""].removers += install_module(found, module, axis)
    return list(changes.values())


def _keep(change: ModuleChange) -> None:
    """Keep a module's new parameters shards of global ones through saving, loading, moving and replacing."""
    names = tuple(change.parameters)
    local = tuple(name for name in names if isinstance(change.module._parameters[name], ShardParameter))
    owner: Any = change.module  # torch leaves these two untyped
    shards = tuple(name for name in local if not change.splits[name].is_replicated)
    change.removers.append(owner.register_state_dict_post_hook(GlobalOnSave(names, shards)).remove)
    change.removers.append(owner.register_load_state_dict_pre_hook(LocalOnLoad(names)).remove)
    if local:
        vars(owner)["_apply"] = PreserveShardingOnApply(owner, local)
        change.removers.append(lambda: vars(owner).pop("_apply", None) and None)
    if hasattr(type(owner), "reset_parameters"):
        vars(owner)["reset_parameters"] = ResetFullParameters(owner, names)
        change.removers.append(lambda: vars(owner).pop("reset_parameters", None) and None)
