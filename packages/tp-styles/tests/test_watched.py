"""What a forward does to a rank's channels: cuts raise in the first forward, and nothing else does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from tp_styles.runtime.watched import Watched, unwatched, watch

Tensor = torch.Tensor

# A rank's [2, 5, 12] of 24 features.
CUT: list[Callable[[Any], object]] = [
    lambda x: x.chunk(3, dim=-1),
    lambda x: torch.chunk(x, 2, 2),
    lambda x: x.split(6, dim=-1),
    lambda x: torch.split(x, [4, 8], dim=2),
    lambda x: x.tensor_split(2, dim=-1),
    lambda x: x[..., :6],
    lambda x: x[:, :, 6:],
    lambda x: x[..., 0],
    lambda x: x.narrow(-1, 6, 6),
    lambda x: x.select(2, 3),
    lambda x: x.unbind(-1),
    lambda x: F.glu(x),
    lambda x: nn.GLU()(x),
    lambda x: F.gelu(x).mul(2).add(x).chunk(2, -1),
    lambda x: (F.dropout(x.float(), 0.0) * x)[..., 6:],
    lambda x: x.view(2, 5, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0),
    lambda x: list(x.reshape(2, 5, 3, -1).transpose(0, 2)),
    lambda x: x.unflatten(-1, (3, 4))[:, :, 0],
    lambda x: x.reshape(2, 5, 3, 4).permute(2, 0, 1, 3)[0],
    lambda x: x.flatten(0, 1)[:, :6],
    lambda x: x.view(10, 12).unsqueeze(0)[..., :2],
    lambda x: x.softmax(-1),
    lambda x: F.log_softmax(x, dim=2),
    lambda x: F.layer_norm(x, (12,)),
    lambda x: F.rms_norm(x, (12,)),
    lambda x: F.normalize(x, dim=-1),
    lambda x: x.mean(dim=-1),
    lambda x: x.sum((1, 2)),
    lambda x: x.pow(2).mean(),
    lambda x: x.max(dim=-1),
    lambda x: x.topk(2),
    lambda x: x.flip(-1),
    lambda x: F.cross_entropy(x.view(-1, 12), torch.zeros(10, dtype=torch.int64)),
    lambda x: x.view(2, 5, 3, 4).softmax(2),
]

KEPT: list[Callable[[Any], object]] = [
    lambda x: x.view(2, 5, -1, 4).transpose(1, 2).chunk(2, dim=-1),  # halves of a head
    lambda x: x.view(2, 5, 3, 4)[..., :2],
    lambda x: [y.softmax(-1) for y in x.view(2, 5, -1, 3, 2).unbind(3)],  # q, k and v of each head
    lambda x: x.view(2, 5, -1, 2, 3)[:, :, :, 0].flatten(2),
    lambda x: F.layer_norm(x.view(2, 5, 3, 4), (4,)),
    lambda x: x.chunk(2, dim=1),
    lambda x: x[0],
    lambda x: x[:, -1:],
    lambda x: (x[..., ::2], x[..., 1::2]),  # gate and up side by side
    lambda x: x[..., None, :, :12],
    lambda x: x.detach().mean(),  # for a log
    lambda x: x.sum(),  # as a loss
    lambda x: x.mean(dim=1),
    lambda x: x.sum(0)[:, 0:12],
    lambda x: x @ torch.randn(12, 4),
    lambda x: F.linear(x, torch.randn(12, 12))[..., :6],
    lambda x: torch.cat([x, x], -1)[..., :12],
    lambda x: x.view(2, 5, 1, 12)[..., :6],  # a single head
    lambda x: F.scaled_dot_product_attention(x, x, x).chunk(3, -1),
    lambda x: torch.maximum(x, x),
    lambda x: x.max(x),
    lambda x: (x.type(), x.shape, x.isnan().any(), x.tolist()),
    lambda x: x[x > 0],
    lambda x: unwatched(x).chunk(3, -1),
]

SECTIONS: list[tuple[tuple[int, ...], Callable[[Any], object], bool]] = [
    ((6,), lambda x: x.chunk(2, -1), True),
    ((6,), lambda x: x.chunk(3, -1), False),
    ((8, 10), lambda x: x.split([8, 2, 2], -1), True),
    ((8, 10), lambda x: x.split([8, 4], -1)[1].chunk(2, -1), True),
    ((8, 10), lambda x: x.split([8, 4], -1)[1].chunk(4, -1), False),
    ((8, 10), lambda x: x[..., 8:10] + x[..., 10:], True),
    ((4, 8), lambda x: x.view(2, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)[1:], True),
    ((4, 8), lambda x: x.view(2, 5, -1, 6), False),  # sections, looked at as heads
    ((8, 10), lambda x: x.view(2, 5, -1, 2)[:, :, :4], True),
]


def watched(cuts: tuple[int, ...] = ()) -> Tensor:
    return watch(torch.ones(2, 5, 12, requires_grad=True) * 1, "mlp.up", cuts)


def test_what_raises_and_what_does_not() -> None:
    """All of it is right on the whole activation; on a part of it the first list is something else."""
    for act in CUT:
        act(torch.ones(2, 5, 12))
        with pytest.raises(tp.PlanError, match=r"channels-cut.*mlp\.up.*FusedColwiseParallel"):
            act(watched())
    for act in KEPT:
        act(watched())
    shared: list[Callable[[Any], object]] = [lambda x: x.max(dim=-1), lambda x: x.exp().sum(-1), lambda x: x.topk(2)]
    for share in shared:
        share(watch(torch.ones(2, 5, 12), "head", (), inside=False))  # a loss, or a sampler, that knows
    with pytest.raises(tp.PlanError, match="channels-cut"):
        F.cross_entropy(watch(torch.ones(5, 12), "head", (), inside=False), torch.zeros(5, dtype=torch.int64))
    for cuts, act, right in SECTIONS:
        if right:
            act(watched(cuts))
        else:
            with pytest.raises(tp.PlanError, match="channels-cut"):
                act(watched(cuts))


def test_a_watched_tensor_is_a_tensor() -> None:
    x = watched()
    assert type(x) is Watched
    assert type(x @ torch.ones(12, 2)) is Tensor
    for kept in (pickle.loads(pickle.dumps(x.detach())), copy.deepcopy(x.detach())):
        assert type(kept) is Tensor
        assert torch.equal(kept, torch.ones(2, 5, 12))
    x += 1  # type: ignore[misc]  # torch's
    (x.relu_() * 2).view(2, 5, 3, 4).sum(-1).matmul(torch.ones(3, 1)).sum().backward()
    with torch.inference_mode():
        watch(torch.ones(2, 4), "a", ()).relu()


class Gated(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


@pytest.mark.ranks(2)
def test_a_fused_weight_that_is_declared_a_plain_one(ranks: Ranks) -> None:
    """torch trains on gate * gate on one rank and up * up on the other."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(Gated).double()
    alone = copy.deepcopy(model)
    x = torch.randn(3, 8, dtype=torch.float64)
    plan = {"both": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    handle = tp.apply_plan(model, mesh, plan)
    with pytest.raises(tp.PlanError, match=r"channels-cut.*both.*FusedColwiseParallel"), torch.no_grad():
        model(x)
    assert type(model.get_submodule("both")(x)) is Tensor  # the first forward only
    handle.undo()
    tp.parallelize_module(model.get_submodule("both"), mesh, tp.ColwiseParallel())  # nothing is known of its parent
    with pytest.raises(tp.PlanError, match="channels-cut"):
        model(x)
    model = copy.deepcopy(alone)
    tp.apply_plan(model, mesh, {**plan, "both": tp.FusedColwiseParallel(2)})
    torch.testing.assert_close(model(x), alone(x))
    model = copy.deepcopy(alone)
    tp.apply_plan(model, mesh, plan, check="never")
    model(x)
