"""The first styles: layers between prepare functions, and pairs of linear layers, columns first and rows second."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tp_styles.legacy.prepare import (
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_input_shard_1d_last_dim,
    make_output_reshard_tensor,
    make_output_tensor,
    make_sharded_output_tensor,
)
from tp_styles.problems import Problem
from tp_styles.styles import colwise, rowwise
from tp_styles.styles.base import ParallelStyle, PrepareInput, PrepareOutput
from tp_styles.values.spec import ModuleInfo, StyleSpec, is_below


class ColwiseParallel(colwise.ColwiseParallel):
    """Shard the output features of an `nn.Linear` (or `nn.Embedding`) over the ranks.

    Args:
        _prepare_input: Makes the input a replicated DTensor.
        _prepare_output: Converts the output DTensor for the next module.
    """

    takes_functions = True

    def __init__(
        self,
        _prepare_input: PrepareInput | None = make_input_replicate_1d,
        _prepare_output: PrepareOutput | None = make_sharded_output_tensor,
    ) -> None:
        super().__init__()
        self._prepare_input, self._prepare_output = _prepare_input, _prepare_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return today's decision, or one between the functions; see `ParallelStyle.spec`."""
        default = self._prepare_input is make_input_replicate_1d and self._prepare_output is make_sharded_output_tensor
        return _between_functions(super().spec(info, tp_size), default=default)


class RowwiseParallel(rowwise.RowwiseParallel):
    """Shard the input features of an `nn.Linear`; each rank computes a partial sum of every output feature.

    Args:
        _prepare_input: Makes the input a DTensor sharded on the last dim.
        _prepare_output: Converts the output DTensor, a partial sum, for the next module.
    """

    takes_functions = True

    def __init__(
        self,
        _prepare_input: PrepareInput | None = make_input_shard_1d_last_dim,
        _prepare_output: PrepareOutput | None = make_output_tensor,
    ) -> None:
        super().__init__()
        self._prepare_input, self._prepare_output = _prepare_input, _prepare_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return today's decision, or one between the functions; see `ParallelStyle.spec`."""
        default = self._prepare_input is make_input_shard_1d_last_dim and self._prepare_output is make_output_tensor
        return _between_functions(super().spec(info, tp_size), default=default)


def _between_functions(decided: StyleSpec, *, default: bool) -> StyleSpec:
    """Return the decision with DTensors between prepare functions, unless these are the default ones."""
    if default or not decided.parameters:
        return decided
    return replace(StyleSpec(compute="dtensor"), parameters=decided.parameters, problems=decided.problems)


class PairwiseParallel(ParallelStyle):
    """Shard a module's immediate linear layers in pairs: columns of the first, rows of the second.

    `_prepare_input` runs before the first of them and `_prepare_output` after the last; between them activations are
    DTensors. With an odd number the last one stays as it is. A module with fewer than two of them passes the style on
    to its children.

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
        """Return styles for the linear layers below; see `ParallelStyle.spec`."""
        kinds = dict(info.children)
        if issubclass(info.kind, nn.MultiheadAttention):
            return StyleSpec(problems=(_attention(info),))
        parents = [name for name in ("", *kinds) if len(_linears(name, kinds)) > 1]
        parents = [name for name in parents if not any(is_below(name, other) for other in parents if other != name)]
        problems = [
            _attention(info, name)
            for name, kind in kinds.items()
            if issubclass(kind, nn.MultiheadAttention) and not any(is_below(name, parent) for parent in parents)
        ]
        if not parents and not problems:
            hint = "name the layers: ColwiseParallel for the first and RowwiseParallel for the second"
            problems.append(
                Problem("module-kind", info.where(), found="no module with two linear layers right below it", hint=hint)
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
    """`PairwiseParallel` between sequence shards: rows are gathered before and reduce-scattered after, on dim 0."""

    def __init__(self) -> None:
        super().__init__(make_input_reshard_replicate, make_output_reshard_tensor)


def _linears(parent: str, kinds: dict[str, type[nn.Module]]) -> list[str]:
    return [name for name, kind in kinds.items() if name.rpartition(".")[0] == parent and issubclass(kind, nn.Linear)]


def _attention(info: ModuleInfo, name: str = "") -> Problem:
    hint = "its projections are one fused weight; a pair of linear layers is not what it holds"
    return Problem("module-kind", info.where(name), found="nn.MultiheadAttention", hint=hint)
