"""A DTensor has the global shape and stride that it is given, for any shard."""

from __future__ import annotations

import pytest
import torch
from ranktest import Ranks
from shared.dtensor import as_dtensor
from torch.distributed.tensor import Replicate, Shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [5, 4, 1, 0])
def test_uneven_and_empty_shards_have_the_global_shape(ranks: Ranks, size: int) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    full = torch.arange(3.0 * size).view(size, 3)
    rows = torch.tensor_split(full, [-(-size // 2)])[ranks.rank]
    tensor = as_dtensor(rows, mesh, [Shard(0)], [size, 3])
    assert (tensor.shape, tensor.stride()) == (full.shape, full.stride())
    assert tensor.to_local().data_ptr() == rows.data_ptr()
    assert torch.equal(tensor.full_tensor(), full)


@pytest.mark.ranks(2)
def test_a_stride_that_is_given_is_the_tensors(ranks: Ranks) -> None:
    mesh, full = ranks.mesh((2,), ("tp",)), torch.arange(12.0).view(3, 4).t()
    for placement, local in ((Replicate(), full), (Shard(0), full.chunk(2)[ranks.rank])):
        tensor = as_dtensor(local, mesh, [placement], full.shape, full.stride())
        assert tensor.stride() == full.stride() == (1, 4)
        assert torch.equal(tensor.full_tensor(), full)
