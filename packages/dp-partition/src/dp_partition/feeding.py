"""What goes into a program's graph at every call, and where what comes out of it is put."""

from __future__ import annotations

from typing import Any

import torch

from dp_partition._torch_compat import pytree
from dp_partition.binding import Binding, as_dtensor, local_of
from dp_partition.capture.states import states_by_id
from dp_partition.program import Program


def gather_inputs(binding: Binding, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Local tensors and numbers for the placeholders, in order."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    subject = binding.subject
    states = list(map(states_by_id, subject.optimizers))
    values: list[Any] = []
    for entry in program.inputs:
        if entry.kind == "param":
            values.append(local_of(binding.params[entry.name]))
        elif entry.kind == "buffer":
            values.append(subject.buffers[entry.name])
        elif entry.kind == "state":
            values.append(local_of(states[entry.optimizer][id(binding.params[entry.name])][entry.key]))
        elif entry.kind == "hyper":
            assert entry.hyper is not None
            values.append(entry.hyper.read(subject.optimizers))
        else:
            values.append(tensors[int(entry.name)])
    return values


def store_outputs(binding: Binding, program: Program, values: tuple[Any, ...]) -> None:
    """Put buffers and state that the step replaced in place."""
    for value, entry, placement in zip(values, program.capture.outputs, program.output_placements, strict=True):
        if entry.kind == "buffer":
            replace_buffer(binding, entry.name, value)
        elif entry.kind == "state":
            param = binding.params[entry.name]
            new = value
            if placement is not None and tuple(value.shape) == binding.local_state_shape(entry.name) and value.ndim:
                new = as_dtensor(value, param, binding.mesh, placement)
            binding.subject.optimizers[entry.optimizer].state[param][entry.key] = new


def replace_buffer(binding: Binding, name: str, value: torch.Tensor) -> None:
    """Put a new tensor where a buffer was."""
    for fqn, module, attribute, is_param in binding.slots:
        if not is_param and binding.subject.aliases.get(fqn, fqn) == name:
            module._buffers[attribute] = value
    binding.subject.buffers[name] = value


__all__ = ["gather_inputs", "replace_buffer", "store_outputs"]
