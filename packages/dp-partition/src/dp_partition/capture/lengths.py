"""Symbolic lengths: one trace for batches with other sizes of marked dims.

The sizes of marked dims are symbols while the step is traced. Arithmetic on them becomes nodes of the graph, and each
decision on them, by torch or the step, a guard. Passes work on the sizes of the first batch: under local
semantics they need sizes of parameters and gradients only. A comparison shows that no size of a batch is left in the
graph: at the second length it has to equal, node by node, the graph of a trace for this length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dp_partition._torch_compat import FakeTensorMode, pytree, symbolic_size

aten = torch.ops.aten

Sizes = dict[tuple[int, int], Any]
"""Symbol of each marked size, by position among the tensor arguments and by dim."""


def marked_dims(tensor: torch.Tensor, marked: tuple[int, ...]) -> list[int]:
    """Return the dims of a tensor argument with symbolic sizes: torch treats sizes 0 and 1 apart."""
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
    """Return a fake of an argument with a symbol for each marked size; ``sizes`` gets their expressions."""
    shape: list[Any] = list(tensor.shape)
    for dim in marked_dims(tensor, marked):
        shape[dim] = symbolic_size(mode, shape[dim], f"size_{index}_{dim}")
        sizes[index, dim] = shape[dim].node.expr
    with mode:
        if is_dense(tensor):
            return torch.empty(shape, dtype=tensor.dtype, device=device)
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)


def erase_full_slices(graph: fx.Graph) -> None:
    """Erase full slices: with numbers torch leaves them out, and ``mask[:, None]`` has many."""
    for node in list(graph.nodes):
        backward = node.target is aten.slice_backward.default
        if not backward and node.target is not aten.slice.Tensor:
            continue
        source: Any = node.args[0]
        bounds: list[Any] = [*node.args[2 + backward :], *(None, None, 1)[len(node.args) - 2 - backward :]]
        start, _, step = bounds
        if start in (None, 0) and step == 1 and _shape(node) == _shape(source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _shape(node: Any) -> list[Any]:
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape]


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


Outputs = Callable[[Sequence[Any]], list[Any]]


def first_difference(dynamic: fx.Graph, static: fx.Graph, outputs: tuple[Outputs, Outputs]) -> str:
    """Return the first difference between a graph with symbols and that of one length, as text; else empty.

    Args:
        dynamic: A graph with nodes that compute sizes.
        static: The graph of the length at hand, with its values in ``meta["val"]``.
        outputs: For either graph, the caller's view of its values: a size among them is no value of the second one.
    """
    same: dict[fx.Node, Any] = {}  # node of the dynamic graph -> node, or number, of the static one
    rest = iter(static.nodes)  # nodes on sizes are numbers there
    for node in dynamic.nodes:
        number = _number(node, same)
        if number is not None:
            same[node] = number
            continue
        other = next(rest, None)
        if other is None:
            return f"{node.name} ({node.target})"
        same[node] = other
        mine: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda one: same[one])
        if node.op != other.op or (node.op not in ("placeholder", "output") and node.target != other.target):
            return f"{node.name} ({node.target}), {other.name} ({other.target})"
        theirs: Any = (other.args, dict(other.kwargs))
        if node.op == "output":
            mine, theirs = outputs[0](mine[0][0]), outputs[1](theirs[0][0])
        if not _equal(mine, theirs):
            return f"{node.name} ({node.target}), arguments {mine} and {theirs}"
    left = next(rest, None)
    return "" if left is None else f"{left.name} ({left.target})"


_GEOMETRY: dict[Any, Any] = {
    aten.sym_size.int: torch.Tensor.size,
    aten.sym_stride.int: torch.Tensor.stride,
    aten.sym_numel.default: torch.Tensor.numel,
    aten.sym_storage_offset.default: torch.Tensor.storage_offset,
}


def _number(node: fx.Node, same: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that computes sizes; None for others."""
    if node.op != "call_function":
        return None
    if node.target in _GEOMETRY:
        read, tensor, *dim = _GEOMETRY[node.target], *node.args
        return read(same[tensor].meta["val"], *dim)  # type: ignore[index]
    value = node.meta.get("val")
    inputs = [same[one] for one in node.all_input_nodes]
    if isinstance(value, torch.Tensor | list | tuple) or not inputs or any(isinstance(one, fx.Node) for one in inputs):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda one: same[one])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _equal(one: Any, other: Any) -> bool:
    mine, theirs = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(mine) == len(theirs) and all(
        a is b if isinstance(a, fx.Node) or isinstance(b, fx.Node) else type(a) is type(b) and a == b
        for a, b in zip(mine, theirs, strict=True)
    )
