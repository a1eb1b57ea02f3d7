"""Split a rank's graph into pieces to compile and pieces that run as they are.

Contract: pieces keep the order of the graph, so collectives, random numbers and writes keep theirs. Only tensors with
their own memory pass from piece to piece: every piece takes its views again, so the memory written by a piece is
never another input of it under another name. The optimizer runs as it is, and so does code with Python numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dp_partition._torch_compat import storage_key
from dp_partition.capture.node_meta import kind_of, meta_of
from dp_partition.ops import is_collective, is_op, is_random, is_wait, mutated_inputs, viewed_input

LEAST = 2  # operators of a piece; a smaller one is not worth compiling


@dataclass
class Piece:
    """Consecutive nodes.

    Attributes:
        compiled: Inductor compiles it.
        nodes: Its nodes, without views.
        inputs: Its input values: tensors with memory of their own, and numbers if it is not compiled.
        outputs: Values used by later pieces.
        written: Inputs with memory written by it.
        graph: Its computation, as a graph of its own.
    """

    compiled: bool
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    written: list[fx.Node] = field(default_factory=list)
    graph: fx.Graph = field(default_factory=fx.Graph)


def split(graph: fx.Graph) -> list[Piece]:
    """Return the pieces of a graph with local values in ``meta["val"]``; the last returns the graph's values."""
    _bring_items_home(graph)
    views = {node for node in graph.nodes if is_view(node)}
    pieces: list[Piece] = []
    for node in graph.nodes:
        if node in views or node.op in ("placeholder", "get_attr"):
            continue
        compiled = node.op == "call_function" and is_compiled(node)
        if not pieces or pieces[-1].compiled != compiled:
            pieces.append(Piece(compiled, []))
        pieces[-1].nodes.append(node)
    pieces = _join(pieces)  # before graphs are written
    for piece in pieces:
        _write_graph(piece, views)
    _connect(pieces)
    return pieces


def _bring_items_home(graph: fx.Graph) -> None:
    """Move items of an operator's several results right behind it: no list leaves a piece."""
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            after = node.all_input_nodes[0]
            while after.next.target is operator.getitem and after.next.args[0] is node.args[0]:
                after = after.next
            if after is not node:
                after.append(node)


def is_view(node: fx.Node) -> bool:
    """Return True if the node's values share memory with one of its inputs."""
    source = _looked_at(node)
    if source is None:
        return False
    memory = _memory(source)
    return bool(memory) and _memory(node) <= memory


def _looked_at(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        return source if is_view(source) else None
    return None if mutated_inputs(node) else viewed_input(node)


def _memory(node: fx.Node) -> set[int]:
    values = node.meta.get("val")
    listed = values if isinstance(values, list | tuple) else [values]
    return {storage_key(value) for value in listed if isinstance(value, torch.Tensor)}


def is_compiled(node: fx.Node) -> bool:
    """Return True if the node may be part of a compiled piece."""
    if not is_op(node):
        return node.target is operator.getitem and is_compiled(node.all_input_nodes[0])
    target: Any = node.target
    # Packing has no phase: one copy each, just as fast without compiling, and slow to compile.
    if meta_of(node).get("phase") not in ("forward", "backward"):
        return False
    if is_collective(node) or is_wait(node) or is_random(node) or target.namespace not in ("aten", "prims"):
        return False
    # Numbers change from step to step (a learning rate, a size): compiled code would hold the first one.
    return not any(map(_is_number, (node, *node.all_input_nodes)))


def _is_number(node: fx.Node) -> bool:
    """Return True if the node's value is a Python number."""
    if node.op == "placeholder":
        return kind_of(node) == "hyper"
    return node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _join(pieces: list[Piece]) -> list[Piece]:
    """Run pieces too small to compile as they are; join neighbours of a kind."""
    joined: list[Piece] = []
    for piece in pieces:
        compiled = piece.compiled and sum(node.target is not operator.getitem for node in piece.nodes) >= LEAST
        if joined and joined[-1].compiled == compiled:
            joined[-1].nodes += piece.nodes
        else:
            joined.append(Piece(compiled, list(piece.nodes)))
    return joined


def _write_graph(piece: Piece, views: set[fx.Node]) -> None:
    """Fill the piece's inputs, written inputs and graph."""
    inside = set(piece.nodes)
    piece.inputs = list(_needed(piece, inside, views))
    owners = {_owner(source, views) for node in piece.nodes for source in mutated_inputs(node)}
    piece.written = [node for node in piece.inputs if node in owners]
    graph = piece.graph
    copies: dict[fx.Node, Any] = {}  # views too: a copy in each piece
    for node in piece.inputs:
        copies[node] = graph.placeholder(f"in_{node.name}")
        copies[node].meta["val"] = node.meta.get("val")

    def copied(argument: Any) -> Any:
        return fx.map_arg(argument, made)

    def made(node: fx.Node) -> Any:
        if node not in copies:  # a view
            copies[node] = graph.create_node(
                node.op, node.target, copied(node.args), copied(dict(node.kwargs)), name=node.name
            )
        return copies[node]

    for node in piece.nodes:
        if node.op == "output":
            graph.output(copied(node.args[0]))
        else:
            made(node)


def _needed(piece: Piece, inside: set[fx.Node], views: set[fx.Node]) -> Iterable[fx.Node]:
    """Return the piece's values from outside, with views replaced by the owners of their memory."""
    seen: dict[fx.Node, None] = {}
    stack = [source for node in reversed(piece.nodes) for source in reversed(node.all_input_nodes)]
    visited: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in visited or node in inside:
            continue
        visited.add(node)
        if node in views:
            stack += list(reversed(node.all_input_nodes))  # keeps the order of the graph
        else:
            seen[node] = None
    return seen


def _owner(node: fx.Node, views: set[fx.Node]) -> fx.Node:
    """Return the owner of a view's memory."""
    while node in views:
        source = _looked_at(node)
        assert source is not None
        node = source
    return node


def _connect(pieces: list[Piece]) -> None:
    """Make every piece return the values used by later ones."""
    wanted: set[fx.Node] = set()
    for piece in reversed(pieces):  # later needs first
        piece.outputs = [node for node in piece.nodes if node in wanted]
        wanted.update(piece.inputs)
        if piece.nodes[-1].op != "output":
            by_name = {node.name: node for node in piece.graph.nodes}
            piece.graph.output([by_name[node.name] for node in piece.outputs])
