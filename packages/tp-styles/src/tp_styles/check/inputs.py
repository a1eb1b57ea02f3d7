"""Inputs of a checked call: which of them are equal on all ranks, and what the others can be shards of."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tp_styles._torch_compat import local_of, tree_flatten, tree_unflatten
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.parameters import agreed_values
from tp_styles.runtime.redistribute import as_dtensor
from tp_styles.values.transfer import normalized

TOLERANCE = 1e-3
"""Of the largest value: kernels may round in another order on each rank."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, slice)
SHARED = (nn.Module, DeviceMesh, dist.ProcessGroup)


class NotReady(Exception):
    """This call cannot be repeated; a later one may."""


@dataclass
class Leaf:
    """One tensor among the arguments.

    Attributes:
        value: The tensor as it was passed.
        name: How an error names it.
        declared: Its layout, if a style on the module declares it.
        is_equal: It has the same values on all ranks.
        sizes: Its shape on each rank.
    """

    value: torch.Tensor
    name: str
    declared: Placement | None = None
    is_equal: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()


Layouts = tuple[Placement | None, ...]
"""Layout of each leaf; None for a DTensor, which has its own."""


class Inputs:
    """The arguments of a call, compared between the ranks; every rank makes one.

    Args:
        args: Positional arguments.
        kwargs: Arguments by name.
        axis: The ranks.
        declared: Argument name -> layout that a style declares.
        names: Names of positional arguments.
        dims: Dims that styles further inside declare activations to be sharded on.

    Raises:
        NotReady: An argument holds tensors in a way that they cannot be copied, a filled cache.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axis: TPGroup,
        declared: Mapping[str, Placement],
        names: tuple[str, ...],
        dims: tuple[int, ...],
    ) -> None:
        self.axis = axis
        self.dims = dims
        flat, self.spec = tree_flatten((args, kwargs))
        self.flat: list[Any] = flat
        named = {id(value): names[i] if i < len(names) else f"args[{i}]" for i, value in enumerate(args)}
        named |= {id(value): key for key, value in kwargs.items()}
        self.leaves: list[Leaf] = []
        for index, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                name = named.get(id(value), f"input {index}")
                self.leaves.append(Leaf(value, name, declared.get(name)))
            elif not isinstance(value, (*PLAIN, *SHARED)) and not callable(value) and holds_tensors(value):
                raise NotReady(f"{type(value).__name__} among its arguments is filled")
        self._compare()

    def _compare(self) -> None:
        mine = [(tuple(leaf.value.shape), str(leaf.value.dtype), type(leaf.value).__name__) for leaf in self.leaves]
        everyone = self.axis.all_gather_objects(mine, "the check")
        if len({len(other) for other in everyone}) > 1:
            raise NotReady("ranks pass another number of tensors")
        equal = []
        for index, leaf in enumerate(self.leaves):
            kinds = [other[index] for other in everyone]
            leaf.shapes = tuple(shape for shape, _, _ in kinds)
            same = len(set(kinds)) == 1
            if same and not isinstance(leaf.value, DTensor):
                first = agreed_values(leaf.value.detach(), self.axis, 0)
                same = is_close(leaf.value.detach(), first)
            equal.append(same)
        verdicts = self.axis.all_gather_objects(equal, "the check")
        for index, leaf in enumerate(self.leaves):
            leaf.is_equal = all(verdict[index] for verdict in verdicts)

    @property
    def differ(self) -> list[Leaf]:
        """Tensors that differ between the ranks, and that no style declares to."""
        return [
            leaf
            for leaf in self.leaves
            if not leaf.is_equal and not isinstance(leaf.value, DTensor) and not isinstance(leaf.declared, Shard)
        ]

    def hypotheses(self) -> list[Layouts]:
        """List possible layouts: the declared layout, else replicas if they are equal, else shards."""
        found: list[Layouts] = []
        if not self.differ:
            found.append(tuple(self._layout(leaf, None) for leaf in self.leaves))
        for dim in self.dims:
            if dim < 0 and not self.differ:
                continue  # the input of a row-wise layer, which a column-wise one gives
            layouts = [self._layout(leaf, dim) for leaf in self.leaves]
            if any(isinstance(layout, Shard) for layout in layouts):
                found.append(tuple(layouts))
        return list(dict.fromkeys(found))

    def _layout(self, leaf: Leaf, dim: int | None) -> Placement | None:
        if isinstance(leaf.value, DTensor):
            return None
        if leaf.declared is not None:
            return normalized(leaf.declared, leaf.value.dim())
        may_be_shard = leaf.value.is_floating_point() or not leaf.is_equal
        if dim is None or not may_be_shard or not -leaf.value.dim() <= dim < leaf.value.dim():
            return Replicate()
        return Shard(dim % leaf.value.dim())

    def copies(self, layouts: Layouts, dtype: torch.dtype | None, *, full: bool) -> Copies:
        """Detached copies of all arguments: as this rank passes them, or the global ones."""
        leaves: list[torch.Tensor] = []
        for leaf, layout in zip(self.leaves, layouts, strict=True):
            with torch.no_grad():
                value = self._value(leaf, layout, full=full)
                if dtype is not None and value.is_floating_point():
                    value = value.to(dtype)
            leaves.append(value.detach().requires_grad_(leaf.value.requires_grad))
        remaining = iter(leaves)
        flat = []
        for value in self.flat:
            if isinstance(value, torch.Tensor):
                # A clone, because a forward may write to its input, and autograd protects leaves.
                leaf_copy = next(remaining)
                flat.append(leaf_copy.clone() if leaf_copy.requires_grad else leaf_copy)
            elif isinstance(value, (*PLAIN, *SHARED)) or callable(value):
                flat.append(value)
            else:
                flat.append(copy.deepcopy(value))
        args, kwargs = tree_unflatten(flat, self.spec)
        return Copies(args, kwargs, leaves, layouts)

    def _value(self, leaf: Leaf, layout: Placement | None, *, full: bool) -> torch.Tensor:
        value = leaf.value.detach()
        if isinstance(value, DTensor):
            if full:
                return value.full_tensor().clone()
            local = local_of(value).clone()
            return as_dtensor(local, value.device_mesh, value.placements, value.shape, value.stride())
        if not isinstance(layout, Shard):
            return agreed_values(value, self.axis, 0).clone()  # equal, but for rounding
        if not full:
            return value.clone()
        return self.axis.all_gather(value, layout.dim, [shape[layout.dim] for shape in leaf.shapes])


@dataclass
class Copies:
    """The arguments of one run, and the leaves among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor]
    layouts: Layouts


def is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """True if two tensors of one shape have the same values but for rounding."""
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if not one.numel():
        return True
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (one, other))
    a, b = a.double(), b.double()
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True))


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """True if an object holds tensors with elements, in attributes, lists or dicts."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 0
    if depth == 0 or isinstance(value, (*PLAIN, *SHARED)) or callable(value):
        return False
    return any(holds_tensors(one, depth - 1) for one in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
