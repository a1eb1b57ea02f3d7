"""Symbolic lengths: one trace for batches with other sizes of marked dims.

The sizes of marked dims are symbols while the step is traced. Arithmetic on them becomes nodes of the graph, and each
decision on them, by torch or the step, a guard. Passes work on the sizes of the first batch: under local semantics
they need sizes of parameters and gradients only. That none is left in the graph is not argued but checked: every length
is compared with the step in the first call that has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dp_partition._torch_compat import FakeTensorMode, pytree, symbolic_size

Sizes = dict[tuple[int, int], Any]
"""Symbol of each marked size, by position among the tensor arguments and by dim."""


def marked_dims(tensor: torch.Tensor, marked: tuple[int, ...]) -> list[int]:
    """Return the dims of a tensor argument with symbolic sizes. Torch treats sizes 0 and 1 apart."""
    dims = {dim % tensor.ndim for dim in marked if -tensor.ndim <= dim < tensor.ndim}
    return sorted(dim for dim in dims if tensor.shape[dim] > 1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the strides follow from the shape."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def length_key(tensor: torch.Tensor, marked: tuple[int, ...]) -> Any:
    """Return shape and strides, as far as a trace depends on them."""
    dims = marked_dims(tensor, marked)
    if not dims:
        return tuple(tensor.shape), tuple(tensor.stride())
    shape = tuple([None if dim in dims else size for dim, size in enumerate(tensor.shape)])
    return shape, None if is_dense(tensor) else tuple(tensor.stride())


def symbolic_fake(
    mode: FakeTensorMode, tensor: torch.Tensor, index: int, marked: tuple[int, ...], sizes: Sizes, device: Any
) -> torch.Tensor:
    """Return a fake of an argument with a symbol for each marked size. ``sizes`` gets their expressions."""
    shape: list[Any] = list(tensor.shape)
    for dim in marked_dims(tensor, marked):
        shape[dim] = symbolic_size(mode, shape[dim], f"size_{index}_{dim}")
        sizes[index, dim] = shape[dim].node.expr
    with mode:
        if is_dense(tensor):
            return torch.empty(shape, dtype=tensor.dtype, device=device)
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)


def use_first_sizes(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Give ``meta["val"]`` the sizes of the traced batch, for passes that read numbers."""

    def first(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return int(value.node.hint)
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        geometry = (*value.shape, *value.stride(), value.storage_offset())
        if not any(isinstance(one, torch.SymInt) for one in geometry):
            return value
        with mode, torch.no_grad():
            shape, stride = map(first, value.shape), map(first, value.stride())
            filled = torch.empty_strided(tuple(shape), tuple(stride), dtype=value.dtype, device=value.device)
            filled = filled.conj() if value.is_conj() else filled
            return torch._neg_view(filled) if value.is_neg() else filled

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(first, node.meta["val"])
