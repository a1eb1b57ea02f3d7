"""What a caller may have changed since the last call: taken over where that is clear, refused by name where not.

State that `load_state_dict` put in place is whole and plain; a parameter that was thawed, or came into the optimizer
with `add_param_group`, has no state yet; a buffer may be another tensor. A graph that is fed any of these as it stands
would compute on wrong memory.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dp_partition.axes import on_mesh
from dp_partition.binding import Binding
from dp_partition.capture.states import states_by_id
from dp_partition.capture.subject import Subject
from dp_partition.problems import PlanError, Problem


def take_over(binding: Binding) -> None:
    """Bring state and buffers where the graphs expect them.

    Raises:
        PlanError: ``model-changed`` for parameters and buffers that came or went, ``parameter-not-in-module`` for a
            parameter of an optimizer that is not placed, ``state-placed-elsewhere`` for state on another mesh or with
            other placements, ``state-shape`` for state of another shape than before, ``buffer-untied`` for one of two
            names of a buffer that names another one now.
    """
    _check_structure(binding)
    _take_over_buffers(binding)
    names = {id(param): fqn for fqn, param in binding.params.items()}
    problems: list[Problem] = []
    for number, optimizer in enumerate(binding.subject.optimizers):
        states = states_by_id(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                fqn = names.get(id(param))
                if fqn is None:
                    hint = "call release() on the step first, and pass the module that holds it"
                    found = f"holds a tensor of shape {tuple(param.shape)} that is not a placed parameter"
                    problems.append(Problem("parameter-not-in-module", f"optimizer {number}", found=found, hint=hint))
                elif param.requires_grad:
                    problems += _take_over_state(binding, number, group, fqn, states.get(id(param)))
    if problems:
        raise PlanError(problems)


def _take_over_state(
    binding: Binding, number: int, group: dict[str, Any], fqn: str, state: dict[Any, Any] | None
) -> list[Problem]:
    optimizer, param = binding.subject.optimizers[number], binding.params[fqn]
    if not state:
        fresh = binding.fresh_state(optimizer, group, fqn, param)
        if fresh:
            optimizer.state[param] = fresh
        return []
    values, seen = tuple(state.values()), binding.seen.get((number, fqn), ())
    if len(values) == len(seen) and all(map(operator.is_, values, seen)):
        return []
    shapes = binding.state_shapes.get((number, fqn), {})
    wanted = on_mesh(binding.plan[fqn].state, binding.mesh)
    problems = []
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            continue
        if isinstance(value, DTensor):
            if value.device_mesh != binding.mesh or tuple(value.placements) != tuple(wanted):
                found = f"lies as {tuple(value.placements)} on {value.device_mesh}, not as {tuple(wanted)}"
                hint = "load it into the state that is there, or load full tensors"
                problems.append(Problem("state-placed-elsewhere", f"{fqn} {key}", found=found, hint=hint))
        elif value.shape == param.shape:
            state[key] = binding.place_state(fqn, value, whole=True)
        if key in shapes and state[key].shape != shapes[key]:
            found = f"has shape {tuple(state[key].shape)}, and had {tuple(shapes[key])}"
            hint = "load state that was saved for this model"
            problems.append(Problem("state-shape", f"{fqn} {key}", found=found, hint=hint))
    if not problems:
        binding.seen[number, fqn] = tuple(state.values())
        binding.state_shapes[number, fqn] = {k: v.shape for k, v in state.items() if isinstance(v, torch.Tensor)}
    return problems


def _check_structure(binding: Binding) -> None:
    """Tensors of the model are those that were placed, under their names; hooks and other modules trace anew."""
    if not binding.subject.structure.look() and binding.built is binding.subject.structure.current:
        return
    before, now = ({fqn for fqn, *_ in slots} for slots in (binding.slots, binding.subject.slots()))
    if now != before:
        hint = "call release() on the step first"
        changes = [(name, "was not there when the step was placed") for name in sorted(now - before)]
        changes += [(name, "is not there any more") for name in sorted(before - now)]
        raise PlanError([Problem("model-changed", name, found=found, hint=hint) for name, found in changes])
    binding.slots = list(binding.subject.slots())
    binding.built = binding.subject.structure.current


def _take_over_buffers(binding: Binding) -> None:
    subject = binding.subject
    for fqn, module, attribute, is_param in binding.slots:
        if is_param:
            continue
        name, now = subject.aliases.get(fqn, fqn), module._buffers.get(attribute)
        if now is None:
            hint = "call release() on the step first"
            found = "is None, and was a tensor when the step was placed"
            raise PlanError(Problem("model-changed", fqn, found=found, hint=hint))
        if now is subject.buffers[name]:
            continue
        if fqn != name:
            found, hint = f"is no longer the buffer that {name} is", "call release() on the step first"
            raise PlanError(Problem("buffer-untied", fqn, found=found, hint=hint))
        subject.buffers[name] = now


def check_no_gradients(subject: Subject, cleared: bool) -> None:
    """Raise where gradients lie on parameters that the step would add to.

    Args:
        subject: The model and its optimizers.
        cleared: Whether the step clears gradients before its first backward.

    Raises:
        PlanError: ``grads-carried-over`` for each such parameter.
    """
    if cleared or not subject.optimizers:
        return
    found = "holds a gradient from outside the step, to which backward would add"
    hint = "call zero_grad() before the step"
    problems = [
        Problem("grads-carried-over", fqn, found=found, hint=hint)
        for fqn, param in subject.params.items()
        if param.grad is not None
    ]
    if problems:
        raise PlanError(problems)


__all__ = ["check_no_gradients", "take_over"]
