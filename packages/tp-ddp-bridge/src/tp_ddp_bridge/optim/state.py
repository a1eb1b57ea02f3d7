"""Optimizers of a bridged module: re-pointed to its leaves, checked against it, and saved by parameter name.

An optimizer is re-pointed in place: same object, same groups, same order; its state moves along. Schedulers and scalers
with the optimizer are not affected.

In a checkpoint its state is global tensors by parameter name, for loading on any mesh. The model's own state dict needs
none of this; its tensors are DTensors already. A checkpoint is read into a template with the same keys. A parameter
that never got a gradient has no state, so the state of a first step is written in its place, and ``has_state`` of its
group marks it as meaningless. Loading leaves such a parameter without state again, as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ddp_bridge._shared.problems import PlanError, Problem, raise_problems
from tp_ddp_bridge._shared.sectioned_tensor import SectionedTensor, is_sectioned
from tp_ddp_bridge._shared.stale_parameters import current_parameter, is_stale
from tp_ddp_bridge._torch_compat import local_of
from tp_ddp_bridge.layout import is_local_shard, is_replicated_tag, layout_of
from tp_ddp_bridge.optim.elementwise import is_zero_optimizer, parameters_of, shard_problems

HAS_STATE = "has_state"


# ---- an optimizer of the module ------------------------------------------------------------------------------------


def as_list(optimizers: Iterable[Optimizer] | Optimizer) -> list[Optimizer]:
    """Return the ``optimizers=`` argument as a list; one optimizer alone will do."""
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in listed:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers= takes torch.optim.Optimizer objects, found {type(optimizer).__name__}")
    return listed


def repointing_problems(
    optimizers: Iterable[Optimizer],
    is_replaced: Callable[[torch.Tensor], bool],
    is_sharded: Callable[[torch.Tensor], bool],
) -> list[Problem]:
    """Return all problems of optimizers whose parameters are about to be exchanged, or already were."""
    problems: list[Problem] = []
    for optimizer in optimizers:
        if is_zero_optimizer(optimizer) and any(map(is_replaced, parameters_of(optimizer))):
            problems.append(
                Problem(
                    "unsupported-wrapper",
                    "ZeroRedundancyOptimizer",
                    found="its partition and flat buffers hold the parameters that are about to be replaced",
                    hint="build it after the module has been bridged (or undone)",
                )
            )
        problems += shard_problems(optimizer, is_sharded)
    return problems


def repoint(optimizer: Optimizer) -> None:
    """Exchange every replaced parameter of ``optimizer`` for the current one and move its state along."""
    successors: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        old: list[torch.Tensor] = list(group["params"])  # overwritten below
        new = [current_parameter(parameter) for parameter in old]
        successors.update({id(before): after for before, after in zip(old, new, strict=True)})
        group["params"][:] = new  # the same list: others may hold it
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for key, state in states:
        target = successors.get(id(key), key)
        if target is not key and isinstance(state, dict):
            state = {name: _moved(target, value) for name, value in state.items()}
        optimizer.state[target] = state


def _moved(parameter: torch.Tensor, value: Any) -> Any:
    """Return a state value laid out as ``parameter``: a DTensor, or local for a leaf."""
    if isinstance(parameter, DTensor):
        return as_global(parameter, value)
    return as_local(parameter, value, copies=False) if isinstance(value, DTensor) else value


def check_optimizer(module: nn.Module, optimizer: Optimizer) -> int:
    """Check that ``optimizer`` trains all of ``module`` and works on shards. Communicates nothing.

    Args:
        module: A bridged module, or the DDP around it.
        optimizer: Any optimizer; a ``ZeroRedundancyOptimizer`` counts with all its parameters.

    Returns:
        Number of trainable parameters of ``module`` in the optimizer.

    Raises:
        PlanError: Replaced parameters, trainable parameters missing in it, or an optimizer for
            full matrices: all in one error.
    """
    if not hasattr(optimizer, "param_groups"):
        hint = "the order is check_optimizer(module, optimizer)"
        raise PlanError(Problem("wrong-type", "optimizer", found=type(optimizer).__name__, hint=hint))
    parameters = list(parameters_of(optimizer))
    problems = [
        Problem(
            "parameter-replaced",
            f"parameter {index}",
            found="the optimizer holds a parameter that the bridge replaced",
            hint="pass the optimizer as optimizers=, or build it from module.parameters() again",
        )
        for index, parameter in enumerate(parameters)
        if is_stale(parameter)
    ]
    ids = {id(parameter) for parameter in parameters}  # == on tensors is elementwise
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    reason, hint = "it trains, but the optimizer does not hold it", "add it to a group, or freeze it"
    problems += [
        Problem("not-in-optimizer", name, found=reason, hint=hint)
        for name, parameter in trainable
        if id(parameter) not in ids
    ]
    problems += shard_problems(optimizer, is_local_shard)
    raise_problems(problems, f"{type(optimizer).__name__} does not fit the module")
    return len(trainable)


# ---- its state in checkpoints --------------------------------------------------------------------------------------


def optimizer_state_to_dtensor(module: nn.Module, optimizer: Optimizer, *, template: bool = False) -> dict[str, Any]:
    """Return the state of ``optimizer`` in checkpoint form; communicates nothing.

    Args:
        module: The bridged module, or the DDP around it; names are those of the module inside.
        optimizer: An optimizer on the module's leaves (or on DTensor parameters, which works too).
        template: Return the state of a first step, for ``dcp.load`` to fill; the optimizer and the
            parameters stay as they are. Otherwise the present state, which is none before the first step.

    Returns:
        ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...], "has_state": [bool, ...]}]}``, as
        in ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, plus ``has_state``. Shards
        are DTensors; of fused and kv-copied weights ``SectionedTensor``. Tensors share memory with the optimizer's.

    Raises:
        PlanError: The optimizer holds a parameter outside of ``module``.
    """
    names = _names(module, optimizer)
    states: dict[torch.Tensor, Any] = dict(optimizer.state)
    if template or states:
        unused = [each for each in parameters_of(optimizer) if each not in states and each.requires_grad]
        states.update(_first_states(optimizer, unused))
    state = {
        names[parameter][0]: {key: as_global(parameter, value) for key, value in states[parameter].items()}
        for parameter in parameters_of(optimizer)
        if parameter in states
    }
    groups = [
        {
            **group,
            "params": [names[parameter][0] for parameter in group["params"]],
            HAS_STATE: [parameter in optimizer.state for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def optimizer_state_to_local(module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a result of ``optimizer_state_to_dtensor``, from this mesh or any other, into ``optimizer``.

    Args:
        module: Module of ``optimizer``'s parameters, bridged or not, or the DDP around it.
        optimizer: Changed as by ``optimizer.load_state_dict``, which also adapts dtypes and devices. It keeps copies,
            not the tensors of ``state_dict``.
        state_dict: State by name. Tensors are DTensors of any placements (on another mesh they are gathered), or full
            ones.

    Raises:
        PlanError: Names, groups or shapes do not fit, all of them; the optimizer is unchanged.
    """
    names = _names(module, optimizer)
    saved: Mapping[str, Mapping[str, Any]] = state_dict["state"]
    problems = list(_group_problems(names, optimizer, state_dict["param_groups"]))
    aliases = {alias for all_names in names.values() for alias in all_names}
    reason, hint = "state of a parameter that the optimizer does not hold", "load it into the model it is of"
    problems += [Problem("model-mismatch", fqn, found=reason, hint=hint) for fqn in saved if fqn not in aliases]
    without_state = {
        fqn
        for group in state_dict["param_groups"]
        for fqn, has_state in zip(group["params"], group.get(HAS_STATE, ()), strict=False)
        if not has_state
    }
    parameters = list(parameters_of(optimizer))
    states: dict[int, Mapping[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        fqn = next((name for name in names[parameter] if name in saved), None)
        if fqn is not None and fqn not in without_state:
            problems += _shape_problems(fqn, parameter, saved[fqn])
            states[index] = saved[fqn]
    raise_problems(problems, "the optimizer state does not fit")  # before any change
    local = {
        index: {key: as_local(parameters[index], value) for key, value in values.items()}
        for index, values in states.items()
    }
    optimizer.load_state_dict({"state": local, "param_groups": _numbered(optimizer, state_dict["param_groups"])})


def _names(module: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, list[str]]:
    """Return all names of every parameter; raise if the optimizer holds others."""
    zero = Problem(
        "unsupported-wrapper",
        "optimizer: ZeroRedundancyOptimizer",
        found="each rank has the state of its own shard only",
        hint="call its consolidate_state_dict(), or checkpoint a plain optimizer",
    )
    problems = [zero] if is_zero_optimizer(optimizer) else []
    inner = module.module if isinstance(module, DistributedDataParallel) else module  # names without DDP's prefix
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for index, each in enumerate(parameters_of(optimizer)):
        if each in names:
            continue
        code, reason = "parameter-not-in-module", "it is not in the module"
        hint = "pass the module that holds all of the optimizer's parameters"
        if is_stale(each):
            code, reason, hint = "parameter-replaced", "it was replaced", "pass the optimizer as optimizers="
        name = f"optimizer parameter {index} of shape {tuple(each.shape)}"
        problems.append(Problem(code, name, found=reason, hint=hint))
    raise_problems(problems, "the optimizer does not fit the module")
    return names


def as_global(parameter: torch.Tensor, value: Any) -> Any:
    """Return a state value for a checkpoint; scalars and replicated plain tensors stay."""
    layout = layout_of(parameter)
    if layout is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    if value.shape != local.shape or value.dim() == 0 or is_replicated_tag(parameter):
        return value
    return SectionedTensor.of(value, layout) if layout.sections else layout.wrap(value)


def as_local(parameter: torch.Tensor, value: Any, copies: bool = True) -> Any:
    """Return a state value as ``parameter``'s optimizer keeps it. By default it has memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    layout = layout_of(parameter)
    if is_sectioned(value) and layout != value._sharding_info:
        value = value.full_tensor()
    if is_sectioned(value):
        local = value.plain()
    elif layout is None or value.shape != layout.shape or value.dim() == 0:
        local, layout = value.full_tensor() if isinstance(value, DTensor) else value, None
    else:
        local = layout.localize(value) if isinstance(value, DTensor) else layout.shard(value)
    local = local.clone() if copies else local
    return layout.wrap(local) if layout is not None and isinstance(parameter, DTensor) else local


def _shape_problems(fqn: str, parameter: torch.Tensor, values: Mapping[str, Any]) -> Iterator[Problem]:
    layout = layout_of(parameter)
    shape = parameter.shape if layout is None else layout.shape
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == len(shape) and value.dim() and value.shape != shape:
            yield Problem(
                "shape-mismatch",
                f"{fqn}.{key}",
                found=f"shape {tuple(value.shape)}, the parameter has the global shape {tuple(shape)}",
                hint="load DTensors or full tensors, not one rank's shard",
            )


def _group_problems(
    names: Mapping[torch.Tensor, list[str]], optimizer: Optimizer, saved: list[Mapping[str, Any]]
) -> Iterator[Problem]:
    own = optimizer.param_groups
    if len(own) != len(saved):
        yield Problem(
            "model-mismatch",
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
            counts = f"{len(other['params'])} parameters saved, {len(group['params'])} here"
            yield Problem(
                "model-mismatch",
                f"param_groups[{index}]",
                found=f"{counts}, not among the saved: {', '.join(missing) or 'none'}",
                hint="build the same groups of the same parameters",
            )


def _numbered(optimizer: Optimizer, saved: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups' settings with this optimizer's own numbering."""
    numbers = count()  # torch numbers parameters over all groups
    return [
        {key: value for key, value in other.items() if key != HAS_STATE}
        | {"params": [next(numbers) for _ in own["params"]]}
        for own, other in zip(optimizer.param_groups, saved, strict=True)
    ]


def _first_states(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state that a first step of a twin, on zeros, gives ``parameters``."""
    zeros = {parameter: nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters}
    for each in zeros.values():
        each.grad = torch.zeros_like(each)
    groups = [
        {**group, "params": [zeros[each] for each in group["params"] if each in zeros]}
        for group in optimizer.param_groups
    ]
    twin = type(optimizer).__new__(type(optimizer))  # no __init__: its settings are copied
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=groups)
    if zeros:
        type(optimizer).step(twin)  # not optimizer.step: a scheduler counts it
    return {parameter: twin.state[zero] for parameter, zero in zeros.items() if zero in twin.state}
