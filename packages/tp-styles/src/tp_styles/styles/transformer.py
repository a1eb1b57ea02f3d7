"""`nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` as a whole."""

from __future__ import annotations

from torch import nn

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.styles.mha import MultiheadAttentionParallel
from tp_styles.styles.replicated import NoParallel
from tp_styles.styles.rowwise import RowwiseParallel
from tp_styles.values.spec import ModuleInfo, StyleSpec


class TransformerLayerParallel(ParallelStyle):
    """Attention by heads and the feed-forward pair by columns and rows, for torch's own transformer layers.

    Dropout between the feed-forward layers draws other numbers on each rank; norms and the other dropouts are whole.
    """

    def __init__(self) -> None:
        super().__init__(None, None)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Styles of the layers below; see `ParallelStyle.spec`."""
        if not issubclass(info.kind, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            hint = "the style is for nn.TransformerEncoderLayer and nn.TransformerDecoderLayer"
            return StyleSpec(problems=(Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint),))
        attention = ["self_attn"]
        if issubclass(info.kind, nn.TransformerDecoderLayer):
            attention.append("multihead_attn")
        children: list[tuple[str, object]] = [(name, MultiheadAttentionParallel()) for name in attention]
        children += [("linear1", ColwiseParallel()), ("linear2", RowwiseParallel())]
        children.append(("dropout", NoParallel(sum_gradient=True)))
        return StyleSpec(compute="none", children=tuple(children))

    def _arguments(self) -> dict[str, object]:
        return {}
