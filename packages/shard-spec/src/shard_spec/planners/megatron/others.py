"""``nn.MultiheadAttention``, mixture-of-experts weights, token embeddings and vocabulary heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.layout.placements import AnyShard, BlockShard, InterleavedShard, ShardSpec
from shard_spec.planners.megatron.attention import Placed, column_cuts
from shard_spec.planners.megatron.blocks import (
    POSITION_WORDS,
    Context,
    Cut,
    Evidence,
    Found,
    TPBlock,
    TPBlockKind,
    leaf,
)
from shard_spec.planners.megatron.mlp import uneven
from shard_spec.planners.modules.linear import LinearView, as_linear, declared_vocab_sizes, from_library, join, words

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
    fqns = tuple(join(name, key) for key in weights)
    transposed = getattr(module, "is_transposed", _TRANSPOSED.get(type(module).__name__))
    is_supported = set(weights) <= {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    if not from_library(module) or not isinstance(transposed, bool) or not is_supported:
        problem = Problem(
            "heads-not-recognised",
            name,
            found="three-dimensional expert weights of unknown arrangement",
            hint="write their rules by hand: 'S(0)' along an axis shards by experts",
        )
        return Found(left_whole=tuple((fqn, problem) for fqn in fqns))
    out_dim, in_dim = (2, 1) if transposed else (1, 2)
    width = down.shape[in_dim]
    if gate_up.shape[out_dim] != 2 * width or width % context.options.tp_size:
        problem = Problem(
            "does-not-divide", name, found=f"{width} channels an expert with tp={context.options.tp_size}"
        )
        return Found(left_whole=tuple((fqn, problem) for fqn in fqns))
    concatenated = getattr(module, "is_concatenated", True)
    halves, pairs = partial(InterleavedShard, sections=(width, width)), partial(BlockShard, block=2)
    placed: Placed = halves if concatenated else pairs  # gate then up, or alternating
    columns = [Cut(join(name, "gate_up_proj"), placed(out_dim))]
    if "gate_up_proj_bias" in weights:
        columns.append(Cut(join(name, "gate_up_proj_bias"), placed(1)))  # [experts, channels]
    return Found(
        TPBlock(
            TPBlockKind.EXPERTS,
            name,
            columns=tuple(columns),
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
    notes = (uneven(unit.name, unit.num_pieces, tp_size),) if unit.num_pieces % tp_size else ()
    return Found(replace(unit, evidence=Evidence.BY_NATURE), notes=notes)
