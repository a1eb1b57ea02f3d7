"""MegatronPlanner: tensor parallelism by column and row pairs.

Blocks beside plain attention: feed-forward blocks, experts, ``nn.MultiheadAttention``, embeddings and heads.

A feed-forward block has one or two linears up, an elementwise operation, and one linear down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.layout import AnyShard, BlockShard, InterleavedShard, Layout, MeshLike, ShardSpec
from shard_spec.planners.base import Decisions, LayoutPlanner, merge_notes
from shard_spec.planners.megatron.blocks import (
    OUTPUT_BLOCK,
    POSITION_WORDS,
    Context,
    Cut,
    Evidence,
    Found,
    FusedOrder,
    Options,
    Placed,
    Region,
    TPBlock,
    TPBlockKind,
    column_cuts,
    evidence_of,
    find_attention,
    leaf,
    not_lent,
    unverified,
)
from shard_spec.planners.modules.block_simulator import (
    LinearView,
    Slices,
    as_linear,
    declared_vocab_sizes,
    even_slices,
    from_library,
    join,
    linear_children,
    words,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Analysis:
    """Result of the analysis of a model by `MegatronPlanner`.

    Attributes:
        units: sharded regions, in module order.
        left_whole: FQN of each recognised parameter that stays replicated, with the reason.
        unrecognised: FQN of each matmul weight of unknown role, with the reason.
        notes: remarks.
        matmul_bytes: bytes of each matmul weight (linears, expert weights, attention projections, heads) by FQN.
    """

    units: tuple[TPBlock, ...]
    left_whole: Mapping[str, Problem]
    unrecognised: Mapping[str, Problem]
    notes: tuple[Problem, ...]
    matmul_bytes: Mapping[str, int]

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return every cut by the FQN of its parameter."""
        return {cut.name: cut for unit in self.units for cut in unit.cuts}

    @property
    def sharded_share(self) -> float:
        """Sharded share of the matmul-weight bytes; 1.0 for a model without any."""
        total = sum(self.matmul_bytes.values())
        cut = self.cuts
        return sum(size for name, size in self.matmul_bytes.items() if name in cut) / total if total else 1.0

    @property
    def rest(self) -> dict[str, str]:
        """Return the matmul weights that stay replicated, each with the reason."""
        why = {**self.left_whole, **self.unrecognised}
        return {name: str(why[name]) for name in self.matmul_bytes if name in why}


def analyse(root: nn.Module, options: Options) -> Analysis:
    """Recognise attention first, then feed-forward blocks, experts, embeddings and heads."""
    context = Context(root, options)
    candidates: list[Found] = []
    for name in context.modules:  # attention first: its output projection could pass for a feed-forward row
        candidates += [
            candidate
            for candidate in (find_multihead_attention(context, name), find_attention(context, name))
            if candidate
        ]
    candidates = not_lent(context, candidates)
    heads = find_vocabulary(context)  # before feed-forward blocks: a model's `output` is not the row of one
    for name in context.modules:
        candidates += find_mlps(context, name)
    for name in context.modules:
        experts = find_experts(context, name)
        candidates += [experts] if experts else []
    candidates += heads
    units = tuple(candidate.unit for candidate in candidates if candidate.unit is not None)
    left_whole = {name: problem for candidate in candidates for name, problem in candidate.left_whole}
    notes = [note for candidate in candidates for note in candidate.notes]
    for unit in units:
        if unit.kind is TPBlockKind.EXPERTS:
            notes.append(
                Problem(
                    "partial-activation",
                    unit.name,
                    found="each rank holds a partial output of the experts",
                    hint="all-reduce the gradients of this module's inputs, router weights too (tp-styles does)",
                )
            )
        notes += [
            Problem(
                "partial-gradient",
                name,
                found="replicated on every rank, used only for the rank's own heads",
                hint="sum its gradient over the tensor-parallel axis; DTensor and tp-styles do so by themselves",
            )
            for name in unit.replicated
        ]
    matmul: dict[str, int] = {}
    seen: set[int] = set()  # tied tensors count once
    for name, module in context.modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen and _is_matmul_weight(name, module, key, parameter):
                seen.add(id(parameter))
                matmul[join(name, key)] = parameter.numel() * parameter.element_size()
    decided = {cut.name for unit in units for cut in unit.cuts} | set(left_whole)  # left_whole has its own reason
    unknown = {
        n: Problem(
            "heads-not-recognised",
            n,
            found="belongs to no attention, feed-forward block, expert or head that this planner recognises",
            hint="it stays replicated; add a rule for it if its size matters",
        )
        for n in matmul
        if n not in decided
    }
    return Analysis(units, left_whole, unknown, tuple(notes), matmul)


def _is_matmul_weight(name: str, module: nn.Module, key: str, parameter: nn.Parameter) -> bool:
    """Return True for weights of linears, experts and routers; not for tables, convolutions or biases."""
    if isinstance(module, nn.Linear):
        return key == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return key.endswith("_weight")
    if isinstance(module, (nn.Embedding, *_CONVOLUTIONS)) or not parameter.is_floating_point():
        return False
    no_table = not any(word in join(name, key).lower() for word in (*POSITION_WORDS, "token", "conv", "bias"))
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1 and no_table  # min: [1, n] is a scale, not a matrix


class MegatronPlanner(LayoutPlanner):
    """Shard attention by heads, feed-forward blocks and experts by channels, embeddings and heads by vocabulary.

    The first linears of a block are sharded along their outputs (``S(0)``), the last along its inputs (``S(1)``), so a
    block needs one all-reduce forward and one backward (Shoeybi et al., "Megatron-LM", 2019). Attention, feed-forward
    blocks (gated ones too), grouped-query attention, fused ``qkv`` and ``gate_up``, experts in three-dimensional
    weights, ``nn.MultiheadAttention``, token embeddings and tied or untied heads are recognised by structure, names
    and head counts.

    Nothing is sharded on a guess. A block from a class outside of torch and transformers is *probed*: its forward is
    run on a few random numbers without its weights, to check that no head or channel depends on another rank's. If it
    cannot be run, clear names and matching shapes are accepted with a note (`unverified`); fused weights are not.
    Replicated weights are listed on the plan: `plan.unrecognised`, `plan.notes`.

    Args:
        mesh: the axes of the plan.
        axis: the sharding axis; other axes replicate.
        kv_replicate: with fewer key-value heads than ranks, replicate k and v and shard q (the executor of the plan
            picks each rank's key-value heads). Otherwise such an attention stays replicated, with a note.
        fused: the order of fused outputs if it cannot be inferred: ``"sections"`` (all of q, then k, then v; all of
            gate, then up), ``"heads"`` (q, k, v of each head together), ``"groups"`` (query heads with their k and v),
            ``"pairs"`` (gate and up alternate).
        vocabulary: shard embeddings and heads.
        probe: probe unknown blocks.

    Raises:
        PlanError: `axis` is not in the mesh.
    """

    def __init__(
        self,
        mesh: MeshLike,
        axis: str = "tp",
        *,
        kv_replicate: bool = False,
        fused: FusedOrder | None = None,
        vocabulary: bool = True,
        probe: bool = True,
    ) -> None:
        super().__init__(mesh)
        self.axis, self.vocabulary = axis, vocabulary
        self.options = Options(self.mesh.axis_size(axis), kv_replicate, fused, probe)

    def analyse(self, module: nn.Module) -> Analysis:
        """Return the analysis of `module`; the plan follows from it."""
        return analyse(module, self.options)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        analysis = self.analyse(module)
        skipped = () if self.vocabulary else ("embedding", "head")
        layouts = {
            cut.name: Layout(self.mesh, {self.axis: cut.placement})
            for unit in analysis.units
            if unit.kind not in skipped
            for cut in unit.cuts
        }
        # Layouts of tied tensors stand under the first of their names.
        first: dict[int, str] = {}
        by_first_name: dict[str, Layout] = {}
        problems = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if name in layouts and by_first_name.setdefault(owner, layouts[name]) != layouts[name]:
                problems.append(
                    Problem(
                        "tied-weights",
                        name,
                        found=f"{owner} -> {by_first_name[owner]}, {name} -> {layouts[name]}",
                        hint="untie them or write the rule by hand",
                    )
                )
        raise_problems(problems)
        notes = (*analysis.left_whole.values(), *analysis.notes)
        return Decisions(by_first_name, merge_notes(notes), analysis.unrecognised, axis_roles={self.axis: "model"})


UP = words(
    "fc1 c_fc up_proj w1 w3 dense_h_to_4h fc_in lin1 linear1 wi wi_0 wi_1 gate_proj gate up fc w_in ff1 "
    "linear_1 w_gate w_up fc_1 dense_in expand ffn layer_1 intermediate proj_up proj_up_gate"
)
FUSED_GATE_UP = words("gate_up_proj w12 w13 gate_up up_gate_proj wi fc1_fused dense_h_to_4h input_linear")
DOWN = words(
    "fc2 c_proj down_proj w2 w3 dense_4h_to_h fc_out lin2 linear2 wo down proj w_out ff2 linear_2 w_down "
    "fc_2 dense_out contract ffn_output layer_2 output output_linear proj_down"
)
INTERMEDIATE_BLOCK = frozenset({"intermediate"})  # BERT: `intermediate.dense`, then `output.dense`

# Modules that act on each channel alone, or not at all.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Softplus),
    *(nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout),
)


class FeedForward(Region):
    """The linears of one feed-forward block."""

    @property
    def fused(self) -> bool:
        """True if gate and up come out of one linear."""
        return len(self.columns) == 1 and self.columns[0].out_features == 2 * self.row.in_features


def find_mlps(context: Context, name: str) -> list[Found]:
    """Plan the feed-forward blocks with linears among the children of the module called `name`."""
    module = context.modules[name]
    if isinstance(module, nn.Sequential):
        known = Evidence.LIBRARY if type(module).forward is nn.Sequential.forward else None  # None: to be probed
        # Pair linears with only elementwise modules between them: first with second, third with fourth, ...
        blocks, pending = [], None
        for child_name, child in module.named_children():
            view = as_linear(join(name, child_name), child)
            if view is not None and id(child) not in context.claimed:
                if pending is not None and pending.out_features == view.in_features:
                    blocks.append(FeedForward((pending,), view, name))
                    pending = None
                else:
                    pending = view
            elif not isinstance(child, _ELEMENTWISE):
                pending = None  # any other module may mix channels
        return [_decide(context, block, known) for block in blocks]
    block = _by_children(context, name, module)
    if block is None:
        # BERT: ``intermediate.dense`` and ``output.dense`` under one layer.
        up = down = None
        for child_name, child in module.named_children():
            if child_name.lower() in INTERMEDIATE_BLOCK | OUTPUT_BLOCK:
                dense = context.free(linear_children(join(name, child_name), child)).get("dense")
                up, down = (dense, down) if child_name.lower() in INTERMEDIATE_BLOCK else (up, dense)
        if up is None or down is None or up.out_features != down.in_features:
            return []
        block = FeedForward((up,), down, name)
    return [_decide(context, block, Evidence.LIBRARY if from_library(module) else None)]


def _by_children(context: Context, name: str, module: nn.Module) -> FeedForward | None:
    by_name = {child.lower(): view for child, view in context.free(linear_children(name, module)).items()}
    for down_name, down in by_name.items():
        if down_name not in DOWN:  # w3 may be down or up
            continue
        gated = {child: v for child, v in by_name.items() if v is not down and child in FUSED_GATE_UP | UP}
        fused_shape = 2 * down.in_features, down.out_features
        fused = [view for view in gated.values() if (view.out_features, view.in_features) == fused_shape]
        plain = {child: view for child, view in gated.items() if view.out_features == down.in_features}
        # ``w1, w2, w3`` mean (gate, down, up) or (gate, up, down): only shapes distinguish them.
        ambiguous = not {"w1", "w2", "w3"}.isdisjoint((*plain, down_name)) and down.in_features == down.out_features
        if len(plain) in (1, 2) and len({view.in_features for view in plain.values()}) == 1:
            if len(plain) == 1 or not ambiguous:
                return FeedForward(tuple(plain.values()), down, name)
        elif len(fused) == 1 and not plain:
            return FeedForward((fused[0],), down, name)
    return None


# ---- deciding ----


def _decide(context: Context, block: FeedForward, known: Evidence | None) -> Found:
    context.claim(*block.linears)  # even if refused: not for other recognisers
    tp_size, width = context.options.tp_size, block.row.in_features
    if width < tp_size:  # a rank would be empty
        problem = Problem("does-not-divide", block.scope, found=f"{width} channels with tp={tp_size}")
        return block.left_whole(problem)
    doubt = _parameters_between(context, block, known)
    refused: Problem | None = doubt
    # Candidate placements, each with the channels of every rank.
    even, first = even_slices(width, tp_size), block.columns[0]
    candidates: list[tuple[Placed, dict[LinearView, Slices]]] = [(ShardSpec, dict.fromkeys(block.columns, even))]
    if block.fused:  # gate first, then up: a rank gets its slice of each; or they alternate, in pairs
        halves = [torch.cat([own, own + width]) for own in even]
        pairs = [torch.stack([2 * own, 2 * own + 1], dim=1).flatten() for own in even]
        candidates = [
            (partial(InterleavedShard, sections=(width, width)), {first: halves}),
            (partial(BlockShard, block=2), {first: pairs}),
        ]
        if known is Evidence.LIBRARY or context.options.fused is not None:
            candidates = candidates[1:] if context.options.fused == "pairs" else candidates[:1]
    for placed, slices in candidates:
        arrangement = Evidence.USER_SPECIFIED if block.fused and context.options.fused is not None else known
        doubts = [] if doubt is None else [doubt]  # a probe clears them: it runs them
        evidence = evidence_of(context, block, slices, known or arrangement, doubts)
        if isinstance(evidence, Problem):
            refused = evidence
            if evidence.code == "heads-not-recognised":
                refused = replace(
                    evidence,
                    found=f"gate and up come out of one linear, in an unknown order; {evidence.found}",
                    hint='pass fused="sections" or fused="pairs"',
                )
            continue
        notes = list(unverified(block.scope, evidence))
        if width % tp_size:
            notes.append(uneven(block.scope, width, tp_size))
        cuts = tuple(cut for view in block.columns for cut in column_cuts(view, placed))
        return Found(block.block(TPBlockKind.MLP, cuts, width, evidence), notes=tuple(notes))
    assert refused is not None
    return block.left_whole(refused)


def _parameters_between(context: Context, block: FeedForward, known: Evidence | None) -> Problem | None:
    """Report a parameter of the hidden size between the linears: a norm over all hidden channels."""
    own = {id(p) for view in block.linears for p in view.module.parameters()}
    width, outer = block.row.in_features, block.row.out_features
    for name, parameter in context.modules[block.scope].named_parameters():
        owner = context.modules.get(join(block.scope, name.rpartition(".")[0]))
        if id(parameter) in own or id(owner) in context.claimed:
            continue
        # Library classes: only a norm can be there. Other classes: any parameter with a dimension of the hidden size.
        meets = width in parameter.shape if known is None else tuple(parameter.shape) == (width,)
        if meets and width != outer:
            return Problem(
                "partial-gradient",
                join(block.scope, name),
                found=f"a parameter of shape {tuple(parameter.shape)} between the linears of a feed-forward block",
                hint="a norm over the hidden channels needs all of them; leave the block replicated",
            )
    return None


def uneven(scope: str, width: int, tp_size: int) -> Problem:
    """Return the remark on shards of unequal size."""
    return Problem(
        "uneven-shards",
        scope,
        found=f"{width} over tp={tp_size} does not divide: the first ranks hold more",
        hint="pad it, or choose a tp size that divides it",
    )


HEAD = words("lm_head embed_out head output decoder proj_out vocab_projector unembed logits")

# Library classes without an attribute `is_transposed`: True if weights are ``[experts, in, out]``.
_TRANSPOSED = {"Llama4TextExperts": True}


def find_multihead_attention(context: Context, name: str) -> Found | None:
    """Plan ``nn.MultiheadAttention``: one ``in_proj_weight`` or three, and biases of keys and values."""
    module = context.modules[name]
    if not isinstance(module, nn.MultiheadAttention) or not _forward_is_known(module, nn.MultiheadAttention):
        return None
    context.claimed.add(id(module.out_proj))  # a child of its own, but read without its forward
    own = [parameter_name for parameter_name, _ in module.named_parameters()]
    width, tp_size = module.embed_dim, context.options.tp_size
    if module.num_heads % tp_size:
        valid = ", ".join(str(n) for n in range(1, module.num_heads + 1) if module.num_heads % n == 0)
        problem = Problem(
            "does-not-divide",
            name,
            found=f"num_heads={module.num_heads} with tp={tp_size}",
            hint=f"valid tp sizes: {valid}",
        )
        return Found(left_whole=tuple((join(name, parameter), problem) for parameter in own))
    sections = InterleavedShard(
        0, (width, width, width)
    )  # q, k and v by sections: each rank gets its heads of all three
    placements: dict[str, AnyShard] = {
        **dict.fromkeys(("in_proj_weight", "in_proj_bias"), sections),
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), ShardSpec(0)),
        **dict.fromkeys(("bias_k", "bias_v"), ShardSpec(2)),  # [1, 1, embed_dim]
    }
    return Found(
        TPBlock(
            TPBlockKind.ATTENTION,
            name,
            columns=tuple(Cut(join(name, key), placements[key]) for key in own if key in placements),
            rows=(Cut(join(name, "out_proj.weight"), ShardSpec(1)),),
            row_biases=(join(name, "out_proj.bias"),) if "out_proj.bias" in own else (),
            num_pieces=module.num_heads,
        )
    )


def _forward_is_known(module: nn.Module, base: type[nn.Module]) -> bool:
    return type(module).forward is base.forward or from_library(module)


def find_experts(context: Context, name: str) -> Found | None:
    """Plan experts in three-dimensional weights ``gate_up_proj`` and ``down_proj``, with or without biases."""
    module = context.modules[name]
    weights = {key: value for key, value in module._parameters.items() if value is not None}
    gate_up, down = weights.get("gate_up_proj"), weights.get("down_proj")
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return None
    transposed = getattr(module, "is_transposed", _TRANSPOSED.get(type(module).__name__))
    is_supported = set(weights) <= {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    if not from_library(module) or not isinstance(transposed, bool) or not is_supported:
        problem = Problem(
            "heads-not-recognised",
            name,
            found="three-dimensional expert weights of unknown arrangement",
            hint="write their rules by hand: 'S(0)' along an axis shards by experts",
        )
        return Found(left_whole=tuple((join(name, key), problem) for key in weights))
    out_dim, in_dim = (2, 1) if transposed else (1, 2)
    width = down.shape[in_dim]
    if gate_up.shape[out_dim] != 2 * width or width % context.options.tp_size:
        text = f"{width} channels an expert with tp={context.options.tp_size}"
        problem = Problem("does-not-divide", name, found=text)
        return Found(left_whole=tuple((join(name, key), problem) for key in weights))
    halves, pairs = partial(InterleavedShard, sections=(width, width)), partial(BlockShard, block=2)
    placed: Placed = halves if getattr(module, "is_concatenated", True) else pairs  # gate then up, or alternating
    dims = {"gate_up_proj": out_dim, "gate_up_proj_bias": 1}  # a bias is [experts, channels]
    return Found(
        TPBlock(
            TPBlockKind.EXPERTS,
            name,
            columns=tuple(Cut(join(name, key), placed(dim)) for key, dim in dims.items() if key in weights),
            rows=(Cut(join(name, "down_proj"), ShardSpec(in_dim)),),
            row_biases=(join(name, "down_proj_bias"),) if "down_proj_bias" in weights else (),
            num_pieces=width,
        )
    )


def find_vocabulary(context: Context) -> list[Found]:
    """Plan token embeddings and heads that make logits, sharded by rows of the vocabulary."""
    embeddings = {
        name: module
        for name, module in context.modules.items()
        if isinstance(module, nn.Embedding) and id(module) not in context.claimed
    }
    linears = [
        view
        for name, module in context.modules.items()
        if id(module) not in context.claimed and (view := as_linear(name, module)) is not None and view.out_dim == 0
    ]
    sizes = declared_vocab_sizes(context.modules.values())
    tied = {id(module.weight) for module in embeddings.values()} & {id(view.module.weight) for view in linears}
    heads = {view.out_features for view in linears if leaf(view.name).lower() in HEAD}
    usual = ("tok", "word", "wte", "vocab", "shared", "embed_in")
    tokens = {}
    for name, module in embeddings.items():
        is_table = module.num_embeddings in sizes | heads or any(word in leaf(name).lower() for word in usual)
        is_position = any(word in name.lower() for word in POSITION_WORDS)  # these have rows, but no vocabulary
        if id(module.weight) in tied or (is_table and not is_position):
            tokens[name] = module
    rows = {module.num_embeddings for module in tokens.values()} | sizes
    units = [_embedding(context, name, module) for name, module in tokens.items()]
    for view in linears:
        if id(view.module.weight) in tied or (leaf(view.name).lower() in HEAD and view.out_features in rows):
            context.claim(view)
            units.append(_head(context, view))
    return units


def _embedding(context: Context, name: str, module: nn.Embedding) -> Found:
    rows, weight, tp_size = module.num_embeddings, join(name, "weight"), context.options.tp_size
    own = not _forward_is_known(module, nn.Embedding)
    if own or module.max_norm is not None or rows < tp_size:
        reason, hint = f"{rows} rows", "fewer rows than ranks"
        if module.max_norm is not None:
            reason, hint = f"max_norm={module.max_norm}", "max_norm rewrites rows that a rank may not hold"
        if own:
            reason = f"the forward of {type(module).__qualname__} is its own"
            hint = "if it is linear in the rows, write the rule by hand"
        return Found(left_whole=((weight, Problem("left-replicated", name, found=reason, hint=hint)),))
    cuts = (Cut(weight, ShardSpec(0)),)
    return _vocabulary(TPBlock(TPBlockKind.EMBEDDING, name, (), cuts, num_pieces=rows), tp_size)


def _head(context: Context, view: LinearView) -> Found:
    rows, tp_size = view.out_features, context.options.tp_size
    if rows < tp_size:
        problem = Problem("left-replicated", view.name, found=f"{rows} outputs with tp={tp_size}")
        return Found(left_whole=((view.weight_name, problem),))
    cuts = column_cuts(view, ShardSpec)
    return _vocabulary(TPBlock(TPBlockKind.HEAD, view.name, cuts, (), num_pieces=rows), tp_size)


def _vocabulary(unit: TPBlock, tp_size: int) -> Found:
    return Found(
        replace(unit, evidence=Evidence.BY_NATURE),
        notes=(uneven(unit.name, unit.num_pieces, tp_size),) if unit.num_pieces % tp_size else (),
    )
