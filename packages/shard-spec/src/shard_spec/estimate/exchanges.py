"""Collectives of experts and attention in a simulated step: tokens on expert axes, keys or heads on context axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from shard_spec.estimate.fully_shard import tensors_of
from shard_spec.estimate.roles import expert_modules
from shard_spec.plan.resolve import Resolution


class Exchanges:
    """Record the collectives of a step along expert and context axes.

    Args:
        sizes: Ranks of each axis.
        context: Context axes of several ranks.
        kind: ``"gather"`` or ``"ulysses"``; see `StepOptions`.
    """

    def __init__(self, sizes: Mapping[str, int], context: tuple[str, ...], kind: str) -> None:
        self._context, self._kind = context, kind
        self.context_ranks = prod(sizes[axis] for axis in context)
        self.collectives: list[tuple[str, str, str, str, int]] = []  # (axis, operation, content, name, bytes)

    def of_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        local_bytes: Callable[[Any], int],
        again: bool,
    ) -> None:
        """Record those of one attention: all keys and values, or heads for tokens.

        Args:
            query: Of this rank's tokens.
            key: Likewise.
            value: Likewise.
            local_bytes: Bytes of a tensor on one rank.
            again: True in a recomputation, whose backward is that of the first call.
        """

        def passes(tensor: torch.Tensor, forward: str, backward: str, size: int) -> None:
            def record(op: str) -> None:
                self.collectives += [(axis, op, "activations", "attention", size) for axis in self._context]

            record(forward)
            if tensor.requires_grad and not again:
                tensor.register_hook(lambda grad: record(backward))

        if self._context and self._kind == "ulysses":
            for tensor in (query, key, value, query):  # the result has the shape of the queries
                passes(tensor, "all_to_all", "all_to_all", local_bytes(tensor))
        elif self._context:
            for tensor in (key, value):
                passes(tensor, "all_gather", "reduce_scatter", self.context_ranks * local_bytes(tensor))

    def watch_experts(
        self, module: nn.Module, resolution: Resolution, axes: tuple[str, ...], in_backward: Callable[[], bool]
    ) -> list[Any]:
        """Send tokens to the ranks of their experts and back, in forward and in backward. Return the hooks.

        A module of experts gets hidden states (tokens, hidden) and the chosen experts of each (tokens, choices).
        """
        handles = []
        for name in expert_modules(resolution.metadata.parameters):
            owned = [each.name for each in resolution.metadata.parameters if each.name.rpartition(".")[0] == name]
            layouts = [resolution.layouts[each] for each in owned if each in resolution.layouts]
            along = [axis for axis in axes if any(axis in each.sharded_axes for each in layouts)]

            def record(size: int, name: str = name, along: list[str] = along) -> None:
                both = 2 * along  # dispatch and combine
                self.collectives += [(axis, "all_to_all", "activations", name, size) for axis in both]

            def before(module: nn.Module, args: Any, kwargs: Any, record: Any = record) -> None:
                tensors = list(tensors_of((args, kwargs)))
                chosen = [each for each in tensors if not each.is_floating_point()]
                if tensors and chosen and tensors[0].is_floating_point():
                    size = chosen[0].shape[-1] * tensors[0].nbytes
                    record(size)
                    if tensors[0].requires_grad and not in_backward():
                        tensors[0].register_hook(lambda grad: record(size))

            if along:
                handles.append(module.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True))
        return handles
