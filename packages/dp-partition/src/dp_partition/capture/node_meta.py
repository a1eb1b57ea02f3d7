"""Notes on the nodes of a step's graph, beside fx's own value.

They stay in `node.meta`, typed, and not in a table beside the graph: fx copies a node with its notes, into
micro-batches, repeated views and the backends' graphs, and an erased node takes them along. This is the one
list of them; the type checker holds every reader and writer to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx
    from torch.distributed.tensor import Placement

    from dp_partition.capture.fakes import Input
    from dp_partition.plan.placements import NodeType

Phase = Literal["forward", "backward", "optimizer"]


class NodeMeta(TypedDict, total=False):
    """Notes on one node; each exists from its writing pass on.

    Attributes:
        val: The fake value, as in torch's own passes.
        input: Source of a placeholder's value.
        phase: Part of the step in which a node runs; packing and unpacking of buckets have none.
        gradient: Name of the gradient's parameter, once tags are removed; empty: one without a name.
        mean_gradient: The same, for the mean over micro-batches.
        reads: Averaged gradients among a node's leaves, read by no node before it: place, name, placement.
        node_type: Kind of tensor for data parallelism; the seed's functions leave it on a graph too.
        sharding: The strategy chosen by the seed's functions.
        gather_again: A parameter's full copy, or a view of it, is freed after forward.
        agrees: The copy that installs rank 0's random numbers.
        ranks: Number of a collective's ranks, if it is not on the graph's own axis.
    """

    val: Any
    input: Input
    phase: Phase
    gradient: str
    mean_gradient: str
    reads: Sequence[tuple[int, str, Placement]]
    node_type: NodeType
    sharding: Any
    gather_again: bool
    agrees: bool
    ranks: int


def meta_of(node: fx.Node) -> NodeMeta:
    """Return the node's notes, typed; the same dict as ``node.meta``."""
    return cast("NodeMeta", node.meta)


def phases_of(graph: fx.Graph) -> list[Phase]:
    """Return each node's part of the step, without one that of the node before."""
    phases: list[Phase] = []
    phase: Phase = "forward"
    for node in graph.nodes:
        phase = meta_of(node).get("phase", phase)
        phases.append(phase)
    return phases


def kind_of(node: fx.Node) -> str:
    """Return the kind of a placeholder's input, as `Input.kind`; empty for every other node."""
    return node.meta["input"].kind if "input" in node.meta else ""


def copy_notes(source: fx.Node, target: fx.Node, *keys: Literal["node_type", "phase", "val", "gradient"]) -> None:
    """Copy notes under these keys from one node to another, if they exist."""
    target.meta.update({key: source.meta[key] for key in keys if key in source.meta})
