"""Apply a plan, all of it or nothing; undo it. All steps that communicate or may fail come before all changes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tp_styles._shared.consensus import assert_consistent
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._shared.stale_parameters import current_parameter, is_stale, mark_stale
from tp_styles._torch_compat import TorchParallelStyle, current_mesh
from tp_styles.check.checker import Check, Checker, originals, watch_registrations
from tp_styles.check.optimizers import check_optimizers, keep_sections
from tp_styles.check.runs import fsdp_units
from tp_styles.plan.model import PlannedModule, TPPlan
from tp_styles.plan.planned import Plan, Rest, plan_module
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.dropout import install_regions
from tp_styles.runtime.install import (
    KeyRemover,
    ModuleChange,
    apply_torch_style,
    changes_below,
    checked_modules,
    install_module,
    restore,
    settle,
    share_inputs,
    take_back,
)
from tp_styles.runtime.parameters import (
    ShardParameter,
    agreed_values,
    full_tensor,
    is_shard,
    make_parameter,
    split_of,
)
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.runtime.state_hooks import (
    FULL_MODEL,
    FullModelOnly,
    GlobalOnSave,
    LocalOnLoad,
    PreserveShardingOnApply,
    ResetFullParameters,
)
from tp_styles.values import ParameterSpec, PerRank, Split


class TPHandle:
    """A model with an applied plan.

    Attributes:
        plan: The applied plan.
        model: The model.
        mesh: The 1-D mesh.
    """

    def __init__(
        self, model: nn.Module, plan: TPPlan, axis: TPGroup, changes: list[ModuleChange], checker: Checker | None
    ) -> None:
        self.model = model
        self.plan = plan
        self.mesh = axis.mesh
        self._axis = axis
        self._changes = changes
        self._checker = checker

    def report(self) -> str:
        """Return plan and checked calls as text."""
        checked = self._checker.report() if self._checker is not None else []
        return "\n".join([self.plan.explain(), *checked])

    def undo(self) -> nn.Module:
        """Restore full parameters (with their present values and gradients) and the model's own forwards.

        Every rank calls it: shards are gathered. The parameters are new objects.

        Returns:
            The model.

        Raises:
            PlanError: It was undone before, on this rank or on another; FSDP2 holds the parameters; or another rank has
                other parameters in place.
        """
        fault = None
        if self.plan.modules and not self._changes:
            fault = PlanError(
                Problem("already-applied", found="undo() a second time", hint="apply the plan again first")
            )
        elif fsdp_units(self.model) or self._is_sharded_again():  # FSDP2's own tables would hold the shards
            reason = "FSDP2 holds the model's parameters"
            hint = "undo() before fully_shard(); full_state_dict(model) has the full values, for a model of one process"
            fault = PlanError(Problem("model-changed", "undo()", found=reason, hint=hint))
        self._complete_gradients()
        same = "every rank needs the same parameters in the same places"
        assert_consistent(self._axis.group, "undo", self._parts(), fault, hint=same)
        full: dict[int, nn.Parameter] = {}
        restored = [
            (
                change.module,
                name,
                _whole(change.module._parameters.get(name), change.splits.get(name), self._axis, full),
            )
            for change in self._changes
            for name in change.replaced
        ]
        names = {module: name for name, module in self.model.named_modules()}
        for module, name, parameter in restored:  # no communication from here on
            part, path = module._parameters.get(name), names.get(module, "")
            module._parameters[name] = parameter
            if part is not None:
                fqn = f"{path}.{name}" if path else name
                mark_stale(
                    part,
                    Problem(
                        "parameter-replaced",
                        fqn,
                        found="undo() gave the module a full parameter; an optimizer still holds the shard",
                        hint="build the optimizer again",
                    ),
                )
        take_back(self._changes)
        self._changes = []  # a second undo() raises
        return self.model

    def _is_sharded_again(self) -> bool:
        """True if a parameter of the plan lies on another mesh now: `fully_shard` of a model around this one."""
        parts: list[Any] = [change.module._parameters.get(name) for change in self._changes for name in change.replaced]
        return any(isinstance(part, DTensor) and part.device_mesh != self._axis.mesh for part in parts)

    def _complete_gradients(self) -> None:
        """Give shards with all rows on one rank (numbered experts) a gradient on every rank, if any rank has one."""
        shards = [
            current
            for change in self._changes
            for name in change.replaced
            if change.splits.get(name, Split()).is_on_one_rank
            if (current := change.module._parameters.get(name)) is not None
        ]
        if not shards:
            return
        everyone = self._axis.all_gather_objects([shard.grad is not None for shard in shards], "undo")
        for index, shard in enumerate(shards):
            if shard.grad is None and any(has_gradient[index] for has_gradient in everyone):
                shard.grad = torch.zeros_like(shard)

    def _parts(self) -> list[str]:
        """List the shards to gather, one a line."""
        names = {module: name for name, module in self.model.named_modules()}
        lines = []
        for change in self._changes:
            for name in change.replaced:
                current, split, text = change.module._parameters.get(name), change.splits.get(name), "none"
                if current is not None and split is not None and split.is_replicated:
                    text = "replicated"  # a rank's own, gathered from no other
                elif current is not None:
                    gradient = "with" if current.grad is not None else "without"
                    text = f"{type(current).__name__}, {current.dtype}, {gradient} a gradient"
                lines.append(f"{names.get(change.module, '')}.{name}: ".lstrip(".") + text)
        return lines


def _whole(
    current: nn.Parameter | None, split: Split | None, axis: TPGroup, memo: dict[int, nn.Parameter]
) -> nn.Parameter | None:
    if current is None:
        return None
    if id(current) not in memo:
        parameter = nn.Parameter(_gathered(current, split, axis), current.requires_grad)
        attributes = {key: value for key, value in vars(current).items() if key != "_sharding_info"}  # full now
        parameter.__dict__.update(attributes)
        if current.grad is not None:
            parameter.grad = _gathered(current.grad, split, axis)
        memo[id(current)] = parameter
    return memo[id(current)]


def _gathered(value: torch.Tensor, split: Split | None, axis: TPGroup) -> torch.Tensor:
    if split is not None:
        return full_tensor(value, axis, split)
    if isinstance(value, DTensor):
        return cast(DTensor, value.detach()).full_tensor()
    info = sharding_info_of(value)
    return full_tensor(value, axis, split_of(info)) if info is not None else value.detach().clone()


CALL = "apply_plan"


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | TorchParallelStyle,
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
    check: Check = "first",
    rest: Rest = "plain",
) -> TPHandle:
    """Make a model tensor parallel over a 1-D mesh, in place. After an error nothing is changed.

    Args:
        model: The model, with full parameters on every rank; or on the meta device.
        mesh: 1-D mesh; a slice of a larger one, `mesh["tp"]`, too.
        plan: FQN pattern -> style, or one style for the model.
        src_data_rank: Group rank with the source values; None takes each rank's own: these have to be equal if they
            are replicated.
        strict: Report a pattern without a module.
        check: `"first"`: compare plan and parameters between the ranks; if one rank cannot go on, all raise. At
            the first call of each mode (training or not, with gradients or without) compare the model's inputs between
            the ranks, and run each region between shards, and the model, twice more: sharded, and as the original on
            full weights; different outputs and gradients raise on every rank. `"always"`: every call; `"never"`: no
            comparison at all.
        rest: `"plain"` leaves parameters without a style as they are. `"replicated"` makes DTensors of them: fused and
            foreach optimizers, torch's gradient clipping and norms of one's own then see one kind of tensor.

    Returns:
        A handle with the plan, a report and `undo()`.

    Raises:
        PlanError: All problems of the plan, before any change. Ranks without a problem raise too, and name the rank
            with one.
    """
    return apply_staged(model, mesh, plan, src_data_rank, strict=strict, check=check, is_staged=False, rest=rest)


def apply_staged(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | TorchParallelStyle,
    src_data_rank: int | None,
    *,
    strict: bool = True,
    check: Check = "first",
    is_staged: bool = True,
    rest: Rest = "plain",
) -> TPHandle:
    """Run `apply_plan`, with `is_staged` for a part of a model. Shards may enter and leave a part.

    In a staged call `src_data_rank=None` communicates nothing, as in torch.
    """
    check_mesh(mesh)
    axis = TPGroup(mesh)  # no process group is made
    compares = check != "never" and not (is_staged and src_data_rank is None)
    arguments = (f"src_data_rank={src_data_rank!r}", f"check={check!r}", f"rest={rest!r}")
    decided, fault = TPPlan(axis.size), None
    try:
        decided = plan_module(model, plan, axis.size, strict=strict, is_staged=is_staged, rest=rest)
        problems = tuple(_problems_of_the_call(axis, src_data_rank, check, rest))
        TPPlan(axis.size, problems=(*decided.problems, *problems)).raise_problems()
        if elsewhere := list(_sharded_elsewhere(model, decided, axis, is_staged)):
            raise PlanError(elsewhere)
    except Exception as error:
        fault = error  # raised once all ranks have compared
    if compares:
        _compare(decided, arguments, model, axis, fault)
    elif fault is not None:
        raise fault
    modules = {planned.name: model.get_submodule(planned.name) for planned in decided.modules}
    # Everything that communicates or may fail comes first, without changes of the model.
    new_parameters = _new_parameters(decided, modules, axis, src_data_rank, compares)
    changes: list[ModuleChange] = []
    checker = None
    try:
        for planned in decided.modules:
            if planned.spec.compute == "foreign":
                changes += apply_torch_style(planned, modules[planned.name], axis.mesh, src_data_rank)
            else:
                changes += _apply_own(planned, modules[planned.name], axis, new_parameters)
        for module in modules.values():  # last: they leave modules alone that have a forward of their own
            changes += changes_below(module)
        for submodule in model.modules():
            if hasattr(
                type(submodule), "resize_token_embeddings"
            ):  # a model of transformers: refuse what takes a full one
                vars(submodule).update({name: FullModelOnly(submodule, name) for name in FULL_MODEL})
                changes.append(
                    ModuleChange(submodule, removers=[KeyRemover(vars(submodule), name) for name in FULL_MODEL])
                )
        share_inputs(model, decided, axis)
        changes.append(ModuleChange(model, removers=install_regions(model, decided, axis, decided.regions)))
        if check != "never" and decided.modules:
            may_leave = is_staged or _declares_shards(decided)
            always, before = check == "always", originals(changes)
            checker = Checker(model, axis, before, decided, always=always, is_staged=is_staged, may_leave=may_leave)
            checker.install(model, checked_modules(decided))
            changes.append(ModuleChange(model, removers=[checker.take_back]))
    except BaseException:
        restore(changes)  # all of the plan or nothing
        raise
    settle(model, changes)  # nothing can fail any more
    watch_registrations()  # for DDP around shards
    keep_sections()
    if check != "never":
        check_optimizers()
    return TPHandle(model, decided, axis, changes, checker)


def _declares_shards(plan: TPPlan) -> bool:
    """True if the plan lets shards leave the model as plain tensors."""
    for planned in plan.modules:
        shards = any(flow is not None and isinstance(flow.dst, Shard) for flow in planned.spec.outputs)
        # The last two define their outputs in functions of their own.
        if (shards or planned.spec.compute in ("dtensor", "foreign")) and getattr(
            planned.style, "declares_output", True
        ):
            return True
    return False


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse anything but a 1-D mesh with this rank in it.

    Raises:
        PlanError: It is something else.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(Problem("wrong-type", "mesh", found=str(type(mesh)), hint="pass a torch DeviceMesh"))
    if mesh.ndim != 1:
        raise PlanError(
            Problem(
                "invalid-mesh", "mesh", found=f"{mesh.ndim} dims", hint='pass one axis of it, for example mesh["tp"]'
            )
        )
    if mesh.get_coordinate() is None:
        raise PlanError(
            Problem(
                "rank-outside-mesh", "mesh", found=f"rank {dist.get_rank()}", hint="call it on the mesh's ranks only"
            )
        )


# ---------------------------------------------------------------------------------------------- steps


def _problems_of_the_call(axis: TPGroup, src_data_rank: int | None, check: Check, rest: Rest) -> Iterator[Problem]:
    if check not in ("first", "always", "never"):
        yield Problem("invalid-argument", "check", found=repr(check), hint='"first", "always" or "never"')
    if rest not in ("plain", "replicated"):
        yield Problem("invalid-argument", "rest", found=repr(rest), hint='"plain" or "replicated"')
    if src_data_rank is not None and not 0 <= src_data_rank < axis.size:
        yield Problem(
            "invalid-argument",
            "src_data_rank",
            found=repr(src_data_rank),
            hint=f"a rank in the group, 0 to {axis.size - 1}; or None",
        )


def _sharded_elsewhere(model: nn.Module, plan: TPPlan, axis: TPGroup, is_staged: bool) -> Iterator[Problem]:
    """Yield weights that an earlier call sharded in another module, and otherwise."""
    specs = plan.parameters if is_staged else {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_stale(parameter) and not (is_staged and name not in specs):
            if name in specs and is_shard(current_parameter(parameter), specs[name].split, axis.mesh):
                continue  # the tie is kept: both modules will hold the one shard
            yield Problem(
                "tied-weights",
                name,
                found="the weight was sharded in another module, which does not share it any more",
                hint="apply one plan to a module that holds both",
            )


def _compare(
    plan: TPPlan, arguments: tuple[str, ...], model: nn.Module, axis: TPGroup, fault: Exception | None
) -> None:
    """Compare arguments, plan and metadata between the ranks. This rank's error is raised on all."""
    if fault is not None:
        assert_consistent(axis.group, CALL, error=fault)
    lines = [
        f"{planned.info.where(name)}: {list(p.shape)} {p.dtype} {p.device.type}{'' if p.requires_grad else ' frozen'}"
        for planned in plan.modules
        for name, p, _ in parameters_of(planned, model.get_submodule(planned.name))
    ]
    lines += [json.dumps(module, sort_keys=True) for module in plan.as_dict["modules"]]
    assert_consistent(
        axis.group,
        CALL,
        [*arguments, *lines, f"digest of the plan: {plan.digest}"],
        hint="compare apply_plan's arguments, and plan_styles(...).to_json() of both",
    )


def _new_parameters(
    plan: TPPlan, modules: dict[str, nn.Module], axis: TPGroup, src_data_rank: int | None, compares: bool
) -> dict[int, nn.Parameter]:
    """Map each original parameter (by id) to this rank's shard; tied ones once."""
    created: dict[int, nn.Parameter] = {}
    unequal: list[str] = []
    for planned in plan.modules:
        for name, original, spec in parameters_of(planned, modules[planned.name]):
            if id(original) in created:
                continue
            if is_stale(original):  # sharded in the same way by a staged call in another module
                created[id(original)] = current_parameter(original)  # type: ignore[assignment]  # a parameter's is one
                continue
            if compares and src_data_rank is None and spec.split.is_replicated and not original.is_meta:
                same = torch.equal(agreed_values(original.detach(), axis, 0), original.detach())
                unequal += [] if all(axis.all_gather_objects(same, CALL)) else [planned.info.where(name)]
            created[id(original)] = make_parameter(original, spec, axis, src_data_rank)
    if unequal:
        text, hint = "other values than on rank 0 of the group", "src_data_rank=0 broadcasts them"
        raise PlanError(Problem("replicas-differ", name, found=text, hint=hint) for name in unequal)
    return created


def parameters_of(planned: PlannedModule, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """Yield name below the module, parameter and spec of a style's parameters."""
    for name, spec in planned.spec.parameters:
        path, _, attribute = name.rpartition(".")
        original = module.get_submodule(path)._parameters[attribute]
        assert original is not None, name
        yield name, original, spec


def _apply_own(
    planned: PlannedModule, module: nn.Module, axis: TPGroup, shards: dict[int, nn.Parameter]
) -> list[ModuleChange]:
    changes: dict[str, ModuleChange] = {"": ModuleChange(module)}
    for name, original, spec in parameters_of(planned, module):
        path, _, attribute = name.rpartition(".")
        change = changes.setdefault(path, ModuleChange(module.get_submodule(path)))
        change.parameters[attribute] = original  # for undo
        change.splits[attribute] = spec.split
        change.module._parameters[attribute] = shards[id(original)]
    for name, value in planned.spec.attributes:
        path, _, attribute = name.rpartition(".")
        change = changes.setdefault(path, ModuleChange(module.get_submodule(path)))
        before = change.attributes[attribute] = getattr(change.module, attribute)  # for undo
        if isinstance(value, Split):
            value = value.local_size(axis.rank, axis.size)
        setattr(change.module, attribute, before // axis.size if isinstance(value, PerRank) else value)
    for name, dim in planned.spec.buffers:
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
    changes[""].removers += install_module(planned, module, axis)
    return [*changes.values()]


def _keep(change: ModuleChange) -> None:
    """Keep a module's new parameters sharded through saving, loading, moving and replacing."""
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


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: TorchParallelStyle | Mapping[str, TorchParallelStyle] | None = None,
    tp_mesh_dim: int = 0,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a module tensor parallel, in place, and return it. `apply_plan` does the same and returns a handle.

    Args:
        module: The module.
        device_mesh: The mesh; by default that of the innermost `with mesh:` block.
        parallelize_plan: One style for the module, or FQN pattern -> style; patterns without a module are an error.
        tp_mesh_dim: Tensor-parallel dim of a mesh with several.
        src_data_rank: Group rank with the source values; None takes each rank's own.

    Raises:
        PlanError: All problems of the plan, before any change; on every rank, if there is one
            on any.
    """
    device_mesh = device_mesh if device_mesh is not None else current_mesh()
    mesh = None if device_mesh is None else one_dim(device_mesh, tp_mesh_dim)
    if parallelize_plan is None:
        if mesh is not None:  # another rank may have a plan
            apply_staged(module, mesh, {}, src_data_rank)
        warnings.warn("parallelize_module without a parallelize_plan changes nothing", stacklevel=2)
        return module
    if mesh is None:
        raise PlanError(
            Problem("missing-mesh", "device_mesh", found="None", hint="pass a mesh, or call it inside of `with mesh:`")
        )
    apply_staged(module, mesh, parallelize_plan, src_data_rank)
    return module


def one_dim(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Return one dim of a mesh as a 1-D mesh, without a new process group.

    Raises:
        PlanError: The mesh has no such dim.
    """
    if mesh.ndim == 1:
        return mesh
    if not -mesh.ndim <= dim < mesh.ndim:
        raise PlanError(
            Problem("invalid-mesh", "tp_mesh_dim", found=str(dim), hint=f"the mesh has {mesh.ndim} dims: {mesh}")
        )
    dim %= mesh.ndim
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[dim]]  # stays a slice of its root mesh
    return DeviceMesh.from_group(mesh.get_group(dim), mesh.device_type)
