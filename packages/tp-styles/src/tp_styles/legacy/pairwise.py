"""Pairs of linear layers, the first split by columns and the second by rows."""

from __future__ import annotations

from torch import nn

from tp_styles.legacy.prepare import (
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_output_reshard_tensor,
    make_output_tensor,
)
from tp_styles.legacy.styles import ColwiseParallel, RowwiseParallel
from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle, PrepareInput, PrepareOutput
from tp_styles.values.spec import ModuleInfo, StyleSpec


class PairwiseParallel(ParallelStyle):
    """The immediate linear layers of a module, two by two: columns of the first, rows of the second.

    `_prepare_input` runs before the first of them and `_prepare_output` after the last; between them activations are
    DTensors. With an odd number the last one stays as it is. A module with fewer than two of them hands the style on to
    its children.

    Args:
        _prepare_input: Default `make_input_replicate_1d`.
        _prepare_output: Default `make_output_tensor`.
    """

    def __init__(
        self, _prepare_input: PrepareInput | None = None, _prepare_output: PrepareOutput | None = None
    ) -> None:
        super().__init__(
            make_input_replicate_1d if _prepare_input is None else _prepare_input,
            make_output_tensor if _prepare_output is None else _prepare_output,
        )

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Styles for the linear layers below; see `ParallelStyle.spec`."""
        kinds = dict(info.children)
        if issubclass(info.kind, nn.MultiheadAttention):
            return StyleSpec(problems=(_attention(info),))
        parents = [name for name in ("", *kinds) if len(_linears(name, kinds)) > 1]
        parents = [name for name in parents if not any(_is_below(name, other) for other in parents if other != name)]
        problems = [
            _attention(info, name)
            for name, kind in kinds.items()
            if issubclass(kind, nn.MultiheadAttention) and not any(_is_below(name, parent) for parent in parents)
        ]
        if not parents and not problems:
            problems.append(
                Problem(
                    "module-kind",
                    info.where(),
                    found="no module with two linear layers right below it",
                    hint="name the layers: ColwiseParallel for the first and RowwiseParallel for the second",
                )
            )
        children = [pair for parent in parents for pair in self._pairs(_linears(parent, kinds))]
        return StyleSpec(compute="none", children=tuple(children), problems=tuple(problems))

    def _pairs(self, linears: list[str]) -> list[tuple[str, ParallelStyle]]:
        paired = linears[: len(linears) // 2 * 2]
        styles: list[tuple[str, ParallelStyle]] = []
        for index, name in enumerate(paired):
            if index % 2 == 0:
                styles.append((name, ColwiseParallel(self._prepare_input if index == 0 else None, None)))
            else:
                last = index == len(paired) - 1
                styles.append((name, RowwiseParallel(None, self._prepare_output if last else None)))
        return styles


class SequenceParallel(PairwiseParallel):
    """`PairwiseParallel` between sequence shards: rows are gathered before the first layer and reduce-scattered after
    the last, both on dim 0. Exported as `tp_styles.PairwiseSequenceParallel` too.
    """

    def __init__(self) -> None:
        super().__init__(make_input_reshard_replicate, make_output_reshard_tensor)

    def _arguments(self) -> dict[str, object]:
        return {}


PairwiseSequenceParallel = SequenceParallel
"""The same class under a name that today's `SequenceParallel` does not have."""


def _linears(parent: str, kinds: dict[str, type[nn.Module]]) -> list[str]:
    return [name for name, kind in kinds.items() if _parent(name) == parent and issubclass(kind, nn.Linear)]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_below(name: str, parent: str) -> bool:
    return parent == "" or name.startswith(parent + ".")


def _attention(info: ModuleInfo, name: str = "") -> Problem:
    return Problem(
        "module-kind",
        info.where(name),
        found="nn.MultiheadAttention",
        hint="its projections are one fused weight; a pair of linear layers is not what it holds",
    )
