"""Operations of a model, read from its structure: a residual stream with blocks beside it.

Layouts of activations along one mesh axis, inputs and outputs of operations, and the cost of redistribution.

An activation of ``[batch, sequence, channels]`` is, along each axis of the mesh, in one *state*:

- ``b``: sharded along the batch; ``s``: along the sequence; ``h``: along channels (heads, hidden units, vocabulary);
- ``r``: replicated;
- ``p``: partial sums, not yet reduced.

An operation takes one *strategy* along each axis: the states of its input and output, and the storage of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.cost import AlphaBetaCostModel, Link
from shard_spec.planners.base import merge_notes
from shard_spec.planners.megatron.blocks import Context, Cut, Options, TPBlock, TPBlockKind
from shard_spec.planners.megatron.planner import Analysis, analyse
from shard_spec.planners.modules.linear import first_declared, places_of

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

    @property
    def gradient_in(self) -> str:
        """State of the input's gradient."""
        return self.reads_grad or self.reads

    @property
    def gradient_out(self) -> str:
        """State of the output's gradient."""
        return self.writes_grad or self.writes

    @property
    def divides_work(self) -> bool:
        """True if each rank does only its share of the operations."""
        return self.reads in CUT or self.writes in CUT or self.weight in ("column", "row")

    @property
    def sums_weight_gradient(self) -> bool:
        """True if ranks use one weight for different tokens: its gradient has to be summed."""
        return self.reads in "bs"


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
                degrees = self.degrees.get(unit.name, frozenset())
                table = self._add(unit.name, TABLE, unit.rows, width_out=width, degrees=degrees)
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
