"""dp-partition's graph of an unmodified step trains as one device does; shard-reshard then moves its weights."""

from __future__ import annotations

import dp_partition
import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from small_models import is_sharded, new_batches, new_model, reference, rows_of, train_step
from torch.distributed.tensor import DTensor

NUM_STEPS = 6


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("style", ["replicate", "fully_shard", "default"])
def test_a_partitioned_step_trains_as_on_one_device(ranks: Ranks, style: str) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("dp",))
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dp_partition.compile(train_step, mesh=mesh, style=dp_partition.DataParallelStyle[style.upper()])

    expected_losses, expected = reference(NUM_STEPS)
    losses = []
    for batch in new_batches(NUM_STEPS):
        loss = step(model, optimizer, rows_of(batch, ranks.rank, ranks.world_size)).clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / ranks.world_size)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)  # in float64 only the order of sums differs

    compared = 0
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        torch.testing.assert_close(full, expected[name], rtol=1e-9, atol=1e-12)
        compared += 1
    assert compared == 28
    sharded = sum(map(is_sharded, model.state_dict().values()))
    assert sharded == (0 if style == "replicate" else 28)
