"""Whether the tensors of a call look like those of the call before: one look at each, most of it inside of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shard_reshard._torch_compat import PLAIN_TYPES, is_fake, same_metadata, told_by

_STRIDED = {torch.strided}


class Looks:
    """What decides whether tensors are good for a plan, and whether views of them can be used again.

    A view that negates or conjugates on reading has the address of what it is a view of, and counts as another tensor.
    No tensor is held on to. Made by `looks_of`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._modes = _modes()
        self._pointers = pointers(tensors)
        first: dict[int, int] = {}  # the test of torch's takes no tensor twice
        self._twins = [(at, other) for at, t in enumerate(tensors) if (other := first.setdefault(id(t), at)) != at]
        self._firsts = list(first.values())
        self._alike = same_metadata([tensors[at] for at in self._firsts])

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, in the modes that are on, look the same."""
        if any(tensor.is_nested for tensor in tensors):
            return False  # torch's guards ask for sizes, which a nested tensor lacks: that ends the process
        once = tensors
        if self._twins:
            if len(tensors) != len(self._pointers) or any(tensors[a] is not tensors[b] for a, b in self._twins):
                return False
            once = [tensors[at] for at in self._firsts]
        return self._alike(once) and pointers(tensors) == self._pointers and _modes() == self._modes


def looks_of(tensors: Sequence[torch.Tensor]) -> Looks | None:
    """How tensors look; None for tensors that have no memory to look at."""
    if not PLAIN_TYPES.issuperset(map(type, tensors)) and is_fake(tensors):
        return None
    # A nested tensor says that it is strided.
    plain = not any(tensor.is_nested for tensor in tensors) and {tensor.layout for tensor in tensors} <= _STRIDED
    return Looks(tensors) if plain else None


class SeenState:
    """The tensors of one side of a state dict: how they looked, what they said of themselves, and their local parts.

    Their memory is held on to, without graphs, so that nobody else is given its addresses. Made by `seen_state`.
    """

    def __init__(self, tensors: Mapping[str, Any], locals_: Mapping[str, torch.Tensor]) -> None:
        own, self._says = told_by(list(tensors.values()))
        self._names = list(tensors)
        self._looks = looks_of(own)
        self.locals = dict(locals_)
        self._held = list(self.locals.values())

    def same(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these are the same names with tensors that look and say the same, in the same memory."""
        if self._looks is None or list(tensors) != self._names:
            return False
        own, says = told_by(list(tensors.values()))
        if says != self._says or not self._looks.same(own):
            return False
        return pointers(own) == pointers(self._held)  # where memory was taken away, what is held lies elsewhere


def seen_state(tensors: Mapping[str, Any], locals_: Mapping[str, torch.Tensor]) -> SeenState | None:
    """What to compare the tensors of the next call with; None where some are no tensors that can be compared."""
    own, _ = told_by(list(tensors.values()))
    if len(own) != len(tensors) or not PLAIN_TYPES.issuperset(map(type, own)) or list(locals_) != list(tensors):
        return None
    return SeenState(tensors, locals_)


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where tensors begin."""
    return list(map(torch.Tensor.data_ptr, tensors))


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()
