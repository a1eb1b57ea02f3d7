"""Values of a placed model for rollback: shards, optimizer state, buffers, arguments, generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dp_partition._torch_compat import pytree
from dp_partition.capture.state import StepState
from dp_partition.runtime.state import Binding, local_tensor


class Snapshot:
    """Copies of all tensors written by a step, and of the tables around them.

    Args:
        binding: The placed model and optimizers.
        arguments: The step's arguments and keyword arguments; tensors among them may be written.
    """

    def __init__(self, binding: Binding, arguments: Any) -> None:
        self.entries: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        self.states: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for _, container, key, tensor in live_tensors(binding.step_state, arguments):
            self.entries.append((container, key, tensor, local_tensor(tensor.detach()).clone()))
        for optimizer in binding.step_state.optimizers:
            self.states += [(state, dict(state)) for state in optimizer.state.values()]
        groups = [group for optimizer in binding.step_state.optimizers for group in optimizer.param_groups]
        self.states += [(group, dict(group)) for group in groups]
        self.modes = [(part, part.training) for _, root in binding.step_state.modules for part in root.modules()]
        self.trained = [(param, param.requires_grad) for param in binding.params.values()]
        leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        self.gradients = [(leaf, leaf.requires_grad, leaf.grad) for leaf in leaves]
        self.buffers = (binding.step_state.buffers, dict(binding.step_state.buffers))
        self.found = {id(tensor): copy for _, _, tensor, copy in self.entries}

    def local(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's earlier value on this rank; None for a new one."""
        return self.found.get(id(tensor))

    def restore(self) -> None:
        for table, before in (*self.states, self.buffers):
            table.clear()
            table.update(before)  # the same dict: others hold it
        for module, mode in self.modes:
            module.training = mode
        for param, trained in self.trained:
            param.requires_grad_(trained)
        for leaf, trained, gradient in self.gradients:
            leaf.requires_grad_(trained).grad = gradient
        with torch.no_grad():
            for container, key, tensor, value in self.entries:
                if container is not None:
                    container[key] = tensor  # the same object, then its values
                local_tensor(tensor.detach()).copy_(value)


def live_tensors(step_state: StepState, arguments: Any = ()) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Yield name, containing dict, key and tensor of all that a step may write. Parameters stay in their dicts."""
    for fqn, param in step_state.params.items():
        yield fqn, None, None, param
    for fqn, module, attribute, is_param in step_state.slots():
        tensor = None if is_param else module._buffers.get(attribute)
        if tensor is not None:
            yield step_state.aliases.get(fqn, fqn), module._buffers, attribute, tensor
    for number, fqn, state in step_state.states():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield state_name(number, fqn, key), None, None, value
    for index, leaf in enumerate(pytree.tree_leaves(arguments)):
        if isinstance(leaf, torch.Tensor):
            yield f"argument {index}", None, None, leaf


def state_name(optimizer: int, fqn: str, key: Any) -> str:
    return f"{fqn} {key}" if optimizer == 0 else f"{fqn} {key} of optimizer {optimizer}"


class StepInterrupted(RuntimeError):
    """A step failed after its first write to parameters or optimizer state.

    Attributes:
        written: Names of the written tensors.
    """

    def __init__(self, written: list[str], subject: str = "the step") -> None:
        self.written = written
        self._subject = subject
        shown = ", ".join(written[:4]) + (", ..." if len(written) > 4 else "")
        super().__init__(
            f"{subject} failed after it had begun the update: {len(written)} tensors are written ({shown}); "
            "parameters and optimizer state are partially updated, load a checkpoint"
        )

    def __reduce__(self) -> tuple[type[StepInterrupted], tuple[list[str], str]]:
        return type(self), (self.written, self._subject)


@contextmanager
def guarded(subject: str, kept: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> Iterator[None]:
    """Run a step; if it fails, restore buffers and report all other writes.

    Args:
        subject: Call and rank, for errors: a dead peer's collective names neither.
        kept: Parameters and optimizer state by name; written at the end of a step, and not copied.
        restored: Buffers by name; small, and copied before the step.
    """
    versions = {name: tensor._version for name, tensor in kept.items()}  # counts writes in place
    copies = {name: tensor.clone() for name, tensor in restored.items()}
    try:
        yield
    except Exception as error:
        for name, tensor in restored.items():
            tensor.copy_(copies[name])
        written = [name for name, tensor in kept.items() if tensor._version != versions[name]]
        if written:
            raise StepInterrupted(written, subject) from error
        error.add_note(f"{subject}: parameters, buffers and optimizer state are as they were before the step")
        raise
