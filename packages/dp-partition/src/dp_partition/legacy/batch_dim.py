"""Batch dim of each activation."""

from __future__ import annotations

from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from dp_partition.ops import is_op
from dp_partition.plan.placements import PlacementSpec
from dp_partition.sharding.op_rules.lookup import find_rule
from dp_partition.sharding.op_rules.table import Call, Candidate, OutputPlacement, R, cheapest

NO_BATCH = -1
REDUCED = -2


class BatchDimAnalyzer:
    """Follows the batch dim from the inputs through the operators of a graph.

    The dim is followed operator by operator with the rule table, never by comparing sizes: a feature dim that happens
    to be as large as the batch is not mistaken for it.

    Args:
        batch_dim: The batch dim of the graph's inputs.

    Attributes:
        batch_dim_map: What is known: dim, ``-1`` for tensors without a batch, ``-2`` where the batch was reduced away.
        batch_dim_size: Size of the global batch, ``-1`` before `init_batch_dim_size`.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.batch_dim_map: dict[fx.Node, int] = {}
        self.batch_dim_size = -1
        self._states: dict[fx.Node, OutputPlacement] = {}

    def init_batch_dim_size(self, batch_dim_size: int) -> None:
        """Say how large the batch is; it cannot change afterwards."""
        if self.batch_dim_size not in (-1, batch_dim_size):
            raise RuntimeError(f"the batch size is {self.batch_dim_size} already, it cannot become {batch_dim_size}")
        self.batch_dim_size = batch_dim_size

    def set_batch_dim(self, node: fx.Node, batch_dim: int) -> None:
        """Say where a node's batch dim is."""
        self.batch_dim_map[node] = batch_dim
        self._states[node] = {NO_BATCH: R, REDUCED: Partial("sum")}.get(batch_dim, Shard(batch_dim))

    def get_batch_dim(self, node: fx.Node) -> int:
        """Return the batch dim of a node.

        Raises:
            RuntimeError: When nothing is.
        """
        if node not in self.batch_dim_map:
            raise RuntimeError(f"the batch dim of {node} is not known; call compute_batch_dim first")
        return self.batch_dim_map[node]

    def compute_batch_dim(self, node: fx.Node, full_reduction: bool = False) -> int:
        """Find a node's batch dim from those of its inputs.

        Args:
            node: A node of the graph; its inputs are worked out first where needed.
            full_reduction: Take the batch for reduced away in this node.

        Returns:
            The dim, ``-1`` without batch, ``-2`` when the batch was reduced away.
        """
        if self.batch_dim_size == -1:
            raise RuntimeError("set the batch size first: init_batch_dim_size")
        if full_reduction:
            self.set_batch_dim(node, REDUCED)
        for current in self._missing(node):
            state = self._follow(current)
            self._states[current] = state
            self.batch_dim_map[current] = _dim_of(state)
        return self.batch_dim_map[node]

    def compute_act_spec(self, node: fx.Node, mesh: DeviceMesh) -> PlacementSpec:
        """The placement of an activation: sharded on its batch dim, partial where the batch was reduced, else full."""
        dim = self.compute_batch_dim(node)
        placement = {NO_BATCH: Replicate(), REDUCED: Partial("sum")}.get(dim, Shard(dim))
        return PlacementSpec(mesh, (placement,))

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        """The node and its ancestors that nothing is known about, inputs first."""
        order: list[fx.Node] = []
        stack = [(node, False)]
        seen: set[fx.Node] = set()
        while stack:
            current, ready = stack.pop()
            if ready:
                order.append(current)
            elif current not in self._states and current not in seen:
                seen.add(current)
                stack.append((current, True))
                stack += [(source, False) for source in current.all_input_nodes]
        return order

    def _follow(self, node: fx.Node) -> OutputPlacement:
        source = node.args[0] if node.args else None
        state = self._states.get(source) if isinstance(source, fx.Node) else None
        if isinstance(state, tuple):
            return state[node.args[1]]  # type: ignore[index,no-any-return]
        rule = find_rule(node) if is_op(node) else None
        value = node.meta.get("val")
        many = isinstance(value, tuple | list)
        if rule is None:
            return tuple(R for _ in value) if many and value is not None else R
        call = Call(node, self._states, 1, {})
        full = Candidate({n: call.placement_of(n) for n in call.tensors() if call.placement_of(n) == R}, R)
        candidates = list(rule(call))
        if all(call.placement_of(n) == R for n in call.tensors()):
            candidates = [full, *candidates]
        best = cheapest(call, candidates)
        return best.output if best is not None else R


def _dim_of(state: OutputPlacement) -> int:
    if isinstance(state, tuple):
        return next((dim for dim in map(_dim_of, state) if dim != NO_BATCH), NO_BATCH)
    if isinstance(state, Shard):
        return state.dim
    return REDUCED if isinstance(state, Partial) else NO_BATCH
