"""Small steps that together use every row of the rule table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import dp_partition as dp
import torch
import torch.nn.functional as F
from dp_partition.api import runner_of
from dp_partition.capture.inputs import read_arguments
from dp_partition.capture.state import find_step_state
from dp_partition.nodes import base_name, is_op
from dp_partition.pipeline import capture_single_device, plan_nodes
from dp_partition.plan.placements import fake_mesh, parse_style
from dp_partition.sharding.op_rules import find_rule
from dp_verification import input_values
from torch import fx, nn

WORLD = 2
ROWS = 4  # of one rank's batch: 8 in all, as many as features, so that sizes cannot tell them apart
aten: Any = torch.ops.aten


class Net(nn.Module):
    """Parameters of all the shapes that probes need."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.group = nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 4)
        self.conv, self.table = nn.Conv2d(2, 4, 3, padding=1), nn.Embedding(8, 8)
        self.square = nn.Parameter(torch.randn(8, 8))
        self.vector, self.cube = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 2, 4))


Body = Callable[[Net, Any], Any]
"""From the model and ``h``, activations [batch, 8], to a tensor that the loss is the sum of squares of."""


def _ids(h: torch.Tensor) -> torch.Tensor:
    """Row numbers of an embedding that follow the batch."""
    return (h.detach().abs() * 5).long() % 8


def _picture(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1, 2, 2, 2).repeat(1, 1, 2, 2)


def _heads(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1, 2, 2, 2)


def _mixed(net: Net, h: torch.Tensor) -> torch.Tensor:
    q = _heads(h)
    return F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)


PROBES: dict[str, Body] = {
    "linear": lambda net, h: h,
    "mean": lambda net, h: h.mean(),
    "mean over rows": lambda net, h: h - h.mean(0, keepdim=True),
    "mean over features": lambda net, h: h.mean(1),
    "sum over rows": lambda net, h: torch.tanh(h.sum(0)),
    "sum over features": lambda net, h: h.sum(1, keepdim=True),
    "amax over rows": lambda net, h: h * aten.amax(h.detach(), [0]) + aten.amin(h.detach(), [0]),
    "amax over features": lambda net, h: h * aten.amax(h.detach(), [1], True) + aten.amin(h.detach(), [1], True),
    "views": lambda net, h: h.view(-1, 2, 4).transpose(1, 2).permute(1, 0, 2).unsqueeze(1).squeeze(1) * 2,
    "flattened": lambda net, h: (h.view(-1, 2, 4).reshape(-1, 4) @ net.cube[0].t()).view(-1, 2, 2),
    "reshape operators": lambda net, h: aten._unsafe_view(h.detach(), [8, 2, 4]).sum(2)
    + h.sum(),
    "rows into columns": lambda net, h: aten.t(h) @ h,
    "expand": lambda net, h: h.unsqueeze(1).expand(-1, 3, -1) * torch.arange(3, dtype=h.dtype).view(1, 3, 1),
    "repeat": lambda net, h: h.repeat(2, 1, 3) * 1.5,
    "slice": lambda net, h: torch.cat([h[:, 2:5], h[:, :2] * 3], 1),
    "slice of rows": lambda net, h: h[2:7] * 2,
    "select": lambda net, h: h[:, 3] * h[:, 1] + h.view(-1, 2, 4)[:, 1].sum(1),
    "select a row": lambda net, h: h[3] * 2,
    "split": lambda net, h: h.split(2, 1)[1] * h.split([4, 4], 1)[0][:, :2] + h.chunk(4, 1)[2],
    "split operators": lambda net, h: aten.split.Tensor(h, 2, 1)[1] * aten.split_with_sizes(h, [6, 2], 1)[1]
    + aten.unbind(h.view(-1, 2, 4), 1)[0][:, :2],
    "split of rows": lambda net, h: h.split(3, 0)[1] * 2 + h.unbind(0)[4],
    "cat of rows": lambda net, h: torch.cat([h, h * 2], 0) * 3,
    "stack": lambda net, h: torch.stack([h, h * 2], 1) * torch.stack([h.detach(), h.detach() + 1], -2),
    "stack first": lambda net, h: torch.stack([h, h * 2], 0) * 3,
    "pad": lambda net, h: F.pad(h, (1, 2)) * 2,
    "pad rows": lambda net, h: F.pad(h, (0, 0, 1, 2)) * 2,
    "softmax": lambda net, h: torch.softmax(h, 1) + torch.log_softmax(h, 1),
    "softmax over rows": lambda net, h: torch.softmax(h, 0) + torch.log_softmax(h, 0),
    "sort": lambda net, h: h.sort(1).values * 2 + h.topk(8, 1).values,
    "sort rows": lambda net, h: h.sort(0).values * 2 + h.topk(8, 0).values,
    "cumulative": lambda net, h: h.cumsum(1) + h.detach().cumprod(1) + aten.logcumsumexp(h.detach(), 1),
    "cumulative rows": lambda net, h: h.cumsum(0) + h.detach().cumprod(0) + aten.logcumsumexp(h.detach(), 0),
    "gather": lambda net, h: h.gather(1, _ids(h)) + torch.zeros_like(h).scatter_add(1, _ids(h), h),
    "gather rows": lambda net, h: h.gather(0, _ids(h)) + torch.zeros_like(h).scatter_add(0, _ids(h), h),
    "scatter": lambda net, h: h.scatter(1, _ids(h)[:, :1], h[:, :1].detach() * 3) * 2,
    "scatter rows": lambda net, h: h.detach().scatter(0, _ids(h)[:, :1], h[:, :1].detach() * 3) * h,
    "flip": lambda net, h: h.flip(1) * 2 + h.roll(3, 1),
    "flip rows": lambda net, h: h.flip(0) * 2 + h.roll(3, 0),
    "glu": lambda net, h: F.glu(h, 1),
    "glu rows": lambda net, h: F.glu(h, 0),
    "index_select": lambda net, h: h.index_select(1, torch.tensor([3, 1, 2])) * 2,
    "index_select rows": lambda net, h: h.index_select(0, torch.tensor([3, 1, 2])) * 2,
    "index": lambda net, h: h[:, torch.tensor([3, 1])] * 2,
    "index rows": lambda net, h: h[torch.tensor([3, 1])] * 2,
    "index a table": lambda net, h: net.square[_ids(h)[:, 0]] * h,
    "index two": lambda net, h: net.cube[_ids(h)[:, 0], _ids(h)[:, 1] % 2] * h[:, :4],
    "arg": lambda net, h: h * h.argmax(1, keepdim=True) + h.argmin(1, keepdim=True),
    "arg rows": lambda net, h: h * h.argmax(0, keepdim=True) + h.argmin(0, keepdim=True),
    "reduce": lambda net, h: h * (h.logsumexp(1, True) + h.detach().prod(1, True) + h.detach().max(1, True).values
                                  + h.detach().min(1, True).values + h.detach().median(1, True).values
                                  + h.detach().mode(1, True).values),
    "reduce rows": lambda net, h: h * (h.logsumexp(0, True) + h.detach().prod(0, True) + h.detach().max(0, True).values
                                       + h.detach().min(0, True).values + h.detach().median(0, True).values
                                       + h.detach().mode(0, True).values),
    "reduce away": lambda net, h: h.logsumexp(1) + h.detach().prod(1) + h.detach().max(1).values + h.detach().min(1)[0],
    "truth": lambda net, h: h * ((h > 0).any(1, True) | (h > 1).all(1, True)),
    "truth of rows": lambda net, h: h * ((h > 0).any(0, True) | (h > 1).all(0, True)),
    "spread": lambda net, h: h / h.std(1, keepdim=True) + h.var(1, keepdim=True)
    + torch.var_mean(h, 1, keepdim=True)[1],
    "spread of rows": lambda net, h: h / h.std(0, keepdim=True) + torch.var_mean(h, 0, keepdim=True)[0],
    "norm": lambda net, h: h / torch.linalg.vector_norm(h),
    "norm of order 1": lambda net, h: h / torch.linalg.vector_norm(h, 1.0),
    "greatest norm": lambda net, h: h / torch.linalg.vector_norm(h.detach(), float("inf")),
    "mm": lambda net, h: (h @ net.square).t() @ h,
    "bmm": lambda net, h: torch.bmm(h.view(-1, 2, 4), h.view(-1, 4, 2)),
    "bmm of columns": lambda net, h: torch.bmm(h.view(-1, 2, 4).transpose(0, 1), h.view(-1, 2, 4).permute(1, 2, 0)),
    "baddbmm": lambda net, h: torch.baddbmm(h.view(-1, 2, 4)[:, :, :2], h.view(-1, 2, 4), h.view(-1, 4, 2)),
    "addmm": lambda net, h: torch.addmm(net.vector, h, net.square) * torch.addmm(h, h, net.square),
    "addmm over rows": lambda net, h: torch.addmm(net.square, h.t(), torch.tanh(h)),
    "mv": lambda net, h: torch.mv(h, net.vector) * 2 + torch.mv(h.t(), h.detach()[:, 0].clone()).sum(),
    "dot": lambda net, h: torch.dot(h[:, 0].clone(), h[:, 1].clone()).view(1),
    "layer norm": lambda net, h: net.norm(h),
    "group norm": lambda net, h: net.group(h.view(-1, 4, 2)),
    "conv": lambda net, h: net.conv(_picture(h)),
    "max pool": lambda net, h: F.max_pool2d(_picture(h) * torch.arange(16.0).view(4, 4), 2),
    "average pool": lambda net, h: F.avg_pool2d(_picture(h), 2) + F.adaptive_avg_pool2d(_picture(h), (2, 2)),
    "upsample": lambda net, h: F.interpolate(_heads(h).detach(), scale_factor=2.0) + aten.upsample_bilinear2d.default(
        _heads(h).detach(), [4, 4], False) * h.mean(),
    "attention": _mixed,
    "embedding": lambda net, h: net.table(_ids(h)) * h.unsqueeze(2),
    "nll": lambda net, h: F.cross_entropy(h, _ids(h)[:, 0]).view(1),
    "nll sum": lambda net, h: F.cross_entropy(h, _ids(h)[:, 0], reduction="sum").view(1),
    "nll rows": lambda net, h: F.cross_entropy(h, _ids(h)[:, 0], reduction="none"),
    "new": lambda net, h: h * h.new_ones(8).cumsum(0) + h.new_zeros(8, 8)
    + h.new_full((1,), 3.0) * h.new_empty(8).fill_(2.0),
    "elementwise": lambda net, h: F.gelu(h) * F.silu(h) + F.softplus(h) - F.elu(h) + torch.where(h > 0, h, net.vector)
    + F.leaky_relu(h) * F.hardtanh(h) + torch.sigmoid(h) + torch.tanh(h) * F.relu(h),
    "elementwise with lists": lambda net, h: torch.lerp(h, net.square, 0.3) + torch.addcmul(h, net.vector, h)
    + torch.addcdiv(h, h, net.vector.exp()) + h.masked_fill(h > 0, 2.0) + h.clone() + (-h) / 3,
    "casts": lambda net, h: (h.to(torch.float32) * 2).to(h.dtype) + torch.ones_like(h) * torch.full_like(h, 2),
    "parameters alone": lambda net, h: h * net.square.sum() + net.vector.exp().mean(),
    "writes": lambda net, h: (h * 1).mul_(2).add_(net.vector).clamp_(min=-1).copy_(h.detach()) + h,
}  # fmt: skip


def _step(body: Body, clip: float | None, model: Net, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss: Any = body(model, model.linear(x)).square().sum()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, clip, foreach=clip < 2)
    optim.step()
    optim.zero_grad()
    return loss


@dataclass(frozen=True)
class Probe:
    """One captured step."""

    name: str
    step: Any  # what stands behind a `Step`
    capture: Any
    plan: Any
    values: Any

    def plans(self) -> dict[fx.Node, Any]:
        return plan_nodes(self.capture, self.plan, replace(self.step.settings, reshard=False))[1]

    def rows(self) -> set[str]:
        """The rows of the table that the probe's graph calls."""
        return {base_name(n) for n in self.capture.module.graph.nodes if is_op(n) and find_rule(n) is not None}


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "adam-foreach": partial(torch.optim.Adam, lr=0.1, foreach=True, weight_decay=0.1),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}
SPECIAL = {  # optimizers and clipping, on the simplest body
    "step of adamw": ("adamw", 2.0, "fully_shard"),
    "step of adam, lists": ("adam-foreach", 1.5, "fully_shard"),  # the 1-norms of shards would be summed
    "step of adamw, one kernel": ("adamw-fused", float("inf"), "fully_shard"),
    "clipped before it is reduced": ("sgd", 2.0, "replicate"),
}


@cache
def probe(name: str) -> Probe:
    """Capture a probe."""
    optim, clip, style = SPECIAL.get(name, ("sgd", None, "fully_shard"))
    torch.manual_seed(0)
    model = Net().double()
    x = torch.randn(ROWS, 8, dtype=torch.float64)
    function = partial(_step, PROBES.get(name, PROBES["linear"]), clip)
    step = runner_of(
        dp.compile(function, mesh=fake_mesh(WORLD, 0, "cpu"), style=parse_style(style), semantics="global")
    )
    args = (model, OPTIMIZERS[optim](model.parameters()), x)
    step_state = find_step_state(function, args, {})
    plan = step.plan_for(step_state, WORLD)
    capture = capture_single_device(function, read_arguments(name, args, {}), step_state, plan, step.settings)
    return Probe(name, step, capture, plan, input_values(step, capture, step_state, args, {}, WORLD))


def all_probes() -> list[str]:
    return [*PROBES, *SPECIAL]
