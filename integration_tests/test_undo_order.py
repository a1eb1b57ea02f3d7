"""`handle.undo()` of tp-styles is refused while tp-ddp-bridge has the model's parameters transformed."""

from __future__ import annotations

import pytest
import shard_spec
import torch
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from small_models import new_batches, new_model


@pytest.mark.ranks(2)
def test_undo_of_a_handle_while_bridged_is_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = new_model()
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"tp": 2})).build_plan(model)
    handle = tp_styles.apply_plan(model, mesh, tp_styles.from_sharding_plan(plan, model))
    tp_ddp_bridge.pre_dp_module_transform(model)
    before = dict(model.named_parameters())
    with pytest.raises(tp_ddp_bridge.PlanError, match="undo_dp_transform"):
        handle.undo()
    same = [value is before[name] for name, value in model.named_parameters()]
    assert len(same) > 5 and all(same)
    model(*new_batches(1)[0]).backward()
    tp_ddp_bridge.undo_dp_transform(model)
    handle.undo()
    expected = new_model().state_dict()
    state = model.state_dict()
    assert sum(torch.equal(state[name], value) for name, value in expected.items()) == len(expected) == len(state)
