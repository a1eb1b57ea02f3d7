"""Linear layers with a low-rank update beside them."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.colwise import ColwiseParallel
from tp_styles.styles.replicated import NoParallel
from tp_styles.styles.rowwise import RowwiseParallel
from tp_styles.values.spec import ModuleInfo, StyleSpec


class LoRAParallel(ParallelStyle):
    """Shard a linear layer together with its low-rank update `B(A(x))` (peft's `lora.Linear`).

    By columns, A is replicated and B is split with the base layer's output; by rows, A is split with its input, the
    small product is summed over the ranks, and B is replicated. The result has the layout of the base layer's.

    Args:
        style: How the base layer is split: `"column"`, `"row"`, or its style (sections, a gathered output, a full
            input of a row-wise layer).
        base: Name of the base layer.
        a: Name of A: a linear layer, or a dict of them.
        b: Name of B, likewise.
        dropout: Name of the dropout before A; by rows it draws other numbers on each rank.
    """

    def __init__(
        self,
        style: Literal["column", "row"] | ColwiseParallel | RowwiseParallel,
        *,
        base: str = "base_layer",
        a: str = "lora_A",
        b: str = "lora_B",
        dropout: str = "lora_dropout",
    ) -> None:
        super().__init__(None, None)
        if style not in ("column", "row") and not isinstance(style, ColwiseParallel | RowwiseParallel):
            hint = '"column", "row", or the base layer\'s ColwiseParallel or RowwiseParallel'
            raise StyleTypeError(Problem("invalid-argument", "style", found=repr(style), hint=hint))
        self.style, self.base, self.a, self.b, self.dropout = style, base, a, b, dropout

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the styles of the layers below; see `ParallelStyle.spec`."""
        linears = {name: _below(info, name, nn.Linear) for name in (self.base, self.a, self.b)}
        missing = [name for name, layers in linears.items() if not layers]
        if missing:
            hint = "pass the names of the base layer, A and B"
            problem = Problem("lora-mismatch", info.where(), found=f"no linear layer {', '.join(missing)}", hint=hint)
            return StyleSpec(problems=(problem,))
        named: dict[object, ColwiseParallel | RowwiseParallel] = {"column": ColwiseParallel(), "row": RowwiseParallel()}
        base = named[self.style] if isinstance(self.style, str) else self.style
        column, enters = isinstance(base, ColwiseParallel), base.input_layouts[0]
        # A and B see what the base layer sees and give: of sequence shards neither has a meaning.
        is_known = enters == Replicate() if column else enters in (Replicate(), Shard(-1))
        if not is_known or (not column and base.output_layouts[0] != Replicate()) or not base.use_local_output:
            hint = "beside a low-rank update a layer takes and gives full local tensors, or shards of its features"
            problem = Problem("lora-mismatch", info.where(), found=repr(base), hint=hint)
            return StyleSpec(problems=(problem,))
        first: ParallelStyle = NoParallel() if column else RowwiseParallel(input_layouts=enters)
        second: ParallelStyle = base if column else NoParallel()
        children: list[tuple[str, object]] = [(name, base) for name in linears[self.base]]
        children += [(name, first) for name in linears[self.a]] + [(name, second) for name in linears[self.b]]
        if not column and enters == Shard(-1):
            children += [(name, NoParallel(sum_gradient=True)) for name in _below(info, self.dropout, nn.Dropout)]
        problems = [  # other parameters, like DoRA's magnitude
            Problem(
                "lora-mismatch", info.where(p.name), found=str(p.shape), hint="only A and B are known beside the base"
            )
            for p in info.parameters
            if not any(p.name.startswith(name + ".") for names in linears.values() for name in names)
        ]
        return StyleSpec(compute="none", children=tuple(children), problems=tuple(problems))


def _below(info: ModuleInfo, name: str, kind: type[nn.Module]) -> list[str]:
    return [
        child
        for child, inner in info.children
        if (child == name or child.startswith(name + ".")) and issubclass(inner, kind)
    ]
