"""Checks of an optimizer at its steps: its kind, its kernels, and the gradients of replicas.

An optimizer grows (`add_param_group`, `requires_grad_` after the first step), so each step compares the groups with
those of the last verdict.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tp_styles._shared.consensus import named_collective
from tp_styles._shared.elementwise import elementwise_problems
from tp_styles._shared.norms import BRIDGED
from tp_styles._shared.sectioned_tensor import SectionedTensor, is_sectioned
from tp_styles._shared.sharding_info import ShardingInfo, sharding_info_of
from tp_styles._shared.stale_parameters import is_stale
from tp_styles._torch_compat import constant_in_graphs, is_compiling, is_fake, local_of, without_compiler
from tp_styles.check.checker import live_checkers
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.parameters import ShardParameter, split_of
from tp_styles.runtime.redistribute import TPGroup

# Name of a parameter, its gradient or a section of it, and the number of neighbouring ranks that hold the same.
Piece = tuple[str, torch.Tensor, int]

# Kernels, parameters and their `requires_grad` of each group: a verdict holds as long as they stay.
Groups = list[tuple[Any, ...]]

# The last step at which gradients of replicas are compared.
LAST = 1024

# Number of parameters of optimizers whose state dicts hold sections.
_known: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

# Groups of the last verdict, and the steps since.
_checked: WeakKeyDictionary[Optimizer, tuple[Groups, int]] = WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if is_compiling():  # `torch.compile(optimizer.step)`: the number of parameters is a guard, so growth compiles again
        if _is_refused(optimizer, sum([len(group["params"]) for group in optimizer.param_groups])):
            _refuse(optimizer)
        return
    groups = [
        (group.get("fused"), group.get("foreach"), *[(id(p), p.requires_grad) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    groups.append((id(optimizer.state),))  # another one after `load_state_dict`
    before, steps = _checked.get(optimizer, (None, 0))
    if before != groups:
        parameters = _parameters(optimizer)
        if any(p.is_meta or is_stale(p) for p in parameters):
            return  # a stale one raises in the step
        _refuse(optimizer)
        steps = 0
    _checked[optimizer] = groups, steps + 1
    # A gradient may be zero on all ranks at first, behind a projection of zeros: 1, 2, 4, 8 ... steps are compared.
    if (steps + 1) & steps == 0 and steps < LAST:
        _compare_replicas(optimizer)


# From now on check each optimizer at its steps; installed once for the process.
check_optimizers = functools.cache(functools.partial(register_optimizer_step_pre_hook, _before_step))


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _problems(optimizer: Optimizer) -> Iterator[Problem]:
    yield from elementwise_problems(optimizer, _is_shard)
    for group in optimizer.param_groups:
        kinds = {isinstance(p, DTensor): p for p in group["params"]}
        joins = isinstance(optimizer, torch.optim.LBFGS)  # all of its parameters, in one vector
        if len(kinds) == 2 and (group.get("fused") or group.get("foreach") or joins):
            kernels = "fused=True" if group.get("fused") else "one vector" if joins else "foreach=True"
            reason = f"{kernels} on DTensors and plain tensors (one of shape {tuple(kinds[False].shape)})"
            hint = (
                "sections of a fused weight are no DTensors: leave it out, or give them a group of their own"
                if isinstance(kinds[False], ShardParameter)
                else 'apply_plan(..., rest="replicated") makes DTensors of parameters without a style'
            )
            name = f"optimizer: {type(optimizer).__name__}"
            yield Problem("mixed-parameters", name, found=reason, hint=hint)


def _is_shard(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShardParameter)


@constant_in_graphs
def _is_refused(optimizer: Optimizer, count: int) -> bool:
    """True if there is a problem, found while a compiler traces the step."""
    return next(_problems(optimizer), None) is not None


@without_compiler
def _refuse(optimizer: Optimizer) -> None:
    """Raise all problems, outside of a graph."""
    if problems := list(_problems(optimizer)):
        raise PlanError(problems)


def _keep_sections(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    before = _known.get(optimizer)
    if is_compiling() or before == count:
        return
    _known[optimizer] = count
    _place_state(optimizer)
    if before is None:
        optimizer.register_state_dict_post_hook(_with_sections)
        optimizer.register_load_state_dict_post_hook(_place_state)


# From now on optimizers' state dicts hold sections of fused shards, and full state is taken apart: also unchecked.
keep_sections = functools.cache(functools.partial(register_optimizer_step_pre_hook, _keep_sections))


def _place_state(optimizer: Optimizer) -> None:
    """Take this rank's part of full state tensors: `load_state_dict` has read the file of one process."""
    for parameter, state in optimizer.state.items():
        info = None if isinstance(parameter, DTensor) else sharding_info_of(parameter)
        if info is None and not isinstance(parameter, DTensor):
            continue
        shape = parameter.shape if info is None else info.shape
        for key, value in state.items():
            if info is not None and info.sections and getattr(value, "_rows", _rows_of(info)) != _rows_of(info):
                raise PlanError(
                    Problem(
                        "local-shard-as-full",
                        key,
                        found=f"rows of another rank, in place of state of {list(shape)}",
                        hint="a file of get_optimizer_state_dict(full_state_dict=True) has one rank's shards of fused"
                        " weights: save with torch.distributed.checkpoint, take full_tensor() of each entry, or load"
                        " each rank's own file",
                    )
                )
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.shape != shape:
                continue
            if is_sectioned(value):  # what `_with_sections` gave, loaded by this optimizer or a new one
                if value._sharding_info == info:
                    state[key] = value.plain()
                    continue
                value = value.full_tensor()
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                state[key] = distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)
            elif info is not None and value.shape != parameter.shape:
                split, axis = split_of(info), TPGroup(info.mesh)
                state[key] = split.take(value, axis.rank, axis.size)


class OptimizerShard(SectionedTensor):
    """State of a fused shard in an optimizer's state dict: DCP saves each section under its place in the full weight.

    A plain local tensor would be taken for a replica, and every rank would resume with one rank's moments.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain local tensor with its rows: a file of one rank stays one, and is read without a class of ours.

        torch's `full_state_dict=True` gathers DTensors alone and asks no hook, so a file of it may hold one rank's
        moments in place of full ones: the rows tell the other ranks.
        """
        local: Any = self.plain()
        local._rows = _rows_of(self._sharding_info)
        return local.__reduce_ex__(protocol)


def _rows_of(info: ShardingInfo) -> tuple[tuple[int, ...], ...]:
    return tuple(info.shape), *info.ranges(info.mesh.get_local_rank(info.section_axis()[0]))


def _with_sections(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give state tensors of fused shards their sections, in a new state dict; the optimizer's own stay plain."""
    for index, parameter in enumerate(_parameters(optimizer)):
        info, state = sharding_info_of(parameter), state_dict["state"].get(index)
        if info is not None and info.sections and isinstance(parameter, ShardParameter) and state is not None:
            state_dict["state"][index] = {
                key: OptimizerShard.of(value, info)
                if type(value) is torch.Tensor and value.shape == parameter.shape
                else value
                for key, value in state.items()
            }


# ---------------------------------------------------------------------------------------------- replicas


def _compare_replicas(optimizer: Optimizer) -> None:
    """Compare the gradients of replicated parameters between the ranks of each plan.

    Raises:
        PlanError: Some have another norm on each rank; on every rank.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a graph takes no comparison
    held = {id(p) for p in _parameters(optimizer)}
    pieces: dict[TPGroup, list[Piece]] = {}
    for checker in live_checkers():
        axis = next((axis for axis in pieces if axis.mesh == checker.axis.mesh), checker.axis)
        for name, parameter in checker.scopes[0].module.named_parameters() if axis.size > 1 else ():
            if id(parameter) in held and BRIDGED not in vars(parameter):  # the bridge compares its own
                held.discard(id(parameter))
                pieces.setdefault(axis, []).extend(_replicas(name, parameter, axis))
    for axis, replicas in pieces.items():
        if replicas and not any(is_fake(gradient) for _, gradient, _ in replicas):
            _compare_norms(axis, replicas)


def _replicas(name: str, parameter: torch.Tensor, axis: TPGroup) -> Iterator[Piece]:
    """Yield the parts of a parameter's gradient that other ranks hold too."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        gradient = torch.zeros_like(parameter)
    local = (local_of(gradient) if isinstance(gradient, DTensor) else gradient).detach().as_subclass(torch.Tensor)
    info = sharding_info_of(parameter)
    if isinstance(parameter, DTensor):
        same_layout = not isinstance(gradient, DTensor) or gradient.placements == parameter.placements
        if same_layout and _is_replicated_over(parameter, axis):
            yield name, local, axis.size
    elif info is None or info.placements[0].is_replicate():
        yield name, local, axis.size
    elif info.sections:
        split = split_of(info)
        assert split.dim is not None
        widths = [stop - start for start, stop in split.ranges(axis.rank, axis.size)]
        for section, part in zip(split.sections, local.split(widths, split.dim), strict=True):
            if section.copies > 1:  # key-value heads
                yield name, part, section.copies


def _is_replicated_over(parameter: DTensor, axis: TPGroup) -> bool:
    """True if no rank of the axis holds another part of a DTensor, which may lie on another mesh."""
    if not any(p.is_shard() for p in parameter.placements):
        return True
    ranks = set(dist.get_process_group_ranks(axis.group))
    mesh = parameter.device_mesh
    return not any(
        placement.is_shard() and len(ranks & set(dist.get_process_group_ranks(mesh.get_group(dim)))) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _compare_norms(axis: TPGroup, pieces: list[Piece]) -> None:
    own = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for _, part, _ in pieces])
    with named_collective("the comparison of gradients at an optimizer's step"):
        table = axis.all_gather(own.to(axis.mesh.device_type).unsqueeze(0), 0).cpu()  # ranks x pieces
    largest, problems = float(table.nan_to_num(0.0, 0.0, 0.0).max()), []
    for index, (name, part, copies) in enumerate(pieces):
        # Ranks may sum in another order, and norms far below the others are rounding alone.
        tolerance = max(1e-3, 4 * torch.finfo(part.dtype).eps)
        for norms in table[:, index].split(copies):
            high, low = float(norms.max()), float(norms.min())
            if high - low > tolerance * high and high > 1e-5 * largest:
                problems.append(
                    Problem(
                        "gradients-differ",
                        name,
                        found=f"gradient norms {[float(f'{x:.4g}') for x in norms.tolist()]} on ranks that hold the"
                        " same",
                        hint="each rank has a partial sum: NoParallel(sum_gradient=True) for its module (norms= of"
                        " GQAParallel); clip with tp_styles.clip_grad_norm_: torch's may take the norm of one's shards",
                    )
                )
                break
    if problems:
        raise PlanError(problems[:8])
