"""Acting on a plan: all of it or nothing, and back again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.plan.planned import Plan, PlannedModule, TPPlan, plan_styles
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.axis import Axis
from tp_styles.runtime.install import install_module
from tp_styles.runtime.parameters import Mode, full_tensor, make_parameter, split_of
from tp_styles.runtime.regions import install_regions
from tp_styles.spec import ParameterSpec
from tp_styles.split import Split
from tp_styles.state import GlobalOnSave, LocalOnLoad


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
        check: Compare the plan between the ranks first, and in the first forward the inputs of parameters that have no
            style and may stand inside a sharded region (`"never"`: do not).

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
    axis = Axis(mesh)
    if check != "never":
        check_agreement(plan, params, axis)
    return _act(model, plan, axis, params, src_data_rank, check=check != "never")


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


# ---------------------------------------------------------------------------------------------- the handle


@dataclass
class ModuleChange:
    """What was done to one module, so that it can be taken back."""

    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    removers: list[Callable[[], None]] = field(default_factory=list)


class TPHandle:
    """A model that was made parallel.

    Attributes:
        plan: What was decided.
        model: The model.
        mesh: The 1-D mesh.
    """

    def __init__(self, model: nn.Module, plan: TPPlan, axis: Axis, changes: list[ModuleChange]) -> None:
        self.model = model
        self.plan = plan
        self.mesh = axis.mesh
        self._axis = axis
        self._changes = changes

    def report(self, path: str | None = None) -> str:
        """The plan as text, also written to `path` if one is given."""
        text = self.plan.explain()
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def undo(self) -> nn.Module:
        """Give the model whole parameters (with the values and gradients they have now) and its own forwards again.

        Every rank calls it: parts are gathered. The parameters are new objects.

        Returns:
            The model.

        Raises:
            PlanError: It was undone before.
        """
        if not self._changes and self.plan.modules:
            raise PlanError(Problem("undone", found="undo() a second time", hint="apply the plan again first"))
        whole: dict[int, nn.Parameter] = {}
        restored = [
            (
                change.module,
                name,
                _whole(change.module._parameters.get(name), change.splits.get(name), self._axis, whole),
            )
            for change in self._changes
            for name in change.parameters
        ]
        for module, name, parameter in restored:
            module._parameters[name] = parameter
        _take_back(self._changes)
        self._changes = []
        return self.model


def _whole(
    current: nn.Parameter | None, split: Split | None, axis: Axis, memo: dict[int, nn.Parameter]
) -> nn.Parameter | None:
    if current is None:
        return None
    if id(current) not in memo:
        parameter = nn.Parameter(_gathered(current, split, axis), current.requires_grad)
        attributes = {key: value for key, value in vars(current).items() if key != "_sharding_info"}
        parameter.__dict__.update(attributes)
        if current.grad is not None:
            parameter.grad = _gathered(current.grad, split, axis)
        memo[id(current)] = parameter
    return memo[id(current)]


def _gathered(value: torch.Tensor, split: Split | None, axis: Axis) -> torch.Tensor:
    if split is not None:
        return full_tensor(value, axis, split)
    if isinstance(value, DTensor):
        return cast(DTensor, value.detach()).full_tensor()
    info = getattr(value, "_sharding_info", None)
    return full_tensor(value, axis, split_of(info)) if info is not None else value.detach().clone()


def _take_back(changes: list[ModuleChange]) -> None:
    for change in reversed(changes):
        for remove in reversed(change.removers):
            remove()
        for name, value in change.attributes.items():
            setattr(change.module, name, value)


# ---------------------------------------------------------------------------------------------- acting


def _act(
    model: nn.Module, plan: TPPlan, axis: Axis, params: Mode, src_data_rank: int | None, *, check: bool
) -> TPHandle:
    modules = {found.name: model.get_submodule(found.name) for found in plan.modules}
    # Everything that communicates or may fail comes first; nothing of the model is changed by it.
    made = _new_parameters(plan, modules, axis, params, src_data_rank)
    changes: list[ModuleChange] = []
    try:
        for found in plan.modules:
            if found.spec.compute == "foreign":
                changes += _apply_foreign(found, modules[found.name], axis.mesh, src_data_rank)
            else:
                changes += _apply_own(found, modules[found.name], axis, made)
        changes.append(ModuleChange(model, removers=install_regions(model, plan, axis, check=check)))
    except BaseException:
        _restore(changes)
        raise
    return TPHandle(model, plan, axis, changes)


def _new_parameters(
    plan: TPPlan, modules: dict[str, nn.Module], axis: Axis, params: Mode, src_data_rank: int | None
) -> dict[int, nn.Parameter]:
    """Original parameter (by id) -> this rank's part of it; tied ones once."""
    made: dict[int, nn.Parameter] = {}
    unequal: list[str] = []
    for found in plan.modules:
        mode: Mode = "dtensor" if found.spec.compute == "dtensor" else params
        for name, original, spec in _parameters(found, modules[found.name]):
            if id(original) in made:
                continue
            if src_data_rank is None and spec.split.is_replicated and not original.is_meta:
                same = _is_same_everywhere(original.detach(), axis)
                unequal += [] if same else [found.info.where(name)]
            made[id(original)] = make_parameter(original, spec, axis, mode, src_data_rank)
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


def _parameters(found: PlannedModule, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    for name, spec in found.spec.parameters:
        path, _, attribute = name.rpartition(".")
        original = module.get_submodule(path)._parameters[attribute]
        assert original is not None
        yield name, original, spec


def _is_same_everywhere(value: torch.Tensor, axis: Axis) -> bool:
    reference = value.clone(memory_format=torch.contiguous_format)
    dist.broadcast(reference, group=axis.group, group_src=0)
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, bool(torch.equal(reference, value)), group=axis.group)
    return all(found)


def _apply_own(
    found: PlannedModule, module: nn.Module, axis: Axis, made: dict[int, nn.Parameter]
) -> list[ModuleChange]:
    changes: dict[str, ModuleChange] = {"": ModuleChange(module)}
    for name, original, spec in _parameters(found, module):
        path, _, attribute = name.rpartition(".")
        change = changes.setdefault(path, ModuleChange(module.get_submodule(path)))
        change.parameters[attribute] = original
        change.splits[attribute] = spec.split
        change.module._parameters[attribute] = made[id(original)]
    first = changes[""]
    for name, value in found.spec.attributes:
        first.attributes[name] = getattr(module, name)
        setattr(module, name, value.local_size(axis.rank, axis.size) if isinstance(value, Split) else value)
    for change in changes.values():
        names = tuple(change.parameters)
        if names:
            owner: Any = change.module  # torch leaves these two untyped
            change.removers.append(owner.register_state_dict_post_hook(GlobalOnSave(names)).remove)
            change.removers.append(owner.register_load_state_dict_pre_hook(LocalOnLoad(names)).remove)
    first.removers += install_module(found, module, axis)
    return list(changes.values())


_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _apply_foreign(
    found: PlannedModule, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> list[ModuleChange]:
    """A style that only knows how it is applied: what it did is found by comparing before and after."""
    before = [(child, dict(child._parameters), _hooks(child), dict(vars(child))) for child in module.modules()]
    found.style.src_data_rank = src_data_rank
    try:
        returned = found.style._apply(module, mesh)
    except BaseException:
        _restore(_differences(before))
        raise
    changes = _differences(before)
    if returned is not module:
        _restore(changes)
        raise PlanError(
            Problem(
                "module-replaced",
                found.name,
                found=f"{found.style!r} returned another module",
                hint="a style works on the module it is given",
            )
        )
    return changes


_Before = list[tuple[nn.Module, dict[str, Any], dict[str, set[int]], dict[str, Any]]]


def _differences(before: _Before) -> list[ModuleChange]:
    changes = []
    for child, parameters, hooks, attributes in before:
        replaced = {key: value for key, value in parameters.items() if child._parameters.get(key) is not value}
        change = ModuleChange(child, parameters={key: value for key, value in replaced.items() if value is not None})
        change.removers += _hook_removers(child, hooks)
        change.removers += [_AttributeRemover(child, key) for key in vars(child) if key not in attributes]
        if "forward" in attributes and vars(child)["forward"] is not attributes["forward"]:
            change.attributes["forward"] = attributes["forward"]
        changes.append(change)
    return changes


def _restore(changes: list[ModuleChange]) -> None:
    """Put everything back as it was, the parameters too."""
    for change in changes:
        change.module._parameters.update(change.parameters)
    _take_back(changes)


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    return {table: set(getattr(module, table)) for table in _HOOK_TABLES if hasattr(module, table)}


def _hook_removers(module: nn.Module, before: dict[str, set[int]]) -> list[Callable[[], None]]:
    removers: list[Callable[[], None]] = []
    for table, keys in before.items():
        current = getattr(module, table)
        removers += [_KeyRemover(current, key) for key in current if key not in keys]
    return removers


@dataclass
class _KeyRemover:
    table: dict[int, Any]
    key: int

    def __call__(self) -> None:
        self.table.pop(self.key, None)


@dataclass
class _AttributeRemover:
    module: nn.Module
    name: str

    def __call__(self) -> None:
        vars(self.module).pop(self.name, None)
