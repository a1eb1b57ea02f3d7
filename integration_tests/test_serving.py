"""Trained weights move from a tp x dp layout to a serving layout over other dims and ranks, and to one rank."""

from __future__ import annotations

import pytest
import shard_reshard
import shard_spec
import torch
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from small_models import new_batches, new_model, rows_of, train_step
from torch.distributed.tensor import DTensor


@pytest.mark.ranks(2, 4)
def test_weights_of_a_2d_trainer_serve_on_all_ranks_and_on_one(ranks: Ranks) -> None:
    dp, tp = ranks.world_size // 2, 2
    mesh = ranks.mesh((dp, tp), ("dp", "tp"))
    model = new_model()
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"dp": dp, "tp": tp})).build_plan(model)
    tp_styles.apply_plan(model, mesh["tp"], tp_styles.from_sharding_plan(plan, model))
    ddp = tp_ddp_bridge.wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for batch in new_batches(5):
        train_step(ddp, optimizer, rows_of(batch, mesh.get_local_rank("dp"), dp))
    trained = dict(model.state_dict())
    full_state = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in trained.items()}

    serving_mesh = ranks.mesh((ranks.world_size,), ("tp",))
    serving = new_model(seed=1)
    serving_plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"tp": ranks.world_size})).build_plan(serving)
    tp_styles.apply_plan(serving, serving_mesh, tp_styles.from_sharding_plan(serving_plan, serving))
    with ranks.record(
        allow_empty=ranks.world_size == 2
    ) as log:  # on 2 ranks both layouts are the same, and nothing is sent
        shard_reshard.reshard_state_dict(trained, out=serving)
    assert log.count("all_reduce") == 0
    compared = 0
    for name, tensor in serving.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, full_state[name]), name
        compared += 1
    assert compared == 28

    single = new_model(seed=2)
    single.load_state_dict(full_state)
    ids = new_batches(1)[0][0]
    torch.testing.assert_close(serving(ids), single(ids), rtol=1e-10, atol=1e-12)
