"""dp-partition's graph of an unmodified step trains as one device does; shard-reshard then moves its weights."""

from __future__ import annotations

import dp_partition
import pytest
import torch
import torch.distributed as dist
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from small_models import is_sharded, new_batches, new_model, reference, rows_of, train_step
from torch.distributed.tensor import DTensor

NUM_STEPS = 6


def before_ranks() -> None:
    """Estimate a step, which traces it: each rank forked later traces its own in half the time."""
    if torch.version.cuda is None:  # a backward of a build with CUDA starts threads, and those cannot be forked
        model = new_model()
        batch = new_batches(1)[0]
        optimizer = torch.optim.AdamW(model.parameters())
        assert dp_partition.estimate(train_step, model, optimizer, batch, world=2, style="fully_shard").peak_bytes > 0


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_partitioned_step_trains_as_on_one_device(ranks: Ranks, style: str) -> None:
    _train_as_on_one_device(ranks, style)


@pytest.mark.ranks(2)
def test_the_default_style_shards(ranks: Ranks) -> None:
    _train_as_on_one_device(ranks, "default")


def _train_as_on_one_device(ranks: Ranks, style: str) -> None:
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


@pytest.mark.ranks(2)
def test_a_step_is_a_graph_after_other_training_in_its_process(ranks: Ranks) -> None:
    """Checks that tp-styles and the bridge install for the process leave a plain optimizer as it is."""
    mesh = ranks.mesh((1, 2), ("dp", "tp"))
    bridged = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    plan = {"0": tp_styles.ColwiseParallel(), "1": tp_styles.RowwiseParallel()}
    tp_styles.apply_plan(bridged, mesh["tp"], plan)
    wrapped = tp_ddp_bridge.wrap_ddp(bridged, mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for _ in range(2):
        wrapped(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    model = new_model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dp_partition.compile(train_step, mesh=ranks.mesh((2,), ("dp",)), style="fully_shard")
    expected, _ = reference(2)
    for batch, loss in zip(new_batches(2), expected, strict=True):
        mean = step(model, plain, rows_of(batch, ranks.rank, 2)).clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean.item() / 2, loss, rtol=1e-12, atol=0)
    assert step.num_traces == 1
