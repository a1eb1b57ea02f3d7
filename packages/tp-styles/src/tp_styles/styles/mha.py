"""`nn.MultiheadAttention` by heads, and torch's transformer layers around it."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.styles.gqa import divide_heads
from tp_styles.styles.layers import flow_problems, single
from tp_styles.styles.replicated import NoParallel
from tp_styles.styles.rowwise import RowwiseParallel
from tp_styles.values.spec import ModuleInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Section, Split

INPUTS = ("query", "key", "value")


class MultiheadAttentionParallel(ParallelStyle):
    """Shard an `nn.MultiheadAttention` by heads; all its options and masks work as before.

    Args:
        input_layouts: Layout of query, key and value if they are plain tensors; default `Replicate()`.
        output_layouts: Layout of the attention's output; default `Replicate()`. Attention weights are always full.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
    ) -> None:
        super().__init__(None, None)
        self.input_layouts = (single(input_layouts, Replicate(), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Replicate(), "output_layouts"),)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return a spec with sharded heads; see `ParallelStyle.spec`."""
        if not issubclass(info.kind, nn.MultiheadAttention):
            hint = "the style is for nn.MultiheadAttention; GQAParallel is for attention with projections of its own"
            return StyleSpec(problems=(Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint),))
        width, count = int(info.size("embed_dim") or 0), int(info.size("num_heads") or 1)
        problems = []
        if info.kind.forward is not nn.MultiheadAttention.forward:
            hint = "the style replaces the forward of nn.MultiheadAttention, which this class overrides"
            problems.append(Problem("module-not-shardable", info.where(), found=info.kind.__name__, hint=hint))
        _, problem = divide_heads(info.where(), count, count, tp_size, kv_replicate=False)
        if problem is not None:
            problems.append(problem)
        outer = self.input_layouts[0]
        enter = [Redistribution(outer, Replicate(), gradient=Partial(), width=width) for _ in INPUTS]
        leave = Redistribution(Partial(), self.output_layouts[0], split=Split.along(0, width), width=width)
        problems += flow_problems(info, [("input_layouts", enter[0]), ("output_layouts", leave)])
        return StyleSpec(
            compute="multihead-attention",
            parameters=_parameters(info, width, width // count, sharded=not isinstance(leave.dst, Replicate)),
            inputs=tuple(zip(INPUTS, enter, strict=True)),
            outputs=(leave, None),  # the forward gathers attention weights
            problems=tuple(problems),
        )


def _parameters(info: ModuleInfo, width: int, unit: int, *, sharded: bool) -> tuple[tuple[str, ParameterSpec], ...]:
    by_heads = Split.along(0, width, unit=unit)
    packed = Split(0, (Section(width, unit),) * 3)  # q, k and v rows in one weight
    splits = {
        "in_proj_weight": packed,
        "in_proj_bias": packed,
        "q_proj_weight": by_heads,
        "k_proj_weight": by_heads,
        "v_proj_weight": by_heads,
        "bias_k": Split.along(2, width, unit=unit),  # [1, 1, embed_dim]
        "bias_v": Split.along(2, width, unit=unit),
        "out_proj.weight": Split.along(1, width, unit=unit),
        "out_proj.bias": Split.replicated(),
    }
    return tuple(
        (name, ParameterSpec(split, sum_gradient=sharded and name == "out_proj.bias"))  # of this rank's output shard
        for name, split in splits.items()
        if info.parameter(name) is not None
    )


class TransformerLayerParallel(ParallelStyle):
    """Shard torch's transformer layers: attention by heads, feed-forward by columns and rows.

    Norms, and dropouts outside the feed-forward pair, are replicated.
    """

    def __init__(self) -> None:
        super().__init__(None, None)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the styles of the layers below; see `ParallelStyle.spec`."""
        if not issubclass(info.kind, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            hint = "the style is for nn.TransformerEncoderLayer and nn.TransformerDecoderLayer"
            return StyleSpec(problems=(Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint),))
        attention = ["self_attn"]
        if issubclass(info.kind, nn.TransformerDecoderLayer):
            attention.append("multihead_attn")
        children: list[tuple[str, object]] = [(name, MultiheadAttentionParallel()) for name in attention]
        children += [("linear1", ColwiseParallel()), ("linear2", RowwiseParallel())]
        children.append(("dropout", NoParallel(sum_gradient=True)))  # on a shard: other draws on each rank
        return StyleSpec(compute="none", children=tuple(children))
