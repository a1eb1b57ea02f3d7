"""`nn.MultiheadAttention` by heads."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.heads import divide_heads
from tp_styles.styles.layers import flow_problems, single
from tp_styles.values.spec import ModuleInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Section, Split

INPUTS = ("query", "key", "value")


class MultiheadAttentionParallel(ParallelStyle):
    """Each rank computes some heads of an `nn.MultiheadAttention`; all its options and masks work as before.

    Args:
        input_layouts: Layout of query, key and value if they are plain tensors; default `Replicate()`.
        output_layouts: Layout of the attention's output; default `Replicate()`. Attention weights are always whole.
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
        """Heads are split; see `ParallelStyle.spec`."""
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
            outputs=(leave, None),
            problems=tuple(problems),
        )

    def _arguments(self) -> dict[str, object]:
        return {"input_layouts": self.input_layouts[0], "output_layouts": self.output_layouts[0]}


def _parameters(info: ModuleInfo, width: int, unit: int, *, sharded: bool) -> tuple[tuple[str, ParameterSpec], ...]:
    by_heads = Split.along(0, width, unit=unit)
    packed = Split(0, (Section(width, unit),) * 3)
    splits = {
        "in_proj_weight": packed,
        "in_proj_bias": packed,
        "q_proj_weight": by_heads,
        "k_proj_weight": by_heads,
        "v_proj_weight": by_heads,
        "bias_k": Split.along(2, width, unit=unit),
        "bias_v": Split.along(2, width, unit=unit),
        "out_proj.weight": Split.along(1, width, unit=unit),
        "out_proj.bias": Split.replicated(),
    }
    return tuple(
        (name, ParameterSpec(split, sum_gradient=sharded and name == "out_proj.bias"))
        for name, split in splits.items()
        if info.parameter(name) is not None
    )
