"""Linear layers by output and by input features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tp_styles.runtime.axis import Axis
from tp_styles.runtime.forward import Forward, Output, only
from tp_styles.spec import StyleSpec
from tp_styles.transfer import normalized


class ColumnLinear(Forward):
    """`nn.Linear` of which this rank holds some output features."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        ((_, self.enter),) = self.moves.items()
        self.leave = Output(only(spec), axis, f"{name} ->", local=spec.local_output, fresh=False)
        self.leaves = [self.leave]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The linear map on this rank's features."""
        weight, bias = self.weight_and_bias()
        return self.leave(F.linear(self.enter(input), weight, bias))


class PickedColumnLinear(ColumnLinear):
    """`nn.Linear` that every rank holds whole, of which this rank computes some output features."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        split = only(spec).split
        assert split is not None
        ((self.start, self.stop),) = split.ranges(axis.rank, axis.size)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The linear map on this rank's features."""
        weight, bias = self.weight_and_bias()
        own = None if bias is None else bias[self.start : self.stop]
        return self.leave(F.linear(self.enter(input), weight[self.start : self.stop], own))


class RowLinear(Forward):
    """`nn.Linear` of which this rank holds some input features: partial results are summed, then the bias is added."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.enter = next(iter(self.moves.values()))
        self.leave = Output(only(spec), axis, f"{name} ->", local=spec.local_output, fresh=True)
        self.leaves = [self.leave]
        self.adds_whole = isinstance(self.leave.flow.wanted, Replicate)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The linear map, summed over the ranks."""
        weight, bias = self.weight_and_bias()
        return self.finish(F.linear(self.enter(input), weight), bias)

    def finish(self, produced: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The sum over the ranks, with the bias, in the layout that was asked for."""
        moved = self.leave.move(produced)
        if bias is not None:
            # Under autocast the sum is of the lower type, and so is the output of `nn.Linear`.
            bias = bias if bias.dtype == moved.dtype else bias.to(moved.dtype)
            moved = moved + (bias if self.adds_whole else self._bias_part(bias, moved.dim()))
        return self.leave.given(moved, produced.shape)

    def _bias_part(self, bias: torch.Tensor, ndim: int) -> torch.Tensor:
        wanted = normalized(self.leave.flow.wanted, ndim)
        if isinstance(wanted, Shard) and wanted.dim == ndim - 1:
            assert self.leave.flow.split is not None
            return self.axis.slice(bias, 0, self.leave.flow.split.sizes(self.axis.size))
        if isinstance(wanted, Partial) and self.axis.rank != 0:
            return bias * 0  # one rank adds it; the others stay in the graph, their gradients are summed
        return bias
