"""DTensor and local shards, bridged or not, have the clipped norm and the state dict of one process."""

from __future__ import annotations

import pytest
import shard_spec
import torch
import torch.distributed as dist
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from small_models import is_sharded, new_batches, new_model
from torch import nn
from torch.distributed.tensor import DTensor

MAX_NORM = 0.1


def one_process() -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return norm, clipped gradients and weights after one backward on one device."""
    model = new_model()
    model(*new_batches(1)[0]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(norm), gradients, dict(model.state_dict())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("bridged", [False, True], ids=["plain", "bridged"])
def test_norm_and_state_dict_are_those_of_one_process(ranks: Ranks, bridged: bool) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    model = new_model()
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"tp": ranks.world_size})).build_plan(model)
    tp_styles.apply_plan(model, mesh, tp_styles.from_sharding_plan(plan, model))
    if bridged:
        tp_ddp_bridge.pre_dp_module_transform(model)
    model(*new_batches(1)[0]).backward()

    norm, gradients, weights = one_process()
    for clip in (
        tp_styles.clip_grad_norm_,
        tp_ddp_bridge.clip_grad_norm_,
    ):  # the second function finds gradients that the first one has clipped
        total_norm = float(clip(model.parameters(), MAX_NORM))
        assert total_norm == pytest.approx(norm, rel=1e-12)
        norm *= MAX_NORM / (norm + 1e-6)  # torch's clipping divides by the norm plus 1e-6
    everywhere = [None] * ranks.world_size
    dist.all_gather_object(everywhere, total_norm)
    assert len(set(everywhere)) == 1, everywhere

    state = model.state_dict()
    assert state.keys() == weights.keys()
    compared = 0
    for name, expected in weights.items():
        tensor = state[name]
        assert tensor.shape == expected.shape, name
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected), name
        compared += 1
    assert compared == 28
    sharded = sum(map(is_sharded, state.values()))
    assert sharded == 16, sharded
    assert len(gradients) == 28
