"""Styles of modules between column-wise and row-wise layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.fused import FusedColwiseParallel
from tp_styles.values.spec import ModuleInfo, ParameterSpec, PerRank, StyleSpec
from tp_styles.values.split import Split


class BlockParallel(ParallelStyle):
    """Shard a block's own parameters, buffers and counts, beside the styles of its layers.

    For modules between column-wise and row-wise layers: one decay or sink for each head, slopes of ALiBi, the
    depthwise convolution of Mamba, a scalar gain. The block's forward runs on this rank's shards.

    Args:
        shard: Name of a parameter below the block -> dim along which each rank holds its shard.
        sum_gradient: Names of parameters held in full and used on a rank's shard: gradients are summed.
        buffers: Name of a buffer outside the state dict (`persistent=False`) -> dim, as `shard`.
        attributes: Names of counts below the block, divided by the number of ranks (`num_heads`,
            `conv.groups`); or name -> value on every rank.
        tp_size: Number of ranks of the plan; by default any.
    """

    def __init__(
        self,
        *,
        shard: Mapping[str, int] | None = None,
        sum_gradient: Sequence[str] = (),
        buffers: Mapping[str, int] | None = None,
        attributes: Mapping[str, int] | Sequence[str] = (),
        tp_size: int | None = None,
    ) -> None:
        super().__init__(None, None)
        self.shard, self.buffers = dict(shard or {}), dict(buffers or {})
        self.sum_gradient = tuple(sum_gradient)
        self.attributes = dict(attributes) if isinstance(attributes, Mapping) else tuple(attributes)
        self.tp_size = tp_size

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        problems = []
        if self.tp_size not in (None, tp_size):  # its counts are for one size
            reason = f"tp={tp_size}, planned for {self.tp_size}"
            problems.append(
                Problem("mesh-mismatch", info.where(), found=reason, hint="plan again for this number of ranks")
            )
        parameters = []
        for name in (*self.shard, *self.sum_gradient):
            parameter = info.parameter(name)
            if parameter is None:
                problems.append(Problem("unknown-name", info.where(name), hint="the plan is for another model"))
                continue
            dim = self.shard.get(name)
            split = Split.replicated() if dim is None else Split.along(dim, parameter.shape[dim])
            parameters.append((name, ParameterSpec(split, sum_gradient=dim is None)))
        # Counts are divided when they are set: sizes of modules below are not known here.
        counts = self.attributes if isinstance(self.attributes, dict) else dict.fromkeys(self.attributes, PerRank())
        return StyleSpec(
            compute="module" if parameters else "none",  # layers have styles of their own
            parameters=tuple(parameters),
            buffers=tuple(self.buffers.items()),
            attributes=tuple(counts.items()),
            problems=tuple(problems),
        )


class ColwiseKVReplicated(FusedColwiseParallel):
    """Replicate a column-wise layer; each rank computes only the rows of its heads.

    For key-value projections with fewer heads than ranks, if a plan keeps them replicated. Gradients are summed.
    `GQAParallel(kv_replicate=True)` holds only the rows needed by a rank.

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
        spec = super().spec(info, tp_size)  # its split gives each rank's rows
        problems = spec.problems
        if spec.compute != "column-linear" and not problems:
            hint = "rows are picked of an nn.Linear; use GQAParallel(kv_replicate=True), or a smaller tp size"
            problems = (Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint),)
        replicated = ParameterSpec(Split.replicated(), sum_gradient=True)
        return StyleSpec(
            compute="picked-column-linear",
            parameters=tuple((name, replicated) for name, _ in spec.parameters),
            inputs=spec.inputs,
            outputs=spec.outputs,
            problems=problems,
        )
