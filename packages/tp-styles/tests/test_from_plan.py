"""A sharding plan's layouts as styles."""

from __future__ import annotations

import copy

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard


@pytest.mark.extra("shard-spec")
def test_layouts_as_styles() -> None:
    from shard_spec import InterleavedShard, MeshSpec, ShardingPlan

    mesh = MeshSpec({"dp": 2, "tp": 2})
    model = models.GPT(tied=True)
    plan = ShardingPlan(
        {
            "**.[qkv].*": "tp:S(0)",
            "**.up.*": {"dp": Shard(0), "tp": Shard(0)},
            "**.proj.weight": "tp:S(1)",
            "layers.0.mlp.down.weight": "tp:S(1)",
            "embed.weight": "tp:S(0)",
        },
        mesh=mesh,
    )
    found = tp.from_sharding_plan(plan, model)
    assert found["embed"] == tp.RowwiseParallel()
    assert found["head"] == tp.ColwiseParallel(output_layouts=Replicate())
    assert found["layers.0.attn.q"] == tp.ColwiseParallel()
    assert found["layers.0.attn.proj"] == tp.RowwiseParallel(input_layouts=Shard(-1))
    assert found["layers.1.mlp.up"] == tp.ColwiseParallel(output_layouts=Replicate())  # nobody takes a shard there
    assert len(found) == 2 + 2 * 5 + 1 + 2
    assert {name for name, style in found.items() if type(style).__name__ == "LocalHeads"} == {
        "layers.0.attn",
        "layers.1.attn",
    }
    assert tp.plan_styles(model, found, 2).problems == ()

    fused = ShardingPlan({"*": InterleavedShard(0, 3)}, mesh={"tp": 2})
    assert tp.from_sharding_plan(fused, nn.Linear(4, 6)) == {"": tp.FusedColwiseParallel(3, output_layouts=Replicate())}
    with pytest.raises(tp.PlanError) as caught:
        tp.from_sharding_plan(
            ShardingPlan({"norm.*": "tp:S(0)", "**.up.weight": "tp:S(0)", "**.down.*": "tp:S(0)"}, mesh=mesh), model
        )
    assert {p.code for p in caught.value.problems} == {"no-style", "bias-layout"}
    with pytest.raises(tp.PlanError, match="no-such-axis"):
        tp.from_sharding_plan(plan, model, axis="ep")


@pytest.mark.extra("shard-spec")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("fused", "tied"), [(False, True), (True, False)])
def test_a_planners_plan(ranks: Ranks, fused: bool, tied: bool) -> None:
    """MegatronPlanner's plan of a model it has never seen, trained."""
    from shard_spec.planners import MegatronPlanner

    mesh = ranks.mesh((2,), ("tp",))
    torch.manual_seed(0)
    model = models.GPT(vocab=18, fused=fused, tied=tied).double()
    plan = tp.from_sharding_plan(MegatronPlanner({"tp": 2}).build_plan(copy.deepcopy(model)), model)
    assert len(plan) >= 2 + 2 * (2 if fused else 6)  # fused weights only where the planner can probe their order
    batches = [torch.randint(0, 17, (2, 6)) for _ in range(5)]
    models.compare_training(
        model, lambda m: tp.apply_plan(m, mesh, plan), batches, models.next_token_loss, mesh, atol=1e-12
    )
