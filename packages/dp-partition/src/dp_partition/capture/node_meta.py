"""Notes on the nodes of a step's graph, beside the value that fx keeps there.

They stay in `node.meta`, typed, and not in a table beside the graph: fx copies a node with its notes, into
micro-batches, views that are taken again and the backends' graphs, and an erased node takes them along. Here is the one
list of them, which the type checker holds every reader and writer to.
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
    """Notes on one node; each is there from the pass on that writes it.

    Attributes:
        val: The fake value, as torch's own passes keep it.
        input: What a placeholder is.
        phase: In which part of the step a node runs; packing and unpacking of buckets belong to none.
        gradient: Name of the parameter whose gradient the node is, once tags are gone; empty: of one without a name.
        mean_gradient: The same, for the mean over micro-batches.
        reads: Which of a node's leaves are averaged gradients that no node before it reads: place, name, placement.
        node_type: What kind of tensor it is for data parallelism; the seed's functions leave it on a graph too.
        sharding: The strategy that the seed's functions have chosen.
        fallback: The node has no rule, and runs on inputs that had to be gathered.
        gather_again: The parameter's full copy is let go of after forward.
        agrees: The copy that puts rank 0's random numbers in place.
        ranks: Among how many ranks a collective is, where that is not the graph's own axis.
        packs: Whether the node packs flat gradients for a reduction in place.
    """

    val: Any
    input: Input
    phase: Phase
    gradient: str
    mean_gradient: str
    reads: Sequence[tuple[int, str, Placement]]
    node_type: NodeType
    sharding: Any
    fallback: bool
    gather_again: bool
    agrees: bool
    ranks: int
    packs: bool


def meta_of(node: fx.Node) -> NodeMeta:
    """The node's notes, typed; the same dict as ``node.meta``."""
    return cast("NodeMeta", node.meta)


def phases_of(graph: fx.Graph) -> list[Phase]:
    """The part of the step in which each node runs: that of the node before it, for one that belongs to none."""
    phases: list[Phase] = []
    phase: Phase = "forward"
    for node in graph.nodes:
        phase = meta_of(node).get("phase", phase)
        phases.append(phase)
    return phases


def kind_of(node: fx.Node) -> str:
    """Kind of the input that a placeholder is, as `Input.kind`; empty for every other node."""
    return node.meta["input"].kind if "input" in node.meta else ""


def copy_notes(source: fx.Node, target: fx.Node, *keys: Literal["node_type", "phase", "val", "gradient"]) -> None:
    """Note on one node what another has noted under these keys, if it has."""
    target.meta.update({key: source.meta[key] for key in keys if key in source.meta})
