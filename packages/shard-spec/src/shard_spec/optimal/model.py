"""Pairwise model of one training step: operations, their strategies along each axis, and costs.

Operations are read from a model's structure: a residual stream with blocks beside it.

An activation of ``[batch, sequence, channels]`` is, along each axis of the mesh, in one *state*:

- ``b``: sharded along the batch; ``s``: along the sequence; ``h``: along channels (heads, hidden units, vocabulary);
- ``r``: replicated;
- ``p``: partial sums, not yet reduced.

An operation takes one *strategy* along each axis: the states of its input and output, and the storage of its weight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.communication import AlphaBetaCostModel, Link, Topology
from shard_spec.layout import MeshSpec
from shard_spec.optimal.problem import Eliminator, PairwiseProblem, quantised
from shard_spec.planners.base import merge_notes
from shard_spec.planners.megatron.blocks import Context, Cut, Options, TPBlock, TPBlockKind
from shard_spec.planners.megatron.planner import Analysis, analyse
from shard_spec.planners.modules.block_simulator import first_declared, places_of

CUT = "bsh"


@dataclass(frozen=True)
class Strategy:
    """Strategy of one operation along one axis."""

    name: str  # in `OptimalityBound.choices`
    reads: str  # state of its input
    writes: str  # state of its output
    weight: str = "-"  # none or replicated; "fsdp": rows sharded and gathered for use; "column" or "row"
    reads_grad: str = ""  # state of the input's gradient after backward (``p`` for a column); empty: as `reads`
    writes_grad: str = ""  # required state of the output's gradient (``r`` for a row); empty: as `writes`


_BATCH, _SEQUENCE, _WHOLE = Strategy("batch", "b", "b"), Strategy("sequence", "s", "s"), Strategy("whole", "r", "r")
_STORED = Strategy("batch+fsdp", "b", "b", "fsdp")
_TOKENS = (_BATCH, _STORED, _SEQUENCE, Strategy("sequence+fsdp", "s", "s", "fsdp"))

STREAM = (_BATCH, _SEQUENCE, _WHOLE)
COLUMN = (*_TOKENS, Strategy("column", "r", "h", "column", reads_grad="p"), _WHOLE)
ATTENTION = (_BATCH, Strategy("heads", "h", "h"), _WHOLE)
ROW = (*_TOKENS, Strategy("row", "h", "p", "row", writes_grad="r"), _WHOLE)
TABLE = (*_TOKENS, Strategy("vocabulary", "r", "p", "row", writes_grad="r"), _WHOLE)
APART = (_BATCH, _STORED, Strategy("fsdp", "r", "r", "fsdp"), _WHOLE)


def cuts(states: Sequence[str], sizes: Sequence[int]) -> int:
    """Return the number of shards of an activation with `states`."""
    return math.prod(size for state, size in zip(states, sizes, strict=True) if state in CUT)


def moving(
    before: Sequence[str], after: Sequence[str], num_bytes: float, links: Sequence[Link], model: AlphaBetaCostModel
) -> float:
    """Return the seconds to redistribute an activation of `num_bytes` (full size), axis after axis."""
    sizes = [link.size for link in links]
    seconds = 0.0
    now = list(before)
    for axis, (old, new, link) in enumerate(zip(before, after, links, strict=True)):
        size = num_bytes / cuts(now[:axis] + now[axis + 1 :], sizes[:axis] + sizes[axis + 1 :])  # over the full group
        if old == new or (old == "r" and new in CUT):
            pass  # no change, or a local slice
        elif old == "p":
            seconds += model.all_reduce(size, link) if new == "r" else model.reduce_scatter(size, link)
        elif new == "r":
            seconds += model.all_gather(size, link)
        else:
            assert old in CUT, (old, new)
            assert new in CUT, (old, new)
            seconds += model.all_to_all(size / link.size, link)
        now[axis] = new  # later axes see the new state
    return seconds


_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_top_k")


@dataclass(frozen=True)
class Operation:
    """One node of the model, with strategies along each axis."""

    name: str  # in reports
    strategies: tuple[Strategy, ...]  # available along one axis
    cuts: tuple[Cut, ...] = ()  # its parameters, placed as under a column or row strategy (bias sharded too)
    parameters: tuple[tuple[str, int], ...] = ()  # FQN and number of elements; empty if it has none or shares them
    matmul_elements: int = 0  # weight elements in the product of each token
    width_out: int = 0  # channels
    degrees: frozenset[int] = frozenset()  # allowed numbers of channel shards
    scores: bool = False  # True for attention scores: operations per token then grow with the sequence
    output_bytes: int | None = None  # of one output value, if not the workload's (logits are float32)
    source: int = -1  # index of its input's operation; -1 for none
    residual: int = -1  # index of the stream operation of its residual input; -1 for none
    tied_to: int = -1  # index of the operation with the shared weight; -1 for none

    @property
    def kept(self) -> bool:
        """True if its output is saved for backward even if blocks recompute: the stream, and logits."""
        return self.strategies is STREAM or self.output_bytes is not None

    @property
    def num_elements(self) -> int:
        """Number of elements of all its parameters."""
        return sum(count for _, count in self.parameters)


@dataclass(frozen=True)
class Structure:
    """Structure of a model: its operations, remarks of the recognisers, and unrecognised weights."""

    operations: tuple[Operation, ...]
    notes: tuple[Problem, ...] = ()
    unrecognised: Mapping[str, Problem] = field(default_factory=dict)


def structure_of(module: nn.Module, degrees: Sequence[int]) -> Structure:
    """Return the operations of `module` in module order, each after its input.

    Blocks are the units of `MegatronPlanner`, in sequence along the residual stream. Other matmul weights stand apart:
    they can be stored replicated or by rows, and the activations around them are not modelled. ``degrees`` are numbers
    of channel shards (products of axis sizes), of which a block uses the valid ones.
    """
    analyses = {degree: analyse(module, Options(tp_size=degree)) for degree in sorted(set(degrees)) if degree > 1}
    base = analyses[min(analyses)] if analyses else analyse(module, Options(tp_size=1))
    allowed: dict[str, set[int]] = {}
    for degree, analysis in analyses.items():
        for unit in analysis.units:
            if unit.num_pieces % degree == 0 or unit.kind in (TPBlockKind.EMBEDDING, TPBlockKind.HEAD):
                allowed.setdefault(unit.name, set()).add(degree)
    builder = _Builder(module, {name: frozenset(strategies) for name, strategies in allowed.items()})
    return Structure(builder.build(base), merge_notes((*base.left_whole.values(), *base.notes)), base.unrecognised)


class _Builder:
    def __init__(self, module: nn.Module, degrees: dict[str, frozenset[int]]) -> None:
        self.module, self.degrees = module, degrees
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.first_name: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            self.first_name.setdefault(id(parameter), name)
        self.order = {name: at for at, name in enumerate(self.parameters)}
        self.operations: list[Operation] = []
        self.owner: dict[str, int] = {}  # first FQN of a parameter to its operation

    def build(self, analysis: Analysis) -> tuple[Operation, ...]:
        units = sorted(analysis.units, key=lambda unit: min(self.order[cut.name] for cut in unit.cuts))
        blocks = [unit for unit in units if unit.kind not in (TPBlockKind.EMBEDDING, TPBlockKind.HEAD)]
        if not blocks:
            raise PlanError(
                Problem(
                    "nothing-to-optimize",
                    found="no attention or feed-forward block was recognised",
                    hint="OptimalPlanner models transformers; use FullyShardPlanner or write rules by hand",
                )
            )
        width = self._stream_width(blocks[0])
        stream = -1  # none yet
        for unit in units:
            # A tied table under another name is the same one.
            if (
                unit.kind is TPBlockKind.EMBEDDING
                and self.first_name[id(self.parameters[unit.rows[0].name])] not in self.owner
            ):
                table = self._add(
                    unit.name, TABLE, unit.rows, width_out=width, degrees=self.degrees.get(unit.name, frozenset())
                )
                stream = self._stream(f"{unit.name} -> stream", table, -1, width)
        stream = stream if stream >= 0 else self._stream("input -> stream", -1, -1, width)
        for unit in blocks:
            stream = self._block(unit, stream)
        for unit in units:
            if unit.kind is TPBlockKind.HEAD:
                matmul = max(count for _, count in self._elements(unit.columns))  # the weight, not the bias
                width = self.operations[stream].width_out
                sizes: dict[str, Any] = {"matmul_elements": matmul, "width_out": matmul // width}
                sizes["degrees"] = self.degrees.get(unit.name, frozenset())
                # Logits are float32.
                self._add(unit.name, COLUMN, unit.columns, output_bytes=4, source=stream, **sizes)
        for name in (*analysis.unrecognised, *(set(analysis.left_whole) & set(analysis.matmul_bytes))):
            count = self.parameters[name].numel()
            self._add(name, APART, parameters=((name, count),), matmul_elements=count)
        return tuple(self.operations)

    def _add(self, name: str, strategies: tuple[Strategy, ...], cuts: Sequence[Cut] = (), **fields: Any) -> int:
        """Add an operation; parameters that another one owns already are shared with it."""
        index = len(self.operations)
        operands, tied_to = [], -1
        for parameter, count in fields.pop("parameters", self._elements(cuts)):
            first = self.first_name[id(self.parameters[parameter])]  # tied names share one tensor
            if first in self.owner:
                tied_to = self.owner[first]
            else:
                self.owner[first] = index
                operands.append((first, count))
        operation = Operation(name, strategies, tuple(cuts), tuple(operands), tied_to=tied_to, **fields)
        self.operations.append(operation)
        return index

    def _stream(self, name: str, source: int, residual: int, width: int) -> int:
        return self._add(name, STREAM, width_out=width, source=source, residual=residual)

    def _block(self, unit: TPBlock, stream: int) -> int:
        width, share = self._stream_width(unit), 1.0
        if unit.kind is TPBlockKind.EXPERTS:  # only the active ones of all experts work for a token
            num_experts = self.parameters[unit.rows[0].name].shape[0]
            around = Context(self.module, Options(tp_size=1)).chain(unit.name)
            share = min(first_declared(places_of(around), _ACTIVE_EXPERTS) or num_experts, num_experts) / num_experts
        column_weights = self._elements(cut for cut in unit.columns if self.parameters[cut.name].dim() > 1)
        full = [(name, self.parameters[name].numel()) for name in unit.replicated if self.parameters[name].dim() > 1]
        matmul = int((sum(count for _, count in (*column_weights, *full))) * share)
        row_matmul = int(sum(count for _, count in self._elements(unit.rows)) * share)
        hidden_out, hidden_in = matmul // max(width, 1), row_matmul // max(width, 1)
        degrees = self.degrees.get(unit.name, frozenset())
        sizes: dict[str, Any] = {"matmul_elements": matmul, "width_out": hidden_out, "degrees": degrees}
        inside = self._add(f"{unit.name} in", COLUMN, (*unit.columns, *unit.inner), source=stream, **sizes)
        if unit.kind is TPBlockKind.ATTENTION:
            sizes = {"width_out": hidden_in, "degrees": degrees}
            inside = self._add(f"{unit.name} scores", ATTENTION, scores=True, source=inside, **sizes)
        sizes = {"matmul_elements": row_matmul, "width_out": width, "degrees": degrees}
        row = self._add(f"{unit.name} out", ROW, unit.rows, source=inside, **sizes)
        return self._stream(f"{unit.name} -> stream", row, stream, width)

    def _elements(self, cuts: Iterable[Cut]) -> tuple[tuple[str, int], ...]:
        return tuple((cut.name, self.parameters[cut.name].numel()) for cut in cuts)

    def _stream_width(self, unit: TPBlock) -> int:
        """Return the channels of the residual stream, the output width of a row."""
        (row,) = unit.rows
        shape = self.parameters[row.name].shape
        experts = shape[0] if len(shape) == 3 else 1  # stacked experts: not channels
        return math.prod(shape) // shape[row.placement.dim] // experts


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
        for name in ("batch", "sequence", "activation_bytes", "weight_bytes", "state_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"Workload({name}={getattr(self, name)}): at least 1.")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"Workload(overlap={self.overlap}): a share between 0 and 1.")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence


StrategyPerAxis = tuple[Strategy, ...]  # one per axis

# Role of an axis (see `shard_spec.layout.mesh`) -> names of the strategies along it.
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
        allowed = functools.cache(self._allowed)  # equal layers share one tuple
        return tuple(allowed(each.strategies, each.degrees, bool(each.parameters)) for each in self.operations)

    @cached_property
    def problem(self) -> PairwiseProblem:
        """The pairwise problem: nodes are operations, edges their inputs."""
        problem = PairwiseProblem()
        nodes: dict[object, int] = {}  # the first of equal layers
        edges: dict[object, Tensor] = {}
        key: object
        for index, (operation, choices) in enumerate(zip(self.operations, self.choices, strict=True)):
            sizes = operation.num_elements, operation.matmul_elements, operation.width_out, operation.output_bytes
            owns = bool(operation.parameters)
            key = sizes, operation.scores, operation.kept, owns, id(choices), self._is_inside(index)
            if key in nodes:
                problem.add_node_like(nodes[key])
                continue
            # Bytes that last from forward to backward: logits do not outlast the loss.
            lasting = not (operation.output_bytes or self._is_inside(index))
            held = operation if lasting else replace(operation, width_out=0)
            nodes[key] = problem.add_node(
                [self._seconds(operation, strategies) for strategies in choices],
                [self._bytes(held, strategies) for strategies in choices],
            )
        for index, operation in enumerate(self.operations):
            for source in {operation.source, operation.residual} - {-1}:
                width = self.operations[source].width_out
                again = self.workload.recompute and not operation.kept  # recomputed blocks move their inputs again
                key = id(self.choices[source]), id(self.choices[index]), width, again
                if key not in edges:
                    moved = self._moving_table(self.choices[source], self.choices[index], width, 2 if again else 1)
                    edges[key] = quantised(moved)
                problem.add_rounded_edge(source, index, edges[key])
            if operation.tied_to >= 0:
                # 0 if both store the shared weight alike (always by rows of the vocabulary), infinity otherwise.
                stored = [
                    [tuple(strategy.weight != "-" for strategy in strategies) for strategies in self.choices[each]]
                    for each in (operation.tied_to, index)
                ]
                table = [[0.0 if first == other else math.inf for other in stored[1]] for first in stored[0]]
                problem.add_edge(operation.tied_to, index, table)
        return problem

    @cached_property
    def solver(self) -> Eliminator:
        """The problem with its elimination order, and the solutions that every limit shares."""
        return Eliminator(self.problem)

    # ---- allowed strategies ----

    def _allowed(
        self, available: tuple[Strategy, ...], degrees: frozenset[int], has_parameters: bool
    ) -> tuple[StrategyPerAxis, ...]:
        """Return the combinations of an operation's strategies with dividing batch, sequence and channels."""
        allowed = []
        by_axis = [available] * self.mesh.ndim
        if self.roles is not None:
            by_axis = [tuple(s for s in available if s.name in ROLE_STRATEGIES[role]) for role in self.roles]
        for strategies in itertools.product(*by_axis):
            pieces = dict.fromkeys("bsh", 1)  # shards along batch, sequence, channels
            for strategy, size in zip(strategies, self.mesh.shape, strict=True):
                state = "h" if strategy.weight in ("column", "row") or strategy.reads == "h" else strategy.reads
                if state in pieces:
                    pieces[state] *= size
            if self.workload.batch % pieces["b"] or self.workload.sequence % pieces["s"]:
                continue
            if pieces["h"] > 1 and pieces["h"] not in degrees:  # e.g. heads
                continue
            allowed.append(strategies)
        # Ranks that do the same work with the same weight are a last resort, if nothing divides.
        sizes = self.mesh.shape
        alike = (
            any(each.name == "whole" and n > 1 for each, n in zip(strategies, sizes, strict=True))
            for strategies in allowed
        )
        divided = [strategies for strategies, same in zip(allowed, alike, strict=True) if not same]
        return tuple((divided if has_parameters else allowed) or allowed)

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
            size
            for each, size in zip(strategies, self.mesh.shape, strict=True)
            if each.reads in CUT or each.writes in CUT or each.weight in ("column", "row")  # a rank does its share
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
            elif strategy.reads in "bs":  # ranks use one weight for different tokens: its gradient is summed
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

        outputs = [(tuple(s.writes for s in each), tuple(s.writes_grad or s.writes for s in each)) for each in sources]
        inputs = [(tuple(s.reads for s in each), tuple(s.reads_grad or s.reads for s in each)) for each in readers]
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
