"""Embeddings by rows of the vocabulary."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from tp_styles.runtime.axis import Axis
from tp_styles.runtime.forward import Forward, Output, only
from tp_styles.spec import StyleSpec


class RowLookup:
    """Lookups in an embedding of which this rank holds some rows: ids of other rows give zeros.

    Args:
        module: The embedding.
        spec: What to do.
        axis: Over which ranks.
        name: The module's FQN, for errors.
    """

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        split = dict(spec.parameters)["weight"].split
        ((self.start, self.stop),) = split.ranges(axis.rank, axis.size)
        self.num_rows = split.global_size
        self.module = cast(nn.Embedding, module)
        self.name = name

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum that is the lookup."""
        elsewhere = (ids < self.start) | (ids >= self.stop)
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_ids(ids)
        if self.stop == self.start:  # no rows here: a zero that depends on the weight keeps the ranks' graphs alike
            return weight.sum() + weight.new_zeros((*ids.shape, weight.shape[1]))
        local = (ids - self.start).masked_fill(elsewhere, 0)
        found = F.embedding(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self._without_padding_gradient(found, ids)

    def _without_padding_gradient(self, found: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        padding = self.module.padding_idx
        if padding is None or not self.start <= padding < self.stop or not found.requires_grad:
            return found
        return torch.where((ids == padding).unsqueeze(-1), found.detach(), found)

    def _check_ids(self, ids: torch.Tensor) -> None:
        # On CPU, where it costs no synchronisation, as nn.Embedding does it; elsewhere such an id gives zeros.
        if ids.numel() and not bool(((ids >= 0) & (ids < self.num_rows)).all()):
            raise IndexError(f"{self.name}: an id is outside of 0..{self.num_rows - 1}")


class RowEmbedding(Forward):
    """`nn.Embedding` of which this rank holds some rows: lookups are summed."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        ((_, self.enter),) = self.moves.items()
        self.leave = Output(only(spec), axis, f"{name} ->", local=spec.local_output, fresh=True)
        self.lookup = RowLookup(module, spec, axis, name)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of the ids."""
        weight = self.parameter("weight")
        assert weight is not None
        return self.leave(self.lookup(self.enter(input), weight))
