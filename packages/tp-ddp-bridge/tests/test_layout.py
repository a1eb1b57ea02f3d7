"""Parameters made local by others, with ``_sharding_info``, are left alone, but counted right."""

from __future__ import annotations

from typing import Any

import bridge_models as models
import pytest
import torch
import torch.distributed as dist
from ranktest import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tp_ddp_bridge import check_replicas, clip_grad_norm_, grad_norm, undo_dp_transform, wrap_ddp
from tp_ddp_bridge.module.transform import survey


class Reduce(torch.autograd.Function):
    """Megatron's g: a sum over tensor-parallel ranks in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class LocalMLP(nn.Module):
    """The first two layers by hand on local shards, the last two by torch's styles."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.group = mesh.get_group()
        first = models.seeded(models.MLP)
        self.up, self.down = first.up, first.down
        self.rest = models.seeded(models.MLP, 1)
        for layer, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            full = getattr(layer, name)
            local = nn.Parameter(distribute_tensor(full.detach(), mesh, [Shard(dim)]).to_local().contiguous())
            info: Any = (mesh, (Shard(dim),), full.shape, tuple(full.stride()))
            local._sharding_info = info  # type: ignore[attr-defined]
            setattr(layer, name, local)
        parallelize_module(self.rest, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Any:
        partial = nn.functional.linear(torch.relu(self.up(x)), self.down.weight)
        return self.rest(Reduce.apply(partial, self.group) + self.down.bias)  # type: ignore[no-untyped-call]


class WholeMLP(nn.Module):
    """The same in one process."""

    def __init__(self) -> None:
        super().__init__()
        first = models.seeded(models.MLP)
        self.up, self.down = first.up, first.down
        self.rest = models.seeded(models.MLP, 1)

    def forward(self, x: Tensor) -> Any:
        return self.rest(self.down(torch.relu(self.up(x))))


@pytest.mark.ranks(4)
def test_local_parameters_of_others_train_beside_leaves(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    task = models.vectors()
    reference = WholeMLP()
    ddp = wrap_ddp(LocalMLP(mesh["tp"]), mesh=mesh)
    surveyed = survey(ddp.module)
    assert len(surveyed.meshes) - len(surveyed.bridgeable) == 3  # up.weight, up.bias, down.weight
    assert "up.weight" not in [each.name for each in surveyed.bridgeable]
    assert tuple(surveyed.plain) == ("down.bias", "rest.head.weight", "rest.head.bias")
    mine, theirs = (torch.optim.SGD(model.parameters(), 0.1) for model in (ddp, reference))
    for step in range(5):
        norms = []
        for model, optimizer, clip, part in (
            (ddp, mine, clip_grad_norm_, (mesh["dp"].get_local_rank(), 2)),
            (reference, theirs, nn.utils.clip_grad_norm_, (0, 1)),
        ):
            x, y = task.part(step, *part)
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(model(x), y))
            norms.append(float(clip(model.parameters(), 0.05)))
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    compared = 0
    expected = reference.state_dict()
    for name, value in ddp.module.state_dict().items():
        full = models.whole(value)
        if not isinstance(value, DTensor) and full.shape != expected[name].shape:
            info = dict(ddp.module.named_parameters())[name]._sharding_info
            full = models.whole(DTensor.from_local(value, info[0], info[1], shape=info[2], stride=info[3]))
        assert float((full - expected[name]).abs().max()) <= 5e-7, name
        compared += 1
    assert compared == 10
    assert check_replicas(ddp, mesh["tp"].get_group()) == 1 + 1 + 2  # down.bias; rest.down.bias; rest.head
    undo_dp_transform(ddp.module)
    assert float(grad_norm(ddp.module.parameters())) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.ranks(4)
def test_groups_that_mix_with_local_parameters_are_refused(ranks: Ranks) -> None:
    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"mesh-mismatch.*up\.weight"):
        wrap_ddp(LocalMLP(mesh["tp"]), group=dist.group.WORLD)
