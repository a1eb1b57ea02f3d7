"""Guards on tensor metadata: while they hold, the checks of an earlier call and the views made for it stay valid.

Most of the comparison happens inside of torch, in C++. A guard holds on to no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from operator import attrgetter

import torch

from shard_reshard._torch_compat import PLAIN_TYPES, is_fake, modes, same_metadata

_STRIDED = {torch.strided}
_is_nested = attrgetter("is_nested")
_data_ptr = torch.Tensor.data_ptr


class Match(IntEnum):
    """Result of comparing the tensors of a call with a guard."""

    NONE = 0
    METADATA = 1  # types, shapes, strides, dtypes, devices, flags and modes: checks of single tensors stay valid
    MEMORY = 2  # and the memory too: views, and what was found about overlaps, stay valid


class TensorGuards:
    """Guards on all tensors of a call. Made by `record_guards`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._modes = modes()
        self._pointers = pointers(tensors)
        first: dict[int, int] = {}  # torch's guards take no tensor twice
        self._twins = [(at, other) for at, t in enumerate(tensors) if (other := first.setdefault(id(t), at)) != at]
        self._firsts = list(first.values())
        self._alike = same_metadata([tensors[at] for at in self._firsts])

    def match(self, tensors: Sequence[torch.Tensor]) -> Match:
        """Compare the tensors of a call, in the modes that are on.

        A view that negates or conjugates on reading has the address of what it is a view of, but other dispatch keys.
        """
        if len(tensors) != len(self._pointers) or modes() != self._modes:
            return Match.NONE
        if True in map(_is_nested, tensors):
            return Match.NONE  # torch's guards ask for sizes, which a nested tensor lacks: that ends the process
        once = tensors
        if self._twins:
            if any(tensors[a] is not tensors[b] for a, b in self._twins):
                return Match.NONE
            once = [tensors[at] for at in self._firsts]
        if not self._alike(*once):
            return Match.NONE
        return Match.MEMORY if list(map(_data_ptr, tensors)) == self._pointers else Match.METADATA


def record_guards(tensors: Sequence[torch.Tensor]) -> TensorGuards | None:
    """Return guards on these tensors; None where some have no memory or no strides to compare."""
    if not PLAIN_TYPES.issuperset(map(type, tensors)) or is_fake(tensors) or True in map(_is_nested, tensors):
        return None
    return TensorGuards(tensors) if {tensor.layout for tensor in tensors} <= _STRIDED else None


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where tensors begin."""
    return list(map(_data_ptr, tensors))
