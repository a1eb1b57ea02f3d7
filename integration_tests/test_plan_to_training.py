"""shard-spec's plan becomes tp-styles' styles; the styled module, wrapped in DDP, trains as one device does."""

from __future__ import annotations

import copy

import pytest
import shard_spec
import torch
import torch.distributed as dist
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from small_models import is_sharded, new_batches, new_model, reference, rows_of, train_step
from torch import nn
from torch.distributed.tensor import DTensor

NUM_STEPS = 6


def mesh_sizes(ranks: Ranks) -> tuple[int, int]:
    return (ranks.world_size // 2, 2)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks(2, 4)
def test_a_planned_model_trains_in_ddp_as_on_one_device(ranks: Ranks) -> None:
    dp, tp = mesh_sizes(ranks)
    mesh = ranks.mesh((dp, tp), ("dp", "tp"))
    model = new_model()
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"dp": dp, "tp": tp})).build_plan(model)
    assert plan.validate(model, world_size=ranks.world_size) == ()
    tp_styles.apply_plan(model, mesh["tp"], tp_styles.from_sharding_plan(plan, model))
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    expected_losses, expected = reference(NUM_STEPS)
    losses = []
    for batch in new_batches(NUM_STEPS):
        loss = train_step(ddp, optimizer, rows_of(batch, mesh.get_local_rank("dp"), dp))
        dist.all_reduce(loss, group=mesh.get_group("dp"))
        losses.append(loss.item() / dp)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)  # in float64 only the order of sums differs

    full_state = {name: full(tensor) for name, tensor in model.state_dict().items()}
    assert full_state.keys() == expected.keys()
    assert len(full_state) == 28
    for name, tensor in expected.items():
        torch.testing.assert_close(full_state[name], tensor, rtol=1e-9, atol=1e-12, msg=f"{name} differs")
    sharded = [name for name, tensor in model.state_dict().items() if is_sharded(tensor)]
    assert len(sharded) == 16, sharded


@pytest.mark.ranks(2, 4)
def test_live_bytes_are_those_of_the_plan(ranks: Ranks) -> None:
    dp, tp = mesh_sizes(ranks)
    mesh = ranks.mesh((dp, tp), ("dp", "tp"))
    model = new_model()
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"dp": dp, "tp": tp})).build_plan(model)
    foretold = plan.memory(model, optimizer="adamw").on(ranks.rank)
    tp_styles.apply_plan(model, mesh["tp"], tp_styles.from_sharding_plan(plan, model))
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    ddp(*rows_of(new_batches(1)[0], mesh.get_local_rank("dp"), dp)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]

    def num_bytes(tensors: list[torch.Tensor]) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    assert len(gradients) == 28
    assert num_bytes(list(model.parameters())) == foretold["parameters"]
    assert num_bytes(gradients) == foretold["gradients"]
    assert num_bytes(state) == foretold["optimizer"]


class _Tagger(nn.Module):
    """Lookups in a table of `rows` rows, a norm written by hand and a head: what a row lookup returns is no shard."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(rows, 8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.ranks(2, 4)
@pytest.mark.filterwarnings("ignore:.*all of its input values are equal")  # ids of a table with one row
@pytest.mark.parametrize("rows", [5, 1], ids=["uneven", "a-rank-without-rows"])
def test_lookups_in_a_bridged_table_are_values_of_a_batch(ranks: Ranks, rows: int) -> None:
    """Each package has its own class for shards: tp-styles computes with leaves of the bridge as with its own."""
    dp, tp = mesh_sizes(ranks)
    mesh = ranks.mesh((dp, tp), ("dp", "tp"))
    torch.manual_seed(0)
    alone = _Tagger(rows).double()
    model = copy.deepcopy(alone)
    styles = {
        "table": tp_styles.RowwiseParallel(),
        "up": tp_styles.ColwiseParallel(),
        "down": tp_styles.RowwiseParallel(),
    }
    tp_styles.apply_plan(model, mesh["tp"], styles)
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    trained = torch.optim.AdamW(ddp.parameters(), lr=1e-2), torch.optim.AdamW(alone.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        ids = torch.randint(rows, (4, 6), generator=generator)
        for run, optimizer, batch in (
            (ddp, trained[0], ids.chunk(dp)[mesh.get_local_rank("dp")]),
            (alone, trained[1], ids),
        ):
            optimizer.zero_grad()
            run(batch).square().mean().backward()
            optimizer.step()
    state = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12, msg=f"{name} differs")
    assert len(state) == 5
