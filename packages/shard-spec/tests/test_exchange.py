"""The exchange of rows and columns: against a plain reference, for every group of ranks in one process's loop."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks, fake_cuda
from shard_spec.apply.gradients import masked_identity
from shard_spec.distributed.exchange import RowExchange, gather_rows, scatter_rows
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.legacy.forwards import WeightSharding, look_up
from torch.nn import functional as F


@pytest.mark.ranks(4)
def test_gather_and_scatter_rows(ranks: Ranks) -> None:
    """Any rows, any columns (shared, missing, overlapping), any dtype; each is the other's backward."""
    rng, compared = random.Random(0), 0
    world, me = ranks.world_size, ranks.rank
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64]
    for number in range(30):
        generator = torch.Generator().manual_seed(number)
        width, middle = rng.randint(1, 6), rng.choice([(), (3,)])
        rows = tuple(rng.choice([2, 2, 0, 1, 3]) if number % 3 else 2 for _ in range(world))
        columns = tuple(
            (start, rng.randint(0, width - start)) for start in (rng.randint(0, width) for _ in range(world))
        )
        if number % 4 == 0:
            columns = ((0, width),) * world
        primary = tuple(rng.random() < 0.8 for _ in range(world))
        exchange = RowExchange(dist.group.WORLD, rows, columns, width, primary)  # type: ignore[arg-type]  # initialized
        dtype = dtypes[number % len(dtypes)]
        batch = (8 * torch.rand(sum(rows), *middle, width, generator=generator)).to(dtype)
        start, (first, size) = sum(rows[:me]), columns[me]
        column_sharded = gather_rows(batch[start : start + rows[me]], exchange)
        assert torch.equal(column_sharded, batch[..., first : first + size])
        parts = [(4 * torch.rand(sum(rows), *middle, c[1], generator=generator)).to(dtype) for c in columns]
        total = torch.zeros(sum(rows), *middle, width, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        for part, (at, length), counts in zip(parts, columns, primary, strict=True):
            if counts:
                total[..., at : at + length] += part
        row_sharded = scatter_rows(parts[me], exchange)
        assert torch.equal(row_sharded, total[start : start + rows[me]].to(dtype))
        assert row_sharded.dtype == dtype
        compared += 2
        if dtype == torch.float64:
            own = batch[start : start + rows[me]].clone().requires_grad_()
            gather_rows(own, exchange).backward(parts[me])
            assert own.grad is not None
            assert torch.equal(own.grad, row_sharded)
            compared += 1
    assert compared > 60


def test_nothing_is_read_back_from_the_device() -> None:
    """On an accelerator the lookups and exchanges issue work and never wait for it."""
    with fake_cuda(rank=1, world_size=2) as device:
        columns = ((0, 3), (3, 3))
        exchange = RowExchange(dist.group.WORLD, (2, 4), columns, 6, (True, True))  # type: ignore[arg-type]  # initialized
        x = torch.randn(4, 6, device=device)
        column_sharded = gather_rows(x, exchange)
        assert (column_sharded.shape, column_sharded.device) == ((6, 3), device)
        assert scatter_rows(column_sharded, exchange).shape == (4, 6)
        assert masked_identity(column_sharded, forward=False, backward=True).device == device
        table, ids = torch.randn(5, 3, device=device), torch.randint(0, 9, (6, 2), device=device)
        for option in (False, True):
            found = look_up(ids, table, (5, 4), 9, 7, option)
            assert (found.shape, found.device) == ((6, 2, 3), device)
        assert look_up(ids, table[:0], (9, 0), 9, None).device == device


def test_a_lookup_in_pieces_is_a_lookup() -> None:
    table, ids = torch.randn(9, 3), torch.randint(0, 9, (4, 2))
    for sizes in ([9], [5, 4], [3, 3, 3, 0], [0, 1, 8]):
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        pieces = [
            look_up(ids, table[start : start + size], (start, size), 9, 2)
            for start, size in zip(starts, sizes, strict=True)
        ]
        assert torch.equal(torch.stack(pieces).sum(0), F.embedding(ids, table, 2))


def test_cuts_of_a_weight() -> None:
    mesh = MeshSpec({"r": 2, "a": 2, "b": 2}, ranks=[7, 6, 5, 4, 3, 2, 1, 0])
    cut = WeightSharding(Layout(mesh, "a:S(0), b:S(-1)"), (5, 3), tuple(range(8)))
    assert cut.rows == ((3, 2), (3, 2), (0, 3), (0, 3)) * 2
    assert cut.columns == ((2, 1), (0, 2)) * 4
    assert cut.primary == (False,) * 4 + (True,) * 4
    # Ranks 7, 5 (and their replicas 3, 1) are the first of those that share rows.
    assert [rank for rank in range(8) if cut.is_first_replica(rank, 1)] == [1, 3, 5, 7]
    assert [rank for rank in range(8) if cut.is_first_replica(rank, 0)] == [2, 3, 6, 7]
