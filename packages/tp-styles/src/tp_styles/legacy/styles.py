"""Column-wise and row-wise styles with the arguments of torch 2.0: functions that prepare input and output."""

from __future__ import annotations

from dataclasses import replace

from tp_styles.legacy.prepare import (
    make_input_replicate_1d,
    make_input_shard_1d_last_dim,
    make_output_tensor,
    make_sharded_output_tensor,
)
from tp_styles.plan.style import PrepareInput, PrepareOutput, Style
from tp_styles.styles import colwise, rowwise
from tp_styles.values.spec import ModuleInfo, StyleSpec


class ColwiseParallel(colwise.ColwiseParallel):
    """Each rank computes some of the output features of an `nn.Linear` (or `nn.Embedding`).

    Args:
        _prepare_input: Makes the input a replicated DTensor.
        _prepare_output: Makes the output DTensor what the next module takes.
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

    def _arguments(self) -> dict[str, object]:
        return Style._arguments(self)


class RowwiseParallel(rowwise.RowwiseParallel):
    """Each rank computes a partial sum of every output feature from some of the input features.

    Args:
        _prepare_input: Makes the input a DTensor sharded on the last dim.
        _prepare_output: Makes the output DTensor, a partial sum, what the next module takes.
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

    def _arguments(self) -> dict[str, object]:
        return Style._arguments(self)


def _between_functions(decided: StyleSpec, *, default: bool) -> StyleSpec:
    """Return the decision with DTensors between prepare functions, unless these are the default ones."""
    if default or not decided.parameters:
        return decided
    return replace(StyleSpec(compute="dtensor"), parameters=decided.parameters, problems=decided.problems)
