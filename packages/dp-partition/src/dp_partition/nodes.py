"""Nodes of a step's graph: what their operators do, and the notes on them beside fx's own value.

Notes stay in `node.meta`, typed, and not in a table beside the graph: fx copies a node with its notes, into
micro-batches, repeated views and the backends' graphs, and an erased node takes them along. `NodeMeta` is the one
list of them; the type checker holds every reader and writer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast

import torch
from torch import fx

from dp_partition._shared.execution_check import is_random as call_is_random
from dp_partition._torch_compat import OpOverload, pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from dp_partition.plan.placements import NodeType

aten = torch.ops.aten
_NAMESPACES = ("_c10d_functional", "c10d_functional")

# These write their running statistics, against their schemas.
_RUNNING_STATISTICS = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}


def is_op(node: fx.Node) -> bool:
    """Return True for calls of library operators, not of Python arithmetic or getitem."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield the operator's schema arguments with their passed values; defaults are left out."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def nodes_in(value: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the input nodes with memory written by the operator."""
    if not is_op(node):
        return []
    mutated = []
    fused_reads = "_fused_" in str(node.target) and node.kwargs.get("grad_scale") is None
    for argument, value in arguments(node):
        if fused_reads and argument.name == "grads":
            continue  # a fused optimizer writes gradients only to divide them by a scale
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated += nodes_in(value)
    if node.target in _RUNNING_STATISTICS and len(node.args) > 5 and node.args[5]:
        for position in _RUNNING_STATISTICS[node.target]:
            mutated += nodes_in(node.args[position])
    return mutated


def viewed_input(node: fx.Node) -> fx.Node | None:
    """Return the input viewed by the node's output (same memory, not written), by the schema."""
    if not is_op(node) or node.target.namespace == "dp_partition":  # type: ignore[union-attr]
        return None  # a gradient gets its own memory when it is reduced; rows of a parameter are checked by name
    for argument, value in arguments(node):
        if argument.alias_info is not None and not argument.alias_info.is_write and isinstance(value, fx.Node):
            return value
    return None


def base_of(node: fx.Node) -> fx.Node | None:
    """Return the base of a view, or the node of several views (``split``)."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source if viewed_input(source) is not None else None
    return viewed_input(node)


def root_of(node: fx.Node) -> fx.Node:
    """Return the owner of the memory behind a chain of views."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def is_random(node: fx.Node) -> bool:
    """Return True if the operator draws random numbers; attention kernels do with dropout only."""
    return is_op(node) and call_is_random(node.target, node.args, node.kwargs)


def has_effect(node: fx.Node) -> bool:
    """Return True if the node writes, draws or communicates, and so is never dead."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if not is_op(node):
        return node.is_impure()
    namespace = node.target.namespace  # type: ignore[union-attr]
    return bool(mutated_inputs(node)) or is_random(node) or namespace in _NAMESPACES


def substitution(by: dict[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
    """Return a function for `fx.Graph.node_copy` to replace inputs; the table may grow meanwhile."""
    return lambda node: by.get(node, node)


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Replace an operator's value for an argument of its schema."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if position < len(node.args) and not argument.kwarg_only:
                node.update_arg(position, value)
            else:
                node.update_kwarg(name, value)


def base_name(node: fx.Node) -> str:
    """Return the operator's name without namespace, overload and in-place underscore: ``add_.Tensor`` -> ``add``."""
    name = node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    inplace = name.endswith("_") and not name.endswith("__")
    return name[:-1] if inplace else name  # type: ignore[no-any-return]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node stands for: none, one or several."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def place_of(node: fx.Node) -> Any:
    """Return shape, strides, dtype and place in memory of a node's tensor, for comparison."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    bits = value.is_conj(), value.is_neg()  # views may differ in these alone: other values are read from them
    # Symbols as text: comparing sizes that depend on values would need the values.
    return str((*value.shape, *value.stride(), value.storage_offset())), value.dtype, bits


def is_collective(node: fx.Node) -> bool:
    if not is_op(node):
        return False
    target: Any = node.target
    return target.namespace in _NAMESPACES and not target._schema.name.endswith("::wait_tensor")


def is_wait(node: fx.Node) -> bool:
    target: Any = node.target
    return is_op(node) and target.namespace in _NAMESPACES and target._schema.name.endswith("::wait_tensor")


Phase = Literal["forward", "backward", "optimizer"]


class Hyperparameter(NamedTuple):
    """One live number: ``optimizers[optimizer].param_groups[group][key]``, or its element ``element`` (betas).

    With ``param`` it is entry ``key`` of the state of the group's parameter of this index.
    """

    optimizer: int
    group: int
    key: str
    element: int | None = None
    param: int | None = None

    @property
    def label(self) -> str:
        tail = "" if self.element is None else str(self.element)
        owner = "" if self.param is None else f"_param{self.param}"
        return f"optim{self.optimizer}_group{self.group}{owner}_{self.key}{tail}"


@dataclass(frozen=True)
class GraphValue:
    """One value that enters a graph, by a placeholder, or leaves it: for the caller, or to install.

    ``kind`` is param, buffer, state (``key`` is that of the entry), hyper (``key`` is the `Hyperparameter`), number or
    arg; of what leaves it also user, attribute (``key`` is a module and a name: a tensor that a forward leaves there),
    and argument: the gradient left by backward on a tensor argument.
    """

    kind: str
    name: str = ""
    key: Any = None
    optimizer: int = 0

    @property
    def label(self) -> str:
        """Name of an input."""
        if self.kind == "hyper":
            return self.name
        tail = "" if self.key is None else f"_{self.key}"
        return f"{self.kind}_{self.name}{tail}"


class NodeMeta(TypedDict, total=False):
    """Notes on one node; each exists from its writing pass on."""

    val: Any  # the fake value, as in torch's own passes
    input: GraphValue  # source of a placeholder's value
    phase: Phase  # part of the step in which a node runs; packing and unpacking of buckets have none
    gradient: str  # name of the gradient's parameter, once tags are removed; empty: one without a name
    mean_gradient: str  # the same, for the mean over micro-batches
    # averaged gradients among a node's leaves, read by no node before it: place, name, placement
    reads: Sequence[tuple[int, str, Placement]]
    node_type: NodeType  # kind of tensor for data parallelism; the seed's functions leave it on a graph too
    sharding: Any  # the strategy chosen by the seed's functions
    gather_again: bool  # a parameter's full copy, or a view of it, is freed after forward
    agrees: bool  # the copy that installs rank 0's random numbers
    ranks: int  # number of a collective's ranks, if it is not on the graph's own axis


def meta_of(node: fx.Node) -> NodeMeta:
    """Return the node's notes, typed; the same dict as ``node.meta``."""
    return cast("NodeMeta", node.meta)


def kind_of(node: fx.Node) -> str:
    """Return the kind of a placeholder's input, as `GraphValue.kind`; empty for every other node."""
    notes = meta_of(node)
    return notes["input"].kind if "input" in notes else ""


def copy_notes(source: fx.Node, target: fx.Node, *keys: Literal["node_type", "phase", "val", "gradient"]) -> None:
    """Copy notes under these keys from one node to another, if they exist."""
    target.meta.update({key: source.meta[key] for key in keys if key in source.meta})
