"""wrap_ddp: which ranks are data parallel, and what is refused before anything is broadcast."""

from __future__ import annotations

from typing import Any

import bridge_models as models
import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from tp_ddp_bridge import PlanError, is_bridged, pre_dp_module_transform, undo_dp_transform, wrap_ddp


def trained(ddp: Any, ranks: Ranks, index: int, count: int) -> None:
    reference = models.seeded(models.MLP)
    task = models.vectors()
    models.train(reference, torch.optim.SGD(reference.parameters(), 0.1), task)
    models.train(ddp, torch.optim.SGD(ddp.parameters(), 0.1), task, index=index, count=count)
    models.assert_same_state(ddp.module.state_dict(), reference.state_dict(), count=6, atol=5e-7)


@pytest.mark.ranks(4)
def test_ways_to_say_which_ranks(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    index = mesh["dp"].get_local_rank()
    for kwargs in ({"mesh": mesh}, {"mesh": mesh["dp"]}, {"group": mesh["dp"].get_group()}):
        ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), **kwargs)
        assert isinstance(ddp, DistributedDataParallel)
        assert dist.get_process_group_ranks(ddp.process_group) == [ranks.rank % 2, ranks.rank % 2 + 2]
        trained(ddp, ranks, index, 2)
    # the seed's two lines still do, and so does torch's argument, whose own transform then finds nothing to do
    ddp = DistributedDataParallel(
        pre_dp_module_transform(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])), device_mesh=mesh["dp"]
    )
    trained(ddp, ranks, index, 2)
    # no data parallelism, no tensor parallelism
    narrow = ranks.mesh((1, 4), ("dp", "tp"))
    trained(wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), narrow["tp"]), mesh=narrow), ranks, 0, 1)
    wide = ranks.mesh((4, 1), ("dp", "tp"))
    trained(wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), wide["tp"]), mesh=wide), ranks, ranks.rank, 4)
    trained(wrap_ddp(models.seeded(models.MLP), group=dist.group.WORLD), ranks, ranks.rank, 4)


@pytest.mark.ranks(4)
def test_three_axes(ranks: Ranks) -> None:
    # two data axes
    mesh = ranks.mesh((2, 2, 1), ("replicas", "data", "tp"))
    ddp = wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh)
    assert dist.get_process_group_ranks(ddp.process_group) == [0, 1, 2, 3]
    trained(ddp, ranks, ranks.rank, 4)
    # two tensor axes: rows over one, columns over the other
    mesh = ranks.mesh((1, 2, 2), ("dp", "a", "b"))
    model = models.seeded(models.MLP)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("up", "down"):
        layer = getattr(model, name)
        for key, parameter in list(layer.named_parameters()):
            places = [Shard(0), Shard(1) if key == "weight" else Replicate()]
            layer.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh["a", "b"], places)))
    ddp = wrap_ddp(model, mesh=mesh)
    models.assert_same_state(ddp.module.state_dict(), expected, count=6, atol=0)
    assert dict(ddp.module.named_parameters())["up.weight"].shape == (16, 8)
    x = distribute_tensor(torch.ones(2, 16), mesh["a", "b"], [Replicate(), Replicate()])
    out = model.down(model.up(x)).full_tensor()
    reference = models.seeded(models.MLP)
    torch.testing.assert_close(out, reference.down(reference.up(torch.ones(2, 16))), atol=1e-6, rtol=0)
    out.sum().backward()
    reference.down(reference.up(torch.ones(2, 16))).sum().backward()
    torch.testing.assert_close(models.whole(model.up.weight.grad), reference.up.weight.grad, atol=1e-5, rtol=0)


@pytest.mark.ranks(4)
def test_arguments_that_do_not_fit(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    model = models.parallelize_mlp(models.MLP(), mesh["tp"])
    with ranks.record(allow_empty=True) as log:
        with pytest.raises(ValueError, match="missing-mesh"):
            wrap_ddp(model)
        with pytest.raises(ValueError, match="conflicting-arguments"):
            wrap_ddp(model, mesh=mesh, group=mesh["dp"].get_group())
        for wrong in ({"group": mesh["dp"]}, {"group": "dp"}, {"mesh": "dp"}, {"mesh": mesh["dp"].get_group()}):
            with pytest.raises(PlanError, match=r"wrong-type.*mesh\.get_group\('dp'\)"):
                wrap_ddp(model, **wrong)
        with pytest.raises(TypeError, match="device_mesh="):
            wrap_ddp(model, mesh=mesh, device_mesh=mesh["dp"])
        with pytest.raises(ValueError, match="missing-mesh"):
            wrap_ddp(model, mesh=mesh["tp"])
        # DDP over all ranks would average different shards, silently: the shapes agree
        with pytest.raises(ValueError, match=r"mesh-mismatch.*up\.weight") as caught:
            wrap_ddp(model, group=dist.group.WORLD)
        assert len(caught.value.problems) == 4  # type: ignore[attr-defined]  # every parameter, in one error
    assert not log.events and not is_bridged(model)  # found on every rank before anything was sent or changed
    mixed = models.MLP()
    mixed.up.weight = nn.Parameter(distribute_tensor(mixed.up.weight.detach(), mesh, [Replicate(), Shard(0)]))
    with pytest.raises(ValueError, match=r"missing-mesh|mesh-mismatch"):
        wrap_ddp(mixed, mesh=mesh)
    with pytest.raises(ValueError, match="already-applied"):
        pre_dp_module_transform(wrap_ddp(model, mesh=mesh))


@pytest.mark.ranks(4)
def test_ranks_that_hold_different_shards_are_found_before_the_broadcast(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    pairs: Any = [[0, 3], [1, 2]]  # other tensor-parallel coordinates
    crossed, _ = dist.new_subgroups_by_enumeration(pairs)
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    with pytest.raises(PlanError, match="ranks-disagree"):
        wrap_ddp(model, group=crossed)
    assert not is_bridged(model) and all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    with pytest.raises(TypeError, match="no_such"):
        wrap_ddp(model, mesh=mesh, no_such=1)
    assert not is_bridged(model) and isinstance(next(model.parameters()), DTensor)
    models.assert_same_state(model.state_dict(), {n: models.whole(v) for n, v in before.items()}, count=6, atol=0)
    odd = models.parallelize_mlp(models.seeded(lambda: models.MLP(16 if ranks.rank < 2 else 32)), mesh["tp"])
    with pytest.raises(PlanError, match="ranks-disagree"):
        wrap_ddp(odd, mesh=mesh)
    # a plain parameter that is not equal on tensor-parallel ranks: a seed that depends on the rank
    drifted = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    with torch.no_grad():
        drifted.head.bias[0] += 1e-6 * (ranks.rank % 2)
    with pytest.raises(PlanError, match=r"replicas-differ.*head\.bias") as caught:
        wrap_ddp(drifted, mesh=mesh)
    assert len(caught.value.problems) == 1


@pytest.mark.ranks(4)
def test_torchs_own_transform_is_refused(ranks: Ranks) -> None:
    # DDP(device_mesh=slice) runs it by itself; it has made frozen parameters trainable, so it cannot be adopted.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    model.up.weight.requires_grad_(False)
    ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
    assert dict(model.named_parameters())["up.weight"].requires_grad  # the defect
    with pytest.raises(ValueError, match="unsupported-wrapper"):
        pre_dp_module_transform(model)
    ddp(torch.ones(1, 16))
    with pytest.raises(ValueError, match="unsupported-wrapper"):
        wrap_ddp(model, mesh=mesh)


@pytest.mark.ranks(4)
def test_undone_module_is_refused_by_its_ddp(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    ddp = wrap_ddp(model, mesh=mesh)
    with pytest.raises(ValueError, match="already-applied"):
        undo_dp_transform(ddp)
    undo_dp_transform(ddp.module)
    with pytest.raises(RuntimeError, match="undo_dp_transform"):
        ddp(torch.ones(1, 16))
    ddp = wrap_ddp(model, mesh=mesh)
    # Other leaves than DDP was made with: torch reduces the old ones, and every data-parallel rank goes its own way.
    ddp.load_state_dict(ddp.state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"parameter-replaced.*up\.weight"):
        ddp(torch.ones(1, 16))
    trained(wrap_ddp(model, mesh=mesh), ranks, mesh["dp"].get_local_rank(), 2)


@pytest.mark.ranks(4)
def test_communication_is_that_of_plain_ddp(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    data_ranks = tuple(dist.get_process_group_ranks(mesh["dp"].get_group()))

    def one_step(model: Any) -> list[tuple[str, int]]:
        x, y = models.vectors().part(0, 0, 1)
        for _ in range(4):  # DDP arranges its buckets anew after the first
            with ranks.record() as log:
                torch.autograd.backward(nn.functional.mse_loss(model(x), y))
        return [(event.op, sum(event.bytes_sent)) for event in log.events if event.ranks == data_ranks]

    plain = one_step(DistributedDataParallel(models.seeded(models.MLP), process_group=mesh["dp"].get_group()))
    mine = one_step(wrap_ddp(models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"]), mesh=mesh))
    assert [op for op, _ in mine] == [op for op, _ in plain] == ["all_reduce"]
    # up.weight, up.bias and down.weight are halves
    assert mine[0][1] == plain[0][1] - (256 + 16 + 256) * 4


@pytest.mark.ranks(4)
def test_on_delayed_groups(ranks: Ranks) -> None:
    # outputs of collectives are poisoned until they are waited for
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    with ranks.delayed():
        for sequence in (False, True):
            task = models.tokens()
            small = models.seeded(lambda: models.GPT(depth=1))
            model = models.parallelize_gpt(small, mesh["tp"], sequence=sequence)
            ddp = wrap_ddp(model, mesh=mesh)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            for step in range(2):
                x, y = task.part(step, mesh["dp"].get_local_rank(), 2)
                optimizer.zero_grad()
                torch.autograd.backward(task.loss(ddp(x), y))
                assert float(tp_norm(ddp)) < 100.0
                optimizer.step()
            assert all(bool(parameter.isfinite().all()) for parameter in ddp.parameters())


def tp_norm(ddp: Any) -> torch.Tensor:
    from tp_ddp_bridge import clip_grad_norm_

    return clip_grad_norm_(ddp.parameters(), 1.0)


@pytest.mark.ranks(4)
def test_styles_of_torch_by_hand_and_dtensor_outputs(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    model = parallelize_module(
        models.seeded(models.MLP),
        mesh["tp"],
        {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)},
    )
    ddp = wrap_ddp(model, mesh=mesh, find_unused_parameters=True)
    out = ddp(torch.ones(2, 16))
    assert isinstance(out, DTensor)
    total: Any = out.sum()
    total.full_tensor().backward()
    assert sum(parameter.grad is not None for parameter in ddp.parameters()) == 6


@pytest.mark.ranks(4)
def test_a_problem_of_one_rank_raises_on_all(ranks: Ranks) -> None:
    # A verdict of a sub-group would leave the others waiting for the group's timeout.
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    ways: list[dict[str, Any]] = [{"mesh": mesh}, {"mesh": mesh["dp"]}, {"group": mesh["dp"].get_group()}]

    def drifted(model: Any) -> None:
        with torch.no_grad():
            model.head.bias[0] += 1e-6

    def partial(model: Any) -> None:
        value = DTensor.from_local(torch.ones(16), mesh["tp"], [Partial()])
        model.down.register_parameter("bias", nn.Parameter(value))

    def frozen(model: Any) -> None:
        model.up.weight.requires_grad_(False)

    def another_dtype(model: Any) -> None:
        model.head.double()

    def another_layer(model: Any) -> None:
        model.extra = nn.Linear(2, 2)

    raised = 0
    for spoil, code in (
        (drifted, "replicas-differ"),
        (partial, "partial-value"),
        (frozen, "ranks-disagree"),
        (another_dtype, "ranks-disagree"),
        (another_layer, "ranks-disagree"),
    ):
        for way in ways:
            model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
            if ranks.rank == 3:
                spoil(model)
            before = dict(model.named_parameters())
            with pytest.raises(PlanError, match=code):
                wrap_ddp(model, **way)
            assert not is_bridged(model)
            assert all(value is before[name] for name, value in model.named_parameters())
            raised += 1
    assert raised == 15
    # Without tensor parallelism on one rank, the mesh is all that ranks share.
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    if ranks.rank == 3:
        model = models.seeded(models.MLP)
    with pytest.raises(PlanError, match="ranks-disagree"):
        wrap_ddp(model, mesh=mesh)
    model = models.parallelize_mlp(models.seeded(models.MLP), mesh["tp"])
    with pytest.raises(PlanError, match=r"ranks-disagree.*bucket_cap_mb"):
        wrap_ddp(model, mesh=mesh, bucket_cap_mb=1.0 if ranks.rank == 2 else 25.0)
    stepped = torch.optim.Adafactor(model.parameters()) if ranks.rank == 1 else torch.optim.SGD(model.parameters())
    with pytest.raises(PlanError, match="not-elementwise"):
        wrap_ddp(model, mesh=mesh, optimizers=stepped)
    trained(wrap_ddp(model, mesh=mesh), ranks, mesh["dp"].get_local_rank(), 2)
