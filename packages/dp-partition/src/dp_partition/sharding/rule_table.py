"""The rule table: strategies of each operator on shards.

A *rule* takes one call and yields candidates: placements of its inputs, and of its output then. The
engine adds the candidate valid for every operator (everything replicated) and takes the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dp_partition.nodes import arguments, base_name, is_tensor, nodes_in, tensors_of
from dp_partition.plan.placements import RankLocal

OutputPlacement = Placement | tuple[Any, ...] | None
"""Placement of a node's value: of one tensor, of several outputs, or of no tensor."""

HALF = (torch.bfloat16, torch.float16)
R = Replicate()
SUM = Partial("sum")


@dataclass(frozen=True)
class Candidate:
    """One strategy of a call: placements of inputs (default: replicated) and of the output."""

    inputs: dict[fx.Node, Placement]
    output: OutputPlacement


@dataclass
class Call:
    """One operator call, the input of a rule."""

    node: fx.Node
    states: dict[fx.Node, OutputPlacement]  # placement of every earlier node's value
    world: int
    desired: dict[fx.Node, Placement]  # for unreduced gradients: placement of their parameter
    may_stay_partial: bool = True  # unreduced gradients may pass through linear operators (until the last backward)
    is_update: bool = False  # the optimizer's arithmetic, or other code behind the last backward, without activations

    @property
    def name(self) -> str:
        return base_name(self.node)

    @property
    def is_half(self) -> bool:
        """True if a result is in half precision."""
        return any(x.dtype in HALF for x in tensors_of(self.node))

    @property
    def rounds(self) -> bool:
        """True if sums and products of shards would round otherwise than full ones, by much of what a step changes.

        For example Muon multiplies in bfloat16, and its iteration makes 3 % of the movement of one rounding.
        """
        return self.is_update and self.is_half

    def arg(self, position: int, default: Any = None) -> Any:
        """Return a positional argument, or the one passed by its schema name."""
        if position < len(self.node.args):
            return self.node.args[position]
        named = self.node.target._schema.arguments  # type: ignore[union-attr]
        return self.node.kwargs.get(named[position].name, default) if position < len(named) else default

    def named(self, name: str, default: Any = None) -> Any:
        """Return the value passed for the schema argument of this name."""
        for argument, value in arguments(self.node):
            if argument.name == name:
                return value
        return default

    def placement_of(self, node: Any) -> Placement:
        state = self.states.get(node)
        return state if isinstance(state, Placement) else R

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        value = node.meta.get("val")
        return tuple(int(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()

    def outputs(self, placement: Placement) -> OutputPlacement:
        """Return the placement for the call's one output, or for each of several."""
        value = self.node.meta.get("val")
        return tuple(placement for _ in value) if isinstance(value, tuple | list) else placement

    def tensors(self, *values: Any) -> list[fx.Node]:
        """Return the tensor nodes in the given arguments, or in the full call; each once."""
        nodes = nodes_in(values if values else (self.node.args, dict(self.node.kwargs)))
        return list(filter(is_tensor, dict.fromkeys(nodes)))

    def shards(self, nodes: Iterable[fx.Node]) -> list[tuple[fx.Node, int]]:
        """Return the sharded nodes, with their dims."""
        shards = []
        for node in nodes:
            placement = self.placement_of(node)
            if isinstance(placement, Shard):
                shards.append((node, placement.dim))
            elif isinstance(self.desired.get(node), Shard):  # an unreduced gradient
                shards.append((node, self.desired[node].dim))  # type: ignore[attr-defined]
        return shards

    def splits(self, node: fx.Node, dim: int) -> bool:
        """Return True if the world size divides the dim of a tensor."""
        shape = self.shape(node)
        return dim < len(shape) and shape[dim] > 0 and shape[dim] % self.world == 0

    def leaves_a_rank_empty(self, node: fx.Node, dim: int) -> bool:
        """Return True if the last rank's shard of a dim is empty."""
        size = self.shape(node)[dim]
        return -(-size // self.world) * (self.world - 1) >= size


Rule = Callable[[Call], Iterator[Candidate]]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under the names of its operators (without overload and in-place underscore)."""

    def enter(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return enter


def move_cost(source: Placement, target: Placement, num_bytes: int) -> float:
    """Return the bytes sent by a rank to move a tensor; infinite for undefined moves."""
    if source == target:
        return 0.0
    if isinstance(source, RankLocal) or isinstance(target, RankLocal):
        return float("inf")
    if isinstance(source, Replicate):
        return 0.0  # a slice
    is_sharded = isinstance(source, Shard)  # else partial
    if isinstance(target, Replicate):
        return (1.0 if is_sharded else 2.0) * num_bytes  # an all-gather, or an all-reduce
    return (2.0 if is_sharded else 1.0) * num_bytes if isinstance(target, Shard) else float("inf")


def cheapest(call: Call, candidates: Iterable[Candidate], nodes: Sequence[fx.Node] | None = None) -> Candidate | None:
    """Return the first candidate with the fewest moved bytes, of given nodes or all."""
    best, best_cost = None, float("inf")
    values = [(node, node.meta["val"]) for node in (call.tensors() if nodes is None else nodes)]
    sizes = [(node, value.numel() * value.element_size() + 1) for node, value in values]  # never 0
    for candidate in candidates:
        cost = sum(move_cost(call.placement_of(n), candidate.inputs.get(n, R), size) for n, size in sizes)
        if cost < best_cost:
            best, best_cost = candidate, cost
    return best
