"""Bad input, a style named "fully_sharded" for example, is one clear error on every rank before any data moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import dp_partition
import pytest
import shard_reshard
import shard_spec
import torch
import tp_ddp_bridge
import tp_styles
from ranktest import Ranks
from small_models import new_model


@pytest.mark.ranks(2, 4)
def test_an_unknown_pattern_and_a_size_that_does_not_divide_come_in_one_error(ranks: Ranks) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    model = new_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = {"blocks.*.attention.wq": tp_styles.ColwiseParallel(), "nothing.*": tp_styles.RowwiseParallel()}
    with ranks.record(allow_empty=True) as log, pytest.raises(tp_styles.PlanError) as error:
        tp_styles.apply_plan(model, mesh, plan)
    assert len(error.value.problems) == 2
    assert set(log.ops) == {"all_gather"}, "ranks tell each other what they found, so that all raise"
    assert log.bytes_sent() < 4096 < sum(tensor.nbytes for tensor in before.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.ranks(2, 4)
def test_a_world_that_does_not_fit_the_plan(ranks: Ranks) -> None:
    model = new_model()
    plan = shard_spec.MegatronPlanner(mesh=shard_spec.MeshSpec({"tp": 8})).build_plan(model)
    problems = plan.validate(model, world_size=ranks.world_size)
    assert [p for p in problems if "8" in p.found or "8" in p.hint or str(ranks.world_size) in p.found], problems


@pytest.mark.ranks(2, 4)
def test_layouts_for_another_number_of_ranks(ranks: Ranks) -> None:
    tensor = torch.arange(16.0)
    mesh = shard_spec.MeshSpec({"x": 8})
    source, target = (shard_spec.Layout(mesh, text) for text in ([shard_spec.Shard(0)], [shard_spec.Replicate()]))
    with ranks.record(allow_empty=True) as log, pytest.raises(shard_spec.PlanError, match="rank 7"):
        shard_reshard.reshard(tensor, source, target, shape=(128,))
    assert log.count("all_to_all") == 0


@pytest.mark.ranks(4)
def test_a_mesh_without_a_data_parallel_axis(ranks: Ranks) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    model = new_model()
    tp_styles.apply_plan(model, mesh, {"blocks.*.up": tp_styles.ColwiseParallel(output_layouts=None)})
    with pytest.raises(ValueError, match=r"dp|data|group"):
        tp_ddp_bridge.wrap_ddp(model)


def test_an_unknown_style_name_and_a_missing_mesh_come_in_one_error() -> None:
    with pytest.raises(dp_partition.PlanError, match="fully_shard") as error:
        dp_partition.compile(lambda model, optimizer, batch: None, mesh=None, style="fully_sharded")  # type: ignore[arg-type]  # the planted mistake
    assert [problem.code for problem in error.value.problems] == ["invalid-argument", "missing-mesh"]


def test_a_wrong_type_at_an_entry_point_names_the_right_call() -> None:
    mesh = shard_spec.MeshSpec({"dp": 2, "tp": 4})
    model, optimizer = torch.nn.Linear(8, 8), torch.optim.SGD([torch.zeros(1)])
    memory = partial(shard_spec.ShardingPlan({}, mesh=mesh).memory, dtype=torch.bfloat16)  # type: ignore[arg-type]  # the planted mistake
    mistakes: list[tuple[str, Callable[..., object], tuple[object, ...]]] = [
        ("MegatronPlanner(mesh)", shard_spec.compose, (shard_spec.MegatronPlanner, shard_spec.FullyShardPlanner)),
        ("Layout(mesh, placements)", shard_spec.Layout, ("dp:S(0)", mesh)),
        ("bfloat16", memory, (model,)),
        ("plan_reshard(shape, dtype", shard_reshard.plan_reshard, (torch.float32, (8, 12), "4: R", "4: S(0)")),
        ("plan_reshard(shape, dtype", shard_reshard.Resharder, ("4: S(0)",)),
        ("reshard(tensor, src, dst)", shard_reshard.redistribute, (torch.zeros(8), None, ["S(0)"])),
        ("train_step(model, optimizer, batch)", dp_partition.compile, (model,)),
        ("check_optimizer(module, optimizer)", tp_ddp_bridge.check_optimizer, (optimizer, model)),
    ]
    for right_call, call, arguments in mistakes:
        with pytest.raises(ValueError, match=re.escape(right_call)):
            call(*arguments)
