"""TP blocks of the recognisers: groups of parameters that are sharded together.

Vocabulary of this folder. A *column* linear is sharded along its outputs and needs no communication before it; a
*row* linear is sharded along its inputs, and its outputs are summed. Between them lies the *region*: every rank works
on its own slice of the channels (heads, for attention). A *unit* is a region with its columns and rows. A unit is
right if row inputs of slice ``r`` depend on column outputs of slice ``r`` and of no other slice.

Attention: separate or fused q, k and v, parameters beside them (norms of q and k, sinks), an output projection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.layout import AnyShard, InterleavedShard, ShardSpec
from shard_spec.planners.modules.block_simulator import (
    HEAD_DIM,
    NUM_HEADS,
    Heads,
    LinearView,
    Slices,
    as_linear,
    even_slices,
    first_declared,
    from_library,
    join,
    linear_children,
    places_of,
    simulate_block,
    words,
)

# In names of tables without a vocabulary.
POSITION_WORDS = ("pos", "wpe", "token_type", "segment", "relative", "bucket")


class TPBlockKind(StrEnum):
    """Kinds of units."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "head"


class Evidence(StrEnum):
    """Evidence that a unit may be sharded.

    ``LIBRARY``: a class of torch or transformers of known arrangement. ``PROBED``: its forward was run on small
    random tensors, and no slice depended on another. ``NAMED``: names and shapes only, the forward could not be run.
    ``BY_NATURE``: sharding rows of a vocabulary needs no evidence. ``USER_SPECIFIED``: the caller's `fused=`.
    """

    LIBRARY = "library"
    PROBED = "probed"
    NAMED = "named"
    BY_NATURE = "by-nature"
    USER_SPECIFIED = "user-specified"


@dataclass(frozen=True)
class Cut:
    """One parameter and its placement on the tensor-parallel axis, for example ``ShardSpec(0)``."""

    name: str
    placement: AnyShard


@dataclass(frozen=True)
class TPBlock:
    """A region with its columns and rows."""

    kind: TPBlockKind
    name: str  # FQN of the smallest module around all of it
    columns: tuple[Cut, ...]  # weights and biases of the linears before the region
    rows: tuple[Cut, ...]  # weights of the linears after the region; their outputs are summed
    inner: tuple[Cut, ...] = ()  # parameters inside, sharded with it (one entry per head or channel)
    # Inside: each rank computes its slice's share of their gradient, which the executor of the plan has to sum.
    replicated: tuple[str, ...] = ()
    row_biases: tuple[str, ...] = ()  # added once, after the sum
    num_pieces: int = 1  # equal units to distribute (heads, channels, rows of the vocabulary)
    evidence: Evidence = Evidence.LIBRARY  # reason to believe that the sharding is right

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every sharded parameter."""
        return (*self.columns, *self.inner, *self.rows)


@dataclass(frozen=True)
class Found:
    """Finding of one recogniser at one place: a unit, or the reason for replication, and remarks."""

    unit: TPBlock | None = None  # if it may be sharded
    left_whole: tuple[tuple[str, Problem], ...] = ()  # FQNs of recognised parameters that stay replicated
    notes: tuple[Problem, ...] = ()  # remarks besides refusals


@dataclass(frozen=True, eq=False)
class Region:
    """The linears around a region: columns before it, a row after it, in the module `scope`."""

    columns: tuple[LinearView, ...]
    row: LinearView
    scope: str

    @property
    def linears(self) -> tuple[LinearView, ...]:
        """Columns and row."""
        return (*self.columns, self.row)

    @property
    def fused(self) -> bool:
        """True if several projections come out of one linear."""
        raise NotImplementedError

    def block(
        self,
        kind: TPBlockKind,
        columns: tuple[Cut, ...],
        num_pieces: int,
        evidence: Evidence,
        inner: tuple[Cut, ...] = (),
        replicated: tuple[str, ...] = (),
    ) -> TPBlock:
        """Return the block that shards the region."""
        rows = (Cut(self.row.weight_name, ShardSpec(self.row.in_dim)),)
        return TPBlock(kind, self.scope, columns, rows, inner, replicated, self.row.biases, num_pieces, evidence)

    def left_whole(self, problem: Problem) -> Found:
        """Report the linears as replicated, with the reason."""
        return Found(left_whole=tuple((name, problem) for view in self.linears for name in view.parameters))


FusedOrder = Literal["sections", "heads", "groups", "pairs"]


@dataclass(frozen=True)
class Options:
    """Settings of the planner for its recognisers (see `MegatronPlanner`)."""

    tp_size: int
    kv_replicate: bool = False
    fused: FusedOrder | None = None
    probe: bool = True


@dataclass
class Context:
    """One model under analysis; `claimed` holds the ids of modules that a recogniser has handled."""

    root: nn.Module
    options: Options
    claimed: set[int] = field(default_factory=set)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Return every module by FQN; shared modules once, under their first name."""
        return dict(self.root.named_modules())

    def chain(self, name: str) -> Iterator[nn.Module]:
        """Yield the module called `name`, then the modules around it up to the root."""
        while True:
            yield self.modules[name]
            if not name:
                return
            name = parent(name)

    def claim(self, *views: LinearView) -> None:
        """Mark linears as handled."""
        self.claimed.update(id(view.module) for view in views)

    def free(self, views: dict[str, LinearView]) -> dict[str, LinearView]:
        """Filter the linears that no recogniser has handled."""
        return {name: view for name, view in views.items() if id(view.module) not in self.claimed}


def parent(name: str) -> str:
    """Return the FQN of the module around `name`."""
    return name.rpartition(".")[0]


def leaf(name: str) -> str:
    """Return the last component of an FQN."""
    return name.rpartition(".")[2]


Placed: TypeAlias = Callable[[int], AnyShard]  # the placement of one dim

# Usual names of submodules, in lower case. A name alone decides nothing: shapes have to match, and blocks outside of
# known libraries are probed (see `block_simulator`). Names only restrict the search.
QUERY = words("q_proj query q wq w_q q_lin q_linear to_q query_proj linear_q")
KEY = words("k_proj key k wk w_k k_lin k_linear to_k key_proj linear_k")
VALUE = words("v_proj value v wv w_v v_lin v_linear to_v value_proj linear_v")
FUSED_QKV = words("c_attn qkv qkv_proj query_key_value wqkv w_qkv in_proj to_qkv c_qkv attn_qkv qkv_linear")
ATTENTION_OUT = words(
    "o_proj out_proj o wo w_o dense out_lin out_linear to_out proj c_proj proj_out out linear_out "
    "attn_out output projection output_proj"
)
# The module after attention in BERT and its descendants, with the Linear `dense` in it.
OUTPUT_BLOCK = words("output out attention_output")

_NORM_OF_A_PROJECTION = re.compile(r"(^|[._])(q|k|query|key)(_?(a_)?(layer_?norm|norm|ln))|norm_(q|k)\b")

_ONE_PER_HEAD = ("sinks",)  # of library classes
# Library classes with the norm after their output projection beside q, k and v.
_AFTER_THE_OUTPUT = {"AlbertAttention": ("LayerNorm.weight", "LayerNorm.bias")}


@dataclass(frozen=True)
class Inner:
    """Parameters beside the linears: sharded with the region, replicated, or doubtful."""

    cuts: tuple[Cut, ...] = ()  # one entry per head; each rank holds its own entries
    replicated: tuple[str, ...] = ()  # the same for every head; gradients have to be summed over the axis
    numbers: tuple[str, ...] = ()  # scalars; replicated if a probe shows that the heads are independent
    # They may act across all heads, and forbid sharding unless a probe shows that they act before or after the heads.
    doubts: tuple[Problem, ...] = ()


def inner_parameters(context: Context, holder: str, linears: tuple[LinearView, ...], heads: Heads) -> Inner:
    """Classify every other parameter of the module `holder`."""
    in_linears = {id(parameter) for view in linears for parameter in view.module.parameters()}
    cuts, replicated, numbers, doubts = [], [], [], []
    module = context.modules[holder]
    for name, parameter in module.named_parameters():
        if id(parameter) in in_linears:
            continue
        fqn, shape = join(holder, name), tuple(parameter.shape)
        head_dims = [dim for dim, size in enumerate(shape) if size == heads.num_heads]
        others = [size for dim, size in enumerate(shape) if dim not in head_dims[:1] and size != 1]
        owner = context.modules[join(holder, name.rpartition(".")[0])]
        if parameter.numel() == 1 and heads.num_heads > 1:  # its gradient sums over all heads
            numbers.append(fqn)
        elif isinstance(owner, nn.Linear):
            doubts.append(doubt(fqn, shape))  # a projection that is none of q, k, v and output
        elif heads.num_heads == heads.head_dim and shape == (heads.head_dim,):  # per head, or for all heads?
            if _NORM_OF_A_PROJECTION.search(name):
                replicated.append(fqn)
            elif name in _ONE_PER_HEAD and from_library(module):
                cuts.append(Cut(fqn, ShardSpec(0)))
            else:
                doubts.append(doubt(fqn, shape))
        elif isinstance(owner, nn.Embedding) and shape[-1] == heads.num_heads:
            cuts.append(Cut(fqn, ShardSpec(1)))  # a bias per bucket and head
        elif head_dims and (not others or (others == [heads.head_dim] and len(shape) > 1)):
            cuts.append(Cut(fqn, ShardSpec(head_dims[0])))  # a number, or a vector, per head
        elif shape == (heads.num_kv_heads, heads.head_dim):
            cuts.append(Cut(fqn, ShardSpec(0)))  # a vector per key-value head
        elif from_library(module) and name in _AFTER_THE_OUTPUT.get(type(module).__name__, ()):
            continue
        elif others == [heads.head_dim] and len(shape) == 1:
            replicated.append(fqn)  # one vector for all heads
        # A norm vector before q, k and v is no matter: its size is not that of all heads.
        elif (
            len(shape) != 1
            or shape[0] in (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim)
            or _NORM_OF_A_PROJECTION.search(name) is not None
            or "norm" not in name.lower()
        ):
            doubts.append(doubt(fqn, shape))
    return Inner(tuple(cuts), tuple(replicated), tuple(numbers), tuple(doubts))


def doubt(fqn: str, shape: tuple[int, ...]) -> Problem:
    """Report a parameter that keeps its attention replicated."""
    return Problem(
        "partial-gradient",
        fqn,
        found=f"a parameter of shape {shape} beside q, k and v that may act across heads",
        hint="if every head can be computed apart, write the rules of this attention by hand",
    )


# Output order of the fused projections of library classes: all of q, then k, then v ("sections"), q, k and v
# of each head together ("heads"), or a group of query heads with its k and v together ("groups").
_LIBRARY_ORDER: dict[str, FusedOrder] = {
    **dict.fromkeys(("GPT2Attention", "DecisionTransformerGPT2Attention", "ImageGPTAttention"), "sections"),
    **dict.fromkeys(("MptAttention", "Phi3Attention", "DbrxAttention", "OpenAIGPTAttention"), "sections"),
    **dict.fromkeys(("ModernBertAttention",), "sections"),
    **dict.fromkeys(("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"), "heads"),
}


@dataclass(frozen=True, eq=False)
class Projections(Region):
    """The linears of one attention: columns ``(q, k, v)`` or ``(fused,)``, and the output projection."""

    holder: str  # FQN of the module that holds the columns

    @property
    def fused(self) -> bool:
        """True if q, k and v come out of one linear."""
        return len(self.columns) == 1


def find_attention(context: Context, name: str) -> Found | None:
    """Plan attention with q, k and v as direct children of module `name`."""
    by_name = {k.lower(): view for k, view in context.free(linear_children(name, context.modules[name])).items()}
    named = [[v for child, v in by_name.items() if child in usual] for usual in (QUERY, KEY, VALUE, FUSED_QKV)]
    *separate, fused = (views[0] if len(views) == 1 else None for views in named)  # an ambiguous name is no evidence
    inputs = tuple(view for view in separate if view is not None) or (() if fused is None else (fused,))
    if len(inputs) != (1 if not any(separate) else 3):
        return None
    projections = _with_output(context, name, inputs, by_name)
    if projections is None:
        return None
    context.claim(*projections.linears)  # even if refused below: others must not take them
    heads = _heads(context, projections)
    if isinstance(heads, Problem):
        return projections.left_whole(heads)
    inner = inner_parameters(context, projections.holder, projections.linears, heads)
    return (_fused if projections.fused else _separate)(context, projections, heads, inner)


def not_lent(context: Context, found: list[Found]) -> list[Found]:
    """Leave attention replicated if other layers of its class read its keys and values.

    Such a layer has a query and an output projection only; a sharded lender would pass it one rank's heads.
    """
    # By class: the lender of a borrowing layer is known at run time only, so all of the class stay replicated.
    borrowers = {}
    for name, each in context.modules.items():
        linears = {child.lower() for child in linear_children(name, each)}
        if linears & QUERY and linears & ATTENTION_OUT and not linears & (KEY | VALUE | FUSED_QKV):
            borrowers[type(each)] = name
    blocks = []
    for candidate in found:
        borrower = None if candidate.unit is None else borrowers.get(type(context.modules[candidate.unit.name]))
        if candidate.unit is None or borrower is None or candidate.unit.kind is not TPBlockKind.ATTENTION:
            blocks.append(candidate)
            continue
        problem = Problem(
            "heads-not-recognised",
            candidate.unit.name,
            found=f"layers such as {borrower} have no keys and values of their own and read those of others",
            hint="shard the heads of all of these layers by hand, or of none",
        )
        blocks.append(Found(left_whole=tuple((cut.name, problem) for cut in candidate.unit.cuts)))
    return blocks


def _with_output(
    context: Context, name: str, inputs: tuple[LinearView, ...], by_name: dict[str, LinearView]
) -> Projections | None:
    """Find the output projection: beside the inputs, in a ``to_out`` sequence, or in a sibling ``output``."""
    at_least, at_most = inputs[-1].out_features if len(inputs) > 1 else 0, inputs[0].out_features
    for child, view in by_name.items():
        if child in ATTENTION_OUT and view not in inputs and view.in_features <= at_most:
            return Projections(inputs, view, name, name)
    for child_name, block in context.modules[name].named_children():  # diffusers: to_out = [Linear, Dropout]
        listed = isinstance(block, nn.Sequential | nn.ModuleList) and len(block) > 0
        if listed and child_name.lower() in ATTENTION_OUT:
            first = as_linear(join(name, child_name, "0"), next(block.children()))
            if first is not None:
                return Projections(inputs, first, name, name)
    if not name:
        return None
    # BERT: attention.self and attention.output
    for sibling_name, sibling in context.modules[parent(name)].named_children():
        if sibling_name.lower() in OUTPUT_BLOCK and sibling is not context.modules[name]:
            dense = linear_children(join(parent(name), sibling_name), sibling).get("dense")
            if dense is not None and at_least <= dense.in_features <= at_most:
                return Projections(inputs, dense, parent(name), name)
    return None


# ---- heads ----


def _heads(context: Context, projections: Projections) -> Heads | Problem:
    """Return the heads if they match the shapes and divide over the ranks."""
    # The attention module, then its ancestors, innermost first, each with its config.
    where, places = projections.scope, places_of(context.chain(projections.holder))
    num_heads = first_declared(places, NUM_HEADS) or first_declared(places[:1], ("h",))
    declared_dim = first_declared(places[:2], HEAD_DIM)
    if num_heads is None:
        hint = f"give the module one of the attributes {', '.join(NUM_HEADS[:4])}"
        return Problem("missing-argument", where, found="no attribute or config gives the number of heads", hint=hint)
    # The output projection reads num_heads * head_dim channels; its width is the one reliable size.
    width, wrong = projections.row.in_features, ""
    head_dim, *outputs = width // num_heads, *(view.out_features for view in projections.columns)
    # Fused outputs are q + k + v, with k and v of one width.
    kv_width = (outputs[0] - width) // 2 if projections.fused else outputs[1]
    if width % num_heads:
        wrong = f"the output projection reads {width} channels"
    elif projections.fused and (outputs[0] - width) % 2:
        wrong = f"the fused projection has {outputs[0]} outputs"
    elif not projections.fused and (outputs[0] != width or outputs[2] != kv_width):
        sizes = ", ".join(map(str, outputs))
        wrong = f"q, k, v have {sizes} outputs, the output projection reads {width} channels"
    # k and v need full heads, shared by equally many query heads
    elif kv_width <= 0 or kv_width % head_dim or num_heads % (kv_width // head_dim):
        wrong = f"k and v have {kv_width} channels each, a head has {head_dim}"
    elif declared_dim is not None and declared_dim != head_dim:
        wrong = f"a head has {head_dim} channels, {declared_dim} are declared"
    if wrong:
        hint = "not a known form of multi-head attention; write its rules by hand"
        return Problem("heads-not-recognised", where, found=f"{num_heads} heads are declared, but {wrong}", hint=hint)
    heads, tp_size = Heads(num_heads, kv_width // head_dim, head_dim), context.options.tp_size
    divisors = [n for n in range(1, heads.num_kv_heads + 1) if num_heads % n == 0 and heads.num_kv_heads % n == 0]
    hint = f"valid tp sizes: {', '.join(map(str, divisors))}"
    if num_heads % tp_size:
        return Problem("does-not-divide", where, found=f"num_heads={num_heads} with tp={tp_size}", hint=hint)
    if heads.num_kv_heads % tp_size and (projections.fused or not context.options.kv_replicate):
        hint += "; a fused projection cannot replicate k and v" if projections.fused else ", or kv_replicate=True"
        return Problem(
            "does-not-divide", where, found=f"num_key_value_heads={heads.num_kv_heads} with tp={tp_size}", hint=hint
        )
    return heads


# ---- deciding ----


def _separate(context: Context, projections: Projections, heads: Heads, inner: Inner) -> Found:
    q, k, v = projections.columns
    share_kv = heads.num_kv_heads % context.options.tp_size == 0
    columns = (q, k, v) if share_kv else (q,)  # fewer key-value heads than ranks: k and v stay replicated
    slices = {view: even_slices(view.out_features, context.options.tp_size) for view in columns}
    if not share_kv:
        slices.update(
            {view: [torch.arange(view.out_features, device="cpu")] * context.options.tp_size for view in (k, v)}
        )
    evidence = _evidence(context, projections, slices, inner, heads, None)
    if isinstance(evidence, Problem):
        return projections.left_whole(evidence)
    notes = unverified(projections.scope, evidence)
    if not share_kv:
        text = f"num_key_value_heads={heads.num_kv_heads} with tp={context.options.tp_size}: k and v stay replicated"
        notes = (
            *notes,
            Problem(
                "kv-replicated",
                projections.scope,
                found=f"{text} on every rank",
                hint=(
                    "each rank has to pick the key-value heads of its query heads, and to sum "
                    "their gradients over the axis"
                ),
            ),
        )
    cuts = tuple(cut for view in columns for cut in column_cuts(view, ShardSpec))
    replicated = () if share_kv else tuple(name for view in (k, v) for name in view.parameters)
    replicated += (*inner.replicated, *inner.numbers)
    pieces = heads.num_kv_heads if share_kv else heads.num_heads
    unit = projections.block(TPBlockKind.ATTENTION, cuts, pieces, evidence, inner.cuts, replicated)
    return Found(unit, notes=notes)


def _fused(context: Context, projections: Projections, heads: Heads, inner: Inner) -> Found:
    (fused,) = projections.columns
    # The order of the outputs: of the class, as the caller says, or a candidate for the probe.
    holder, why = context.modules[projections.holder], None
    order, class_name = _LIBRARY_ORDER.get(type(holder).__name__), type(holder).__name__
    if class_name in ("FalconAttention", "GPTBigCodeAttention"):  # by configuration
        order = "sections" if getattr(holder, "multi_query", True) else "heads"
    if class_name == "FalconAttention" and getattr(holder, "new_decoder_architecture", False):
        order = "groups"
    # "groups" equals "heads" where every head has its own k and v.
    orders: list[FusedOrder] = ["sections", "heads" if heads.num_kv_heads == heads.num_heads else "groups"]
    if order is not None and from_library(holder):
        orders, why = [order], Evidence.LIBRARY
    elif context.options.fused is not None:
        orders, why = [context.options.fused], Evidence.USER_SPECIFIED
    has_one_order, tp_size = len(orders) == 1, context.options.tp_size
    q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    refused: Problem | None = None
    for order in orders:
        # The output channels of each rank. Heads or groups are contiguous: plain chunks of them.
        rows = even_slices(q + 2 * kv, tp_size)
        placed: Placed = ShardSpec
        if order == "sections":
            parts = [[at + own for own in even_slices(n, tp_size)] for at, n in ((0, q), (q, kv), (q + kv, kv))]
            rows = [torch.cat(own) for own in zip(*parts, strict=True)]
            placed = partial(InterleavedShard, sections=(q, kv, kv))
        slices = {fused: rows}
        evidence = _evidence(context, projections, slices, inner, heads, why if has_one_order else None)
        if isinstance(evidence, Problem):
            refused = evidence
            continue
        cuts = column_cuts(fused, placed)
        same = (*inner.replicated, *inner.numbers)
        unit = projections.block(TPBlockKind.ATTENTION, cuts, heads.num_kv_heads, evidence, inner.cuts, same)
        return Found(unit, notes=unverified(projections.scope, evidence))
    assert refused is not None
    if has_one_order or refused.code == "slices-mix":
        return projections.left_whole(refused)
    return projections.left_whole(
        Problem(
            "heads-not-recognised",
            projections.scope,
            found=f"q, k and v come out of {leaf(fused.name)!r} together, in an unknown order; {refused.found}",
            hint='pass fused="sections" (all of q, then k, then v) or fused="heads" (q, k, v of each head together)',
        )
    )


def _evidence(
    context: Context,
    found: Projections,
    slices: dict[LinearView, Slices],
    inner: Inner,
    heads: Heads,
    known: Evidence | None,
) -> Evidence | Problem:
    is_known = not found.fused and from_library(context.modules[found.holder])
    doubts = (*inner.doubts, *(doubt(name, (1,)) for name in inner.numbers))
    within = f"{found.scope}." if found.scope else ""
    inside = {problem.name.removeprefix(within): problem for problem in inner.doubts if problem.name.startswith(within)}
    evidence = Evidence.LIBRARY if is_known else known
    return evidence_of(context, found, slices, evidence, doubts, heads.head_dim, inside)


def evidence_of(
    context: Context,
    region: Region,
    slices: dict[LinearView, Slices],
    known: Evidence | None,
    doubts: Sequence[Problem],
    head_dim: int | None = None,
    inside: Mapping[str, Problem] = MappingProxyType({}),
) -> Evidence | Problem:
    """Return the evidence for sharding, from knowledge, probing or names, or the problem.

    ``slices`` has each column linear and, for each rank, the indices of its output channels. A library's arrangement,
    if ``known``, needs no probe. ``doubts`` forbid sharding where the forward was not probed; a probe does not clear
    those ``inside``, by name within the scope, that act between columns and row.
    """
    scope, row = region.scope, region.row
    reason = "it was not probed"
    if known is not Evidence.LIBRARY and context.options.probe:
        row_slices = even_slices(row.in_features, context.options.tp_size)
        verdict = simulate_block(context.modules[scope], slices, row, row_slices, head_dim, inside)
        if verdict.separate:  # norms before the columns or after the row are outside the region: not between
            return next((problem for name, problem in inside.items() if name in verdict.between), Evidence.PROBED)
        if verdict.separate is False:  # None: the forward could not be run, so fall through to the names
            return Problem(
                "slices-mix",
                scope,
                found=f"its forward was probed: {verdict.reason}",
                hint="an operation inside acts across the slices of ranks; leave it replicated",
            )
        reason = verdict.reason
    if doubts:
        return doubts[0]
    if known is None and region.fused:  # order unknown and not probed
        return Problem("heads-not-recognised", scope, found=reason)
    return Evidence.NAMED if known is None else known


def unverified(scope: str, evidence: Evidence) -> tuple[Problem, ...]:
    """Return the remark on a unit recognised by names and shapes alone."""
    return (
        (
            Problem(
                "unverified",
                scope,
                found="recognised by names and shapes; its forward could not be run on its own",
                hint="compare one step with the unsharded module before you trust it",
            ),
        )
        if evidence is Evidence.NAMED
        else ()
    )


def column_cuts(view: LinearView, placed: Placed) -> tuple[Cut, ...]:
    """Return the cuts of a column linear, whose output dimension is ``placed``; its bias has that dimension only."""
    return Cut(view.weight_name, placed(view.out_dim)), *(Cut(name, placed(0)) for name in view.biases)
