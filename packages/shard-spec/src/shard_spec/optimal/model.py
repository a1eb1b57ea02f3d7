"""Pairwise model of one training step: operations, their strategies along each axis, and costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shard_spec.estimate.cost import AlphaBetaCostModel, Link, Topology
from shard_spec.layout.mesh import MeshSpec
from shard_spec.optimal.operations import STREAM, Operation, Strategy, cuts, moving
from shard_spec.optimal.problem import PairwiseProblem


@dataclass(frozen=True)
class Workload:
    """Size of one training step over all ranks.

    Args:
        batch: sequences of a step, over all ranks.
        sequence: tokens of a sequence.
        recompute: True if blocks recompute their insides in backward, so that only the residual stream is saved.
        activation_bytes: bytes of one activation value (2: bfloat16).
        weight_bytes: bytes of one weight element in communication and matmuls.
        state_bytes: bytes per weight element on its rank: weight, gradient, optimizer. 16 is bfloat16 weight and
            gradient, float32 master copy and two Adam moments.
        overlap: share of the time of weight gathers and gradient reductions hidden behind matmuls.
        causal: True if attention is causal, which halves its operations.

    Raises:
        ValueError: a number is out of range.
    """

    batch: int
    sequence: int
    recompute: bool = True
    activation_bytes: int = 2
    weight_bytes: int = 2
    state_bytes: int = 16
    overlap: float = 0.0
    causal: bool = True

    def __post_init__(self) -> None:
        for field in ("batch", "sequence", "activation_bytes", "weight_bytes", "state_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"Workload({field}={getattr(self, field)}): at least 1.")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"Workload(overlap={self.overlap}): a share between 0 and 1.")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence


StrategyPerAxis = tuple[Strategy, ...]  # one per axis

# Role of an axis (see `shard_spec.plan.axis_roles`) -> names of the strategies along it.
ROLE_STRATEGIES = {
    "data": {"batch", "batch+fsdp"},
    "context": {"sequence", "sequence+fsdp", "heads", "fsdp", "whole"},
    "model": {"column", "row", "heads", "vocabulary", "sequence", "whole"},
}


@dataclass(frozen=True, eq=False)
class StepModel:
    """Operations, machine and workload; `problem` is the solver's input.

    Costs are seconds of one training step, forward and backward; memory is bytes on a rank (equal on every rank, up
    to uneven rows). `transient_bytes` are no sum over operations, so they are beside the problem. Not in the model:
    norms and other small operations, and the allocator's rounding.

    Attributes:
        units: FQNs of the modules that are gathered one by one, as ``fully_shard`` wraps them; the rest is the root's.
        roles: role of each axis, which leaves it the strategies of `ROLE_STRATEGIES`; None: any, differently for each
            operation, which no plan can say: the rows of ``S(0)`` may be gathered or a column's.
    """

    operations: tuple[Operation, ...]
    mesh: MeshSpec
    topology: Topology
    cost_model: AlphaBetaCostModel
    workload: Workload
    units: tuple[str, ...] = ()
    roles: tuple[str, ...] | None = None

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Links of the axes."""
        ranks = self.mesh.rank_list
        return tuple(self.topology.link(self.mesh.axes, axis, ranks) for axis in self.mesh.axis_names)

    @cached_property
    def choices(self) -> tuple[tuple[StrategyPerAxis, ...], ...]:
        """For each operation, the combinations of strategies allowed by its sizes."""
        return tuple(tuple(self._allowed(operation)) for operation in self.operations)

    @cached_property
    def problem(self) -> PairwiseProblem:
        """The pairwise problem: nodes are operations, edges their inputs."""
        problem = PairwiseProblem()
        nodes: dict[object, tuple[list[float], list[int]]] = {}  # shared by equal layers
        edges: dict[object, Tensor] = {}
        key: object
        for index, (operation, choices) in enumerate(zip(self.operations, self.choices, strict=True)):
            sizes = operation.num_elements, operation.matmul_elements, operation.width_out, operation.output_bytes
            key = sizes, operation.scores, operation.kept, bool(operation.parameters), choices, self._is_inside(index)
            if key not in nodes:
                nodes[key] = (
                    [self._seconds(operation, strategies) for strategies in choices],
                    [self._kept_bytes(index, strategies) for strategies in choices],
                )
            problem.add_node(*nodes[key])
        for index, operation in enumerate(self.operations):
            for source in {operation.source, operation.residual} - {-1}:
                width = self.operations[source].width_out
                again = self.workload.recompute and not operation.kept  # recomputed blocks move their inputs again
                key = self.choices[source], self.choices[index], width, again
                if key not in edges:
                    edges[key] = self._moving_table(self.choices[source], self.choices[index], width, 2 if again else 1)
                problem.add_edge(source, index, edges[key])
            if operation.tied_to >= 0:
                # 0 if both store the shared weight alike (always by rows of the vocabulary), infinity otherwise.
                stored = [
                    [tuple(strategy.weight != "-" for strategy in strategies) for strategies in self.choices[each]]
                    for each in (operation.tied_to, index)
                ]
                table = [[0.0 if one == other else math.inf for other in stored[1]] for one in stored[0]]
                problem.add_edge(operation.tied_to, index, table)
        return problem

    # ---- allowed strategies ----

    def _allowed(self, operation: Operation) -> list[StrategyPerAxis]:
        """Return the combinations with dividing batch, sequence and channels."""
        allowed = []
        by_axis = [operation.strategies] * self.mesh.ndim
        if self.roles is not None:
            by_axis = [tuple(s for s in operation.strategies if s.name in ROLE_STRATEGIES[role]) for role in self.roles]
        for strategies in itertools.product(*by_axis):
            pieces = dict.fromkeys("bsh", 1)  # shards along batch, sequence, channels
            for strategy, size in zip(strategies, self.mesh.shape, strict=True):
                state = "h" if strategy.weight in ("column", "row") or strategy.reads == "h" else strategy.reads
                if state in pieces:
                    pieces[state] *= size
            if self.workload.batch % pieces["b"] or self.workload.sequence % pieces["s"]:
                continue
            if pieces["h"] > 1 and pieces["h"] not in operation.degrees:  # e.g. heads
                continue
            allowed.append(strategies)
        # Ranks that do the same work with the same weight are a last resort, if nothing divides.
        sizes = self.mesh.shape
        alike = (any(each.name == "whole" and n > 1 for each, n in zip(one, sizes, strict=True)) for one in allowed)
        divided = [strategies for strategies, same in zip(allowed, alike, strict=True) if not same]
        return (divided if operation.parameters else allowed) or allowed

    # ---- seconds ----

    def _seconds(self, operation: Operation, strategies: StrategyPerAxis) -> float:
        """Return the seconds of matmuls, and of collectives of weights and their gradients."""
        workload = self.workload
        forward = 2.0 * workload.tokens * operation.matmul_elements
        if operation.scores:  # scores and values: two products of 2 operations each
            seen = workload.sequence / 2 if workload.causal else workload.sequence
            forward += 4.0 * workload.tokens * seen * operation.width_out
        passes = 4 if workload.recompute and not operation.kept else 3  # backward is twice forward
        shares = math.prod(
            size for strategy, size in zip(strategies, self.mesh.shape, strict=True) if strategy.divides_work
        )
        compute = self.cost_model.compute(forward * passes / shares, self.topology)
        if not operation.matmul_elements and not operation.parameters:
            return compute
        seconds = 0.0
        elements = operation.num_elements or operation.matmul_elements
        for at, (strategy, link) in enumerate(zip(strategies, self.links, strict=True)):
            others = [pair for k, pair in enumerate(zip(strategies, self.mesh.shape, strict=True)) if k != at]
            cut = math.prod(size for other, size in others if other.weight in ("column", "row"))
            num_bytes = elements * self.workload.weight_bytes / cut
            if strategy.weight == "fsdp":
                # Of several axes the first (slowest) gathers first, when the later ones still shard.
                later = zip(strategies[at + 1 :], self.mesh.shape[at + 1 :], strict=True)
                num_bytes /= math.prod(size for other, size in later if other.weight == "fsdp")
                seconds += 2 * self.cost_model.all_gather(num_bytes, link)  # for forward and again for backward
                seconds += self.cost_model.reduce_scatter(num_bytes, link)
            elif strategy.sums_weight_gradient:
                stored = math.prod(size for other, size in others if other.weight == "fsdp")
                seconds += self.cost_model.all_reduce(num_bytes / stored, link)
        return compute + seconds * (1 - workload.overlap)  # the overlap is hidden behind matmuls

    def _moving_table(
        self, sources: Sequence[StrategyPerAxis], readers: Sequence[StrategyPerAxis], width: int, passes: int
    ) -> Tensor:
        """Return ``[source strategies, reader strategies]`` seconds: the activation forward, its gradient backward."""
        num_bytes = float(self.workload.tokens * width * self.workload.activation_bytes)
        cache: dict[object, float] = {}  # few distinct pairs of layouts

        def seconds(before: tuple[str, ...], after: tuple[str, ...]) -> float:
            if (before, after) not in cache:
                cache[before, after] = moving(before, after, num_bytes, self.links, self.cost_model)
            return cache[before, after]

        outputs = [(tuple(s.writes for s in source), tuple(s.gradient_out for s in source)) for source in sources]
        inputs = [(tuple(s.reads for s in reader), tuple(s.gradient_in for s in reader)) for reader in readers]
        table = [
            [passes * seconds(writes, reads) + seconds(grad_in, grad_out) for reads, grad_in in inputs]
            for writes, grad_out in outputs
        ]
        return torch.tensor(table, dtype=torch.float64, device="cpu")

    # ---- bytes ----

    def _bytes(self, operation: Operation, strategies: StrategyPerAxis) -> int:
        """Return the bytes of weights with gradients and optimizer state, and of a saved output."""
        stored = math.prod(
            size for strategy, size in zip(strategies, self.mesh.shape, strict=True) if strategy.weight != "-"
        )
        total = -(-operation.num_elements * self.workload.state_bytes // stored)
        if operation.width_out and (operation.kept or not self.workload.recompute):
            # sums are reduced before they are saved
            written = tuple("r" if strategy.writes == "p" else strategy.writes for strategy in strategies)
            total += self._output_bytes(operation, written)
        return total

    def _output_bytes(self, operation: Operation, states: Sequence[str]) -> int:
        value_bytes = operation.output_bytes or self.workload.activation_bytes
        return -(-self.workload.tokens * operation.width_out * value_bytes // cuts(states, self.mesh.shape))

    def memory_bytes(self, assignment: Sequence[int]) -> int:
        """Return the bytes of a step at its fullest moment: kept and transient ones."""
        return self.problem.memory_of(assignment) + self.transient_bytes(assignment)

    def transient_bytes(self, assignment: Sequence[int]) -> int:
        """Return the bytes of a step's fullest moment that are no sum over operations, so not in the problem.

        As FSDP2 schedules it, backward of a block holds the block's weights, their gradients, the receive buffer of the
        block before it and the send buffer of the block after it, beside the root's weights and the gradient of its
        head. A recomputed block holds its insides, each with a gradient, but of its streams only the first is saved.
        The loss holds logits in the workload's dtype, and their float32 copy, log-softmax and gradient.

        Saved activations go as backward makes gradients, so the two are never complete together: at the loss and in the
        first block of backward no gradient is there yet, in the last block and in AdamW's step no activation is left.
        """
        gathered, insides = dict.fromkeys((*self.units, ""), 0), dict.fromkeys((*self.units, ""), 0)
        head = logits = saved = 0
        for index, (operation, choices, at) in enumerate(zip(self.operations, self.choices, assignment, strict=True)):
            unit = self._unit_of[index]
            named = list(zip(choices[at], self.mesh.shape, strict=True))
            states = tuple("r" if strategy.writes == "p" else strategy.writes for strategy in choices[at])
            if operation.output_bytes:
                logits += self._output_bytes(operation, states) // operation.output_bytes
            elif operation.width_out and operation.strategies is STREAM:
                # Along model axes a plan's stream is replicated between blocks: no layout says otherwise.
                roles = self.roles or ("data",) * len(states)
                plain = tuple("r" if role == "model" else state for state, role in zip(states, roles, strict=True))
                if not self._is_inside(index):
                    saved += self._output_bytes(operation, plain) - self._output_bytes(operation, states)
            elif operation.width_out:
                insides[unit] += 2 * self._output_bytes(operation, states)
            if any(strategy.weight == "fsdp" for strategy, _ in named):
                pieces = math.prod(size for strategy, size in named if strategy.weight in ("column", "row"))
                size = operation.num_elements * self.workload.weight_bytes // pieces
                gathered[unit] += size
                head += size if not unit and operation.output_bytes else 0
        root, block = gathered.pop(""), max(gathered.values(), default=0)
        del insides[""]
        working = max(insides.values(), default=0) if self.workload.recompute else 0
        backward = max(root + head + 4 * block + working, 2 * root + 2 * block)
        loss = root + logits * (self.workload.activation_bytes + 12)
        state = 0
        for operation, choices, at in zip(self.operations, self.choices, assignment, strict=True):
            state += self._bytes(replace(operation, width_out=0), choices[at])
        # State is a weight, its gradient, AdamW's two moments and the master weight. A step of all tensors at once
        # makes a temporary as large as a moment.
        gradients = int(state / self.workload.state_bytes * self.workload.weight_bytes)
        step = int(
            state / self.workload.state_bytes * max(self.workload.state_bytes - 2 * self.workload.weight_bytes, 0) / 3
        )
        activations = self.problem.memory_of(assignment) - state
        return max(saved + max(backward, loss) - gradients, max(backward, step) - activations)

    def _is_inside(self, index: int) -> bool:
        """Return True for a stream within a recomputed unit: the unit saves its input alone."""
        operation, unit = self.operations[index], self._unit_of[index]
        is_stream = operation.strategies is STREAM and operation.residual >= 0
        return self.workload.recompute and is_stream and bool(unit) and self._unit_of[operation.residual] != unit

    def _kept_bytes(self, index: int, strategies: StrategyPerAxis) -> int:
        """Return the bytes of an operation that last from forward to backward; logits do not outlast the loss."""
        operation = self.operations[index]
        lasting = not (operation.output_bytes or self._is_inside(index))
        return self._bytes(operation if lasting else replace(operation, width_out=0), strategies)

    @cached_property
    def _unit_of(self) -> list[str]:
        """FQN of the unit of each operation; ``""`` is the root."""
        units = set(self.units)
        prefixes = [operation.name.split(" ")[0].split(".") for operation in self.operations]
        chains = ([".".join(parts[:at]) for at in range(len(parts), 0, -1)] for parts in prefixes)
        return [next((name for name in chain if name in units), "") for chain in chains]

    def words(self, assignment: Sequence[int]) -> tuple[tuple[str, str], ...]:
        """Describe each operation and its strategies in words."""
        words = []
        for operation, choices, at in zip(self.operations, self.choices, assignment, strict=True):
            named = zip(self.mesh.axis_names, choices[at], strict=True)
            words.append((operation.name, ", ".join(f"{axis}={strategy.name}" for axis, strategy in named)))
        return tuple(words)
