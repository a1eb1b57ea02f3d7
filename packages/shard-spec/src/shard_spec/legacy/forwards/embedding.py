"""The forward of an ``nn.Embedding`` whose weight is sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec._torch_compat import eager_only
from shard_spec.distributed.exchange import scatter_rows
from shard_spec.legacy.forwards.base import ShardedForward, rows_problem
from shard_spec.legacy.forwards.lookup import check_ids, look_up, renormalize


class ShardedEmbedding(ShardedForward):
    """This rank's ids in, this rank's rows out: every rank looks up all ids in its shard of the table.

    DTensor ids (of the whole batch) give a DTensor of the whole batch.
    """

    original = nn.Embedding.forward
    tensors = ("weight",)

    @eager_only
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Ids ``[my_rows, ...]`` to ``[my_rows, ..., embedding_dim]``."""
        assert self.sharding is not None
        if isinstance(input, DTensor):
            return self.global_output(self._look_up(self.global_input(input)), 1, self.sharding.shape[1])
        problem = rows_problem(input, self.device, 1) or ids_problem(input)
        metadata = self.gather_metadata(self.stand_in() if problem else input, problem=problem)
        wide = self._look_up(self.gathered(input, metadata.rows()))
        return scatter_rows(wide, self.sharding.exchange(self.context.group.group, metadata.rows(), 1))

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """All ids in this rank's shard: ``[*ids.shape, my_columns]``."""
        module, cut, group = self.module, self.sharding, self.context.group
        assert isinstance(module, nn.Embedding)
        assert cut is not None
        check_ids(ids, module.num_embeddings, self.name)
        if module.max_norm is not None:
            with torch.no_grad():
                renormalize(self.local_weight(), ids, cut, group.group, module.max_norm, module.norm_type)
        table = self.local_weight()
        padding_idx = module.padding_idx
        return look_up(ids, table, cut.rows[group.rank], module.num_embeddings, padding_idx, module.scale_grad_by_freq)


def ids_problem(ids: torch.Tensor) -> str:
    """Why ``ids`` cannot be looked up; empty when they can."""
    return "" if ids.dtype in (torch.int32, torch.int64) else f"ids of dtype {ids.dtype}; use int64 or int32"
