"""Optimizer state for checkpoints: by parameter name, in DTensors of global shape, so that any mesh can load it.

The model's own state dict needs nothing of this; its tensors are DTensors already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ddp_bridge._torch_compat import local_of
from tp_ddp_bridge.layout import layout_of
from tp_ddp_bridge.optimizers import parameters_of
from tp_ddp_bridge.problems import PlanError, Problem
from tp_ddp_bridge.stale import is_stale, stale_name


def optimizer_state_to_dtensor(module: nn.Module, optimizer: Optimizer, *, template: bool = False) -> dict[str, Any]:
    """The state of ``optimizer`` as a checkpoint wants it; communicates nothing.

    Args:
        module: The bridged module, or the DDP around it; names are those of the module inside.
        optimizer: An optimizer on the module's leaves (or on DTensor parameters, which works too).
        template: Give the state that a first step would make, as something for ``dcp.load`` to fill; the optimizer and
            the parameters stay as they are. Otherwise the state as it is, which is none before the first step.

    Returns:
        ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}``, as
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` lays it out. Tensors share memory with the
        optimizer's.

    Raises:
        PlanError: The optimizer holds a parameter that is not in ``module``, or one whose state no DTensor can say.
    """
    names = _names(module, optimizer)
    states = _template(optimizer) if template and not optimizer.state else optimizer.state
    state = {}
    for parameter in parameters_of(optimizer):
        if parameter in states:
            state[names[parameter][0]] = {key: _globally(parameter, value) for key, value in states[parameter].items()}
    groups = [
        {**group, "params": [names[parameter][0] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def optimizer_state_to_local(module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what ``optimizer_state_to_dtensor`` gave, on this mesh or any other, into ``optimizer``.

    Args:
        module: The module whose parameters ``optimizer`` holds, bridged or not, or the DDP around it.
        optimizer: Changed as by ``optimizer.load_state_dict``, which also brings dtypes and devices into line. It keeps
            copies, not the tensors of ``state_dict``.
        state_dict: State by name. Tensors are DTensors of any placements (on another mesh they are gathered), or full
            ones.

    Raises:
        PlanError: Names, groups or shapes that do not fit, all of them; the optimizer is as it was.
    """
    names = _names(module, optimizer)
    saved: Mapping[str, Mapping[str, Any]] = state_dict["state"]
    problems = list(_group_problems(names, optimizer, state_dict["param_groups"]))
    aliases = {alias for all_names in names.values() for alias in all_names}
    problems += [
        Problem(
            "unknown-state",
            fqn,
            found="state of a parameter that the optimizer does not hold",
            hint="load it into the model it is of",
        )
        for fqn in saved
        if fqn not in aliases
    ]
    state: dict[int, dict[str, Any]] = {}
    order = list(parameters_of(optimizer))
    for index, parameter in enumerate(order):
        fqn = next((name for name in names[parameter] if name in saved), None)
        if fqn is None:
            continue
        problems += _shape_problems(fqn, parameter, saved[fqn])
        state[index] = dict(saved[fqn])
    if problems:
        raise PlanError(problems, "the optimizer state does not fit")
    local = {
        index: {key: _locally(order[index], value) for key, value in values.items()} for index, values in state.items()
    }
    optimizer.load_state_dict({"state": local, "param_groups": _numbered(optimizer, state_dict["param_groups"])})


def _names(module: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, list[str]]:
    """All names of every parameter that the optimizer holds."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise PlanError(
            Problem(
                "zero-optimizer",
                "optimizer: ZeroRedundancyOptimizer",
                found="each rank has the state of its own part only",
                hint="consolidate_state_dict() it, or checkpoint a plain optimizer",
            )
        )
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    problems = []
    for index, parameter in enumerate(parameters_of(optimizer)):
        if is_stale(parameter):
            problems.append(
                Problem(
                    "stale-parameter",
                    stale_name(parameter),
                    found="it was replaced",
                    hint="pass the optimizer as optimizers=",
                )
            )
        elif parameter not in names:
            problems.append(
                Problem(
                    "foreign-parameter",
                    f"optimizer parameter {index} of shape {tuple(parameter.shape)}",
                    found="it is not in the module",
                    hint="pass the module that holds all of the optimizer's parameters",
                )
            )
        elif any(getattr(parameter, "_sharding_info", ())[4:]):
            problems.append(
                Problem(
                    "fused-weight",
                    names[parameter][0],
                    found="a fused weight of several sections, which no DTensor placement can say",
                    hint="keep its parameters as DTensors, or use the styles' own checkpoint",
                )
            )
    if problems:
        raise PlanError(problems, "the optimizer does not fit the module")
    return names


def _globally(parameter: torch.Tensor, value: Any) -> Any:
    layout = layout_of(parameter)
    if layout is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    is_whole_plain = getattr(parameter, "_dp_marked", False)
    return layout.wrap(value) if value.shape == local.shape and value.dim() and not is_whole_plain else value


def _locally(parameter: torch.Tensor, value: Any) -> Any:
    """A loaded value as ``parameter``'s optimizer keeps it: a copy, so that no two optimizers update one memory."""
    if not isinstance(value, torch.Tensor):
        return value
    layout = layout_of(parameter)
    if layout is None or value.shape != layout.shape or value.dim() == 0:
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()
    local = layout.localize(value) if isinstance(value, DTensor) else layout.cut(value)
    return layout.wrap(local.clone()) if isinstance(parameter, DTensor) else local.clone()


def _shape_problems(fqn: str, parameter: torch.Tensor, values: Mapping[str, Any]) -> Iterator[Problem]:
    layout = layout_of(parameter)
    shape = parameter.shape if layout is None else layout.shape
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == len(shape) and value.dim() and value.shape != shape:
            yield Problem(
                "wrong-shape",
                f"{fqn}.{key}",
                found=f"shape {tuple(value.shape)}, the parameter has the global shape {tuple(shape)}",
                hint="load DTensors or full tensors, not one rank's part",
            )


def _group_problems(
    names: Mapping[torch.Tensor, list[str]], optimizer: Optimizer, saved: list[Mapping[str, Any]]
) -> Iterator[Problem]:
    own = optimizer.param_groups
    if len(own) != len(saved):
        yield Problem(
            "groups-differ",
            "param_groups",
            found=f"{len(saved)} groups saved, {len(own)} here",
            hint="build the same groups",
        )
        return
    for index, (group, other) in enumerate(zip(own, saved, strict=True)):
        missing = [
            names[parameter][0] for parameter in group["params"] if not set(names[parameter]) & set(other["params"])
        ]
        if missing or len(group["params"]) != len(other["params"]):
            yield Problem(
                "groups-differ",
                f"param_groups[{index}]",
                found=f"{len(other['params'])} parameters saved, {len(group['params'])} here, not among the saved: "
                f"{', '.join(missing) or 'none'}",
                hint="build the same groups of the same parameters",
            )


def _numbered(optimizer: Optimizer, saved: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups' settings with this optimizer's own numbering."""
    groups = []
    start = 0
    for own, other in zip(optimizer.param_groups, saved, strict=True):
        count = len(own["params"])
        groups.append({**other, "params": list(range(start, start + count))})
        start += count
    return groups


def _template(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that a first step makes: of a step with zero gradients and zero learning rates, which is then taken
    back.
    """
    grads = {parameter: parameter.grad for parameter in parameters_of(optimizer)}
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in grads:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        type(optimizer).step(optimizer)  # not optimizer.step, which a scheduler counts
        return dict(optimizer.state)
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        for parameter, grad in grads.items():
            parameter.grad = grad
