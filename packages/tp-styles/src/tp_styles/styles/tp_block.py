"""Styles of what stands between column-wise and row-wise layers."""

from __future__ import annotations

from collections.abc import Mapping

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.values.spec import ModuleInfo, ParameterSpec, StyleSpec
from tp_styles.values.split import Split


class TPBlockParallel(ParallelStyle):
    """A module whose layers are divided by styles of their own: its counts become local, its own parameters are shared.

    Args:
        tp_size: The number of ranks that it is for.
        attributes: Attribute -> value on every rank.
        cut: Dotted name of a parameter -> dim along which each rank holds its own part.
        summed: Dotted names of parameters that every rank holds whole and uses on its part: gradients are summed.
    """

    def __init__(
        self,
        tp_size: int,
        attributes: Mapping[str, int] | None = None,
        cut: Mapping[str, int] | None = None,
        summed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(None, None)
        self.tp_size = tp_size
        self.attributes = dict(attributes or {})
        self.cut = dict(cut or {})
        self.summed = tuple(summed)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        problems = []
        if tp_size != self.tp_size:
            hint = "plan again for this number of ranks"
            problems.append(
                Problem("mesh-mismatch", info.where(), found=f"tp={tp_size}, planned for {self.tp_size}", hint=hint)
            )
        parameters = []
        for name in (*self.cut, *self.summed):
            parameter = info.parameter(name)
            if parameter is None:
                problems.append(Problem("unknown-name", info.where(name), hint="the plan is for another model"))
                continue
            dim = self.cut.get(name)
            split = Split.replicated() if dim is None else Split.along(dim, parameter.shape[dim])
            parameters.append((name, ParameterSpec(split, sum_gradient=dim is None)))
        return StyleSpec(
            compute="module" if parameters else "none",
            parameters=tuple(parameters),
            attributes=tuple(self.attributes.items()),
            problems=tuple(problems),
        )

    def _arguments(self) -> dict[str, object]:
        return {"tp_size": self.tp_size, "attributes": self.attributes, "cut": self.cut, "summed": self.summed}


class ColwiseKVReplicated(FusedColwiseParallel):
    """A column-wise layer that every rank holds whole and of which it computes the rows of its heads.

    For key-value projections with fewer heads than ranks, where a plan keeps them whole. Gradients are summed.
    `GQAParallel(kv_replicate=True)` holds only the rows that a rank needs.

    Args:
        rows: Output features.
        unit: Rows of a head.
        copies: How many neighbouring ranks compute the same head.
    """

    def __init__(self, rows: int, *, unit: int, copies: int) -> None:
        super().__init__((rows,), unit=unit, copies=copies)
        self.rows = rows

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        made = super().spec(info, tp_size)
        problems = made.problems
        if made.compute != "column-linear" and not problems:
            hint = "rows are picked of an nn.Linear; use GQAParallel(kv_replicate=True), or a smaller tp size"
            problems = (Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint),)
        whole = ParameterSpec(Split.replicated(), sum_gradient=True)
        return StyleSpec(
            compute="picked-column-linear",
            parameters=tuple((name, whole) for name, _ in made.parameters),
            inputs=made.inputs,
            outputs=made.outputs,
            problems=problems,
        )

    def _arguments(self) -> dict[str, object]:
        return {"rows": self.rows, "unit": self.unit, "copies": self.copies}
