"""The forward of an ``nn.EmbeddingBag`` whose weight is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shard_spec._torch_compat import eager_only
from shard_spec.distributed.exchange import gather_rows, scatter_rows
from shard_spec.legacy.forwards.base import ShardedForward, rows_problem
from shard_spec.legacy.forwards.embedding import ids_problem
from shard_spec.legacy.forwards.lookup import check_ids, look_up, renormalize


@dataclass(frozen=True)
class _Bags:
    """This rank's bags as flat tokens.

    Attributes:
        ids: ``[num_tokens]``.
        offsets: Where each bag begins, ``[num_bags]``.
        weights: ``[num_tokens]`` or None.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    @property
    def of_token(self) -> torch.Tensor:
        """The bag of each token, ``[num_tokens]``."""
        ends = torch.cat([self.offsets[1:], self.offsets.new_full((1,), self.ids.shape[0])])
        bags = torch.arange(self.offsets.shape[0], device=self.ids.device)
        return torch.repeat_interleave(bags, ends - self.offsets, output_size=self.ids.shape[0])


class ShardedEmbeddingBag(ShardedForward):
    """This rank's bags in, this rank's bags out.

    Sums and means are formed on each rank for its shard of the table and then brought together, bag by bag. A maximum
    needs the tokens themselves: they are looked up as in an embedding, and this rank reduces its own.
    """

    original = nn.EmbeddingBag.forward
    tensors = ("weight",)

    @eager_only
    def __call__(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``nn.EmbeddingBag``: ids ``[my_bags, length]``, or flat ids with ``offsets``; to ``[my_bags, dim]``."""
        module = self.module
        assert isinstance(module, nn.EmbeddingBag)
        given = (each for each in (input, offsets, per_sample_weights) if each is not None)
        problem = next(filter(None, (rows_problem(each, self.device, 1) for each in given)), "")
        problem = problem or _problem(module, input, offsets, per_sample_weights)
        bags = None if problem else _flat(module, input, offsets, per_sample_weights)
        ids = self.stand_in() if bags is None else bags.ids
        metadata = self.gather_metadata(
            self.stand_in() if bags is None else bags.offsets,
            ids,
            None if bags is None else bags.weights,
            problem=problem,
        )
        assert bags is not None
        all_ids = self.gathered(bags.ids, metadata.rows(1))
        check_ids(all_ids, module.num_embeddings, self.name)
        table = self._table(all_ids)
        weights = bags.weights
        if weights is not None and metadata.any_requires_grad(2) and not weights.requires_grad:
            weights = weights.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        if module.mode == "max":
            return self._max(bags, all_ids, table, metadata.rows(1))
        return self._sum(_Bags(bags.ids, bags.offsets, weights), all_ids, table, metadata.rows(0), metadata.rows(1))

    def _table(self, all_ids: torch.Tensor) -> torch.Tensor:
        module = self.module
        assert isinstance(module, nn.EmbeddingBag)
        assert self.sharding is not None
        if module.max_norm is not None:
            group = self.context.group.group
            with torch.no_grad():
                renormalize(self.local_weight(), all_ids, self.sharding, group, module.max_norm, module.norm_type)
        return self.local_weight()

    def _look_up(self, all_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        module = self.module
        assert isinstance(module, nn.EmbeddingBag)
        assert self.sharding is not None
        rows = self.sharding.rows[self.context.group.rank]
        return look_up(all_ids, table, rows, module.num_embeddings, module.padding_idx)

    def _sum(
        self,
        bags: _Bags,
        all_ids: torch.Tensor,
        table: torch.Tensor,
        num_bags: tuple[int, ...],
        num_tokens: tuple[int, ...],
    ) -> torch.Tensor:
        module, group = self.module, self.context.group
        assert isinstance(module, nn.EmbeddingBag)
        assert self.sharding is not None
        found = self._look_up(all_ids, table)
        if module.padding_idx is not None:
            found = found.masked_fill((all_ids == module.padding_idx).unsqueeze(-1), 0)
        if bags.weights is not None:
            found = found * gather_rows(bags.weights.unsqueeze(-1), self.whole_rows(num_tokens, 1))
        bag_of_token = self.gathered(bags.of_token + sum(num_bags[: group.rank]), num_tokens)
        wide = found.new_zeros(sum(num_bags), found.shape[-1]).index_add(0, bag_of_token, found)
        summed = scatter_rows(wide, self.sharding.exchange(group.group, num_bags, 1))
        if module.mode == "sum":
            return summed
        counted = torch.ones_like(bags.ids) if module.padding_idx is None else (bags.ids != module.padding_idx).long()
        counts = torch.zeros_like(bags.offsets).index_add(0, bags.of_token, counted.to(bags.offsets.dtype))
        return summed / counts.clamp(min=1).unsqueeze(-1).to(summed.dtype)

    def _max(
        self, bags: _Bags, all_ids: torch.Tensor, table: torch.Tensor, num_tokens: tuple[int, ...]
    ) -> torch.Tensor:
        module, group = self.module, self.context.group
        assert isinstance(module, nn.EmbeddingBag)
        assert self.sharding is not None
        wide = self._look_up(all_ids, table)
        tokens = scatter_rows(wide, self.sharding.exchange(group.group, num_tokens, 1))
        num = tokens.shape[0]
        places = torch.arange(num, device=tokens.device)
        padding = None
        if module.padding_idx is not None:
            places, padding = places.masked_fill(bags.ids == module.padding_idx, num), num
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        return F.embedding_bag(places, tokens, bags.offsets.long(), mode="max", padding_idx=padding)


def _problem(
    module: nn.EmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> str:
    """Why these bags cannot be looked up; empty when they can. As ``torch.nn.functional.embedding_bag`` would."""
    if ids_problem(ids):
        return ids_problem(ids)
    if ids.dim() not in (1, 2):
        return f"ids of shape {list(ids.shape)}; an embedding bag takes 1 or 2 dims"
    if ids.dim() == 2 and offsets is not None:
        return "offsets together with 2-D ids, where each row already is a bag"
    if ids.dim() == 1 and offsets is None:
        return "1-D ids without offsets"
    if offsets is not None and (offsets.dim() != 1 or offsets.numel() < (1 if module.include_last_offset else 0)):
        return f"offsets of shape {list(offsets.shape)}"
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights of shape {list(weights.shape)} for ids of shape {list(ids.shape)}"
    if weights is not None and module.mode != "sum":
        return f"per_sample_weights with mode {module.mode!r}; torch defines them for 'sum' only"
    return ""


def _flat(
    module: nn.EmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> _Bags:
    if offsets is None:
        length = ids.shape[1]
        starts = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype) * length
        return _Bags(ids.reshape(-1), starts, None if weights is None else weights.reshape(-1))
    return _Bags(ids, offsets[:-1] if module.include_last_offset else offsets, weights)
