"""Values of a placed model as they are now, to go back to: shards, optimizer state, buffers, arguments, generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dp_partition._torch_compat import pytree
from dp_partition.binding import Binding, local_of
from dp_partition.randomness import Stream


class Snapshot:
    """Copies of all tensors that a step writes, and the objects that hold them.

    Args:
        binding: The placed model and optimizers.
        arguments: The step's arguments and keyword arguments; tensors among them may be written.
    """

    def __init__(self, binding: Binding, arguments: Any) -> None:
        self.entries: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        self.states: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for name, container, key, tensor in live_tensors(binding, arguments):
            del name
            self.entries.append((container, key, tensor, local_of(tensor.detach()).clone()))
        for optimizer in binding.subject.optimizers:
            self.states += [(state, dict(state)) for state in optimizer.state.values()]
        self.buffers = (binding.subject.buffers, dict(binding.subject.buffers))
        self.found = {id(tensor): copy for _, _, tensor, copy in self.entries}

    def local(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value that a tensor had on this rank; None for one that was not there."""
        return self.found.get(id(tensor))

    def restore(self) -> None:
        """Put tensors and values back."""
        for table, before in (*self.states, self.buffers):
            table.clear()
            table.update(before)
        with torch.no_grad():
            for container, key, tensor, value in self.entries:
                if container is not None:
                    container[key] = tensor
                local_of(tensor.detach()).copy_(value)


def live_tensors(binding: Binding, arguments: Any) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Name, holding dict, key and tensor of all that a step may write. The dict of a parameter is never written."""
    subject = binding.subject
    for fqn, param in binding.params.items():
        yield fqn, None, None, param
    for fqn, module, attribute, is_param in binding.slots:
        tensor = None if is_param else module._buffers.get(attribute)
        if tensor is not None:
            yield subject.aliases.get(fqn, fqn), module._buffers, attribute, tensor
    for number, fqn, state in binding.states():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield state_name(number, fqn, key), None, None, value
    for index, leaf in enumerate(pytree.tree_leaves(arguments)):
        if isinstance(leaf, torch.Tensor):
            yield f"argument {index}", None, None, leaf


def state_name(optimizer: int, fqn: str, key: Any) -> str:
    """Name of an optimizer's state entry in errors."""
    return f"{fqn} {key}" if optimizer == 0 else f"{fqn} {key} of optimizer {optimizer}"


class RandomState:
    """All generators that a step may draw from: torch's, Python's, NumPy's, those passed to it, the step's stream.

    Args:
        arguments: The step's arguments; generators among them count.
        stream: The step's own stream.
    """

    def __init__(self, arguments: Any, stream: Stream | None) -> None:
        self.stream = stream
        self.generators = [g for g in pytree.tree_leaves(arguments) if isinstance(g, torch.Generator)]
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self.passed = [generator.get_state() for generator in self.generators]
        self.python = random.getstate()
        numpy: Any = sys.modules.get("numpy")  # a program that never imported it draws nothing from it
        self.numpy = numpy.random.get_state() if numpy is not None else None
        self.own = (stream.cpu_state, stream.cuda_state) if stream is not None else None

    def restore(self) -> None:
        """Put all generators back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in zip(self.generators, self.passed, strict=True):
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.stream is not None and self.own is not None:
            self.stream.cpu_state, self.stream.cuda_state = self.own


__all__ = ["RandomState", "Snapshot", "live_tensors", "state_name"]
