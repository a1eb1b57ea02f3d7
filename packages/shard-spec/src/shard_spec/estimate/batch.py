"""Batch of a step, as every estimate takes it: a number of tokens, a shape of token ids, or what forward is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem

Batch: TypeAlias = int | Sequence[int] | Any
"""Numbers count the step of all ranks: tokens, or ``(sequences, length)`` of token ids. Tensors are what one rank
passes to forward: one tensor, a tuple of arguments, or a mapping of keyword arguments."""

_HINT = "give a number of tokens, (sequences, length), or what one rank passes to forward"


def num_tokens(batch: Batch | None, data_ranks: int) -> int | None:
    """Return the tokens of a step over all ranks: sequences times length, of a tensor its first two dims."""
    if batch is None:
        return None
    if not _is_numbers(batch):
        given = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
        given = given[0] if isinstance(given, tuple | list) else given
        shape = getattr(given, "shape", None)
        if not shape:
            raise _unknown(batch)
        batch = tuple(shape[:2])
    else:
        data_ranks = 1
    tokens = data_ranks
    for size in [batch] if isinstance(batch, int) else batch:
        tokens *= int(size)
    return tokens


def forward_inputs(module: nn.Module, batch: Batch, data_ranks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that one rank passes to ``module.forward``; token ids are zeros on the meta device.

    Raises:
        PlanError: ``invalid-argument`` for a number of tokens alone, which says no shape.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not _is_numbers(batch):
        return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
    if isinstance(batch, int) or len(batch) != 2:
        raise _unknown(batch)
    sequences = max(1, -(-batch[0] // data_ranks))
    tokens = torch.zeros(sequences, batch[1], dtype=torch.long, device="meta")
    if "input_ids" in inspect.signature(module.forward).parameters:
        return (), {"input_ids": tokens}
    return (tokens,), {}


def _is_numbers(batch: Batch) -> bool:
    return isinstance(batch, int) or (isinstance(batch, Sequence) and all(isinstance(each, int) for each in batch))


def _unknown(batch: object) -> PlanError:
    return PlanError(Problem("invalid-argument", "batch", found=f"{batch!r:.100}", hint=_HINT))
