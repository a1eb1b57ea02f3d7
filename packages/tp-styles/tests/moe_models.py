"""Mixtures of experts that the tests share: stacked, flat and numbered experts, a router, a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles.runtime.parameters import full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup

WIDTH, HIDDEN, VOCAB = 16, 6, 24
ATOL = 1e-12


class Stacked(nn.Module):
    """Gated experts with biases, each weight in one tensor with a norm that all of them share behind."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up = nn.Parameter(torch.randn(count, 2 * HIDDEN, WIDTH) * 0.4)
        self.gate_up_bias = nn.Parameter(torch.randn(count, 2 * HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) * 0.4)
        self.down_bias = nn.Parameter(torch.randn(count, WIDTH) * 0.3)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for index in range(self.num_experts):
            token, place = torch.where(experts == index)
            x = hidden[token]
            gate, up = F.linear(x, self.gate_up[index], self.gate_up_bias[index]).chunk(2, dim=-1)
            x = self.norm(F.linear(F.silu(gate) * up, self.down[index], self.down_bias[index]))
            output = output.index_add(0, token, x * weights[token, place, None])
        return output


class Flat(nn.Module):
    """Experts beneath each other in two dims; arguments in another order, and the routing weight goes in before."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts_here = count
        self.w1 = nn.Parameter(torch.randn(count * HIDDEN, WIDTH) * 0.4)
        self.w2 = nn.Parameter(torch.randn(count * HIDDEN, WIDTH) * 0.4)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, probs: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        w1, w2 = (w.view(-1, HIDDEN, WIDTH) for w in (self.w1, self.w2))
        for index in range(self.experts_here):
            token, place = torch.where(ids == index)
            y = torch.tanh((x[token] * probs[token, place, None]) @ w1[index].T) @ w2[index]
            output = output.index_add(0, token, y * self.scale)
        return output


class Numbered(nn.ModuleDict):
    """An expert is a module of its own."""

    def __init__(self, count: int) -> None:
        super().__init__({f"expert_{i}": models.MLP(WIDTH, HIDDEN) for i in range(count)})

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for index in experts.unique().tolist():
            token, place = torch.where(experts == index)
            output = output.index_add(0, token, self[f"expert_{index}"](hidden[token]) * weights[token, place, None])
        return output


STYLES: dict[type[nn.Module], dict[str, Any]] = {
    Stacked: {},
    Flat: {"parameters": ("w1", "w2"), "inputs": ("x", "ids", "probs"), "num_experts": 5},
    Numbered: {},
}
"""Arguments of `ExpertParallel` for each kind."""


class Router(nn.Module):
    """Logits, weights and indices of each token's experts; with `skewed` the first experts take all tokens."""

    def __init__(self, count: int, k: int = 2, skewed: bool = False) -> None:
        super().__init__()
        self.k, self.gate = k, nn.Linear(WIDTH, count)
        with torch.no_grad():
            if skewed:
                self.gate.bias.copy_(torch.linspace(8, -8, count))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.gate(x)
        weights, experts = logits.softmax(-1).topk(self.k, dim=-1)
        return logits, weights, experts


class Mixture(nn.Module):
    """Router, experts and a shared expert."""

    def __init__(self, count: int, kind: type[nn.Module] = Stacked, skewed: bool = False) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(count, skewed=skewed), kind(count), models.MLP(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        logits, weights, experts = self.router(tokens)
        order = (weights, experts, tokens) if isinstance(self.experts, Flat) else (tokens, experts, weights)
        return self.experts(*order).view(x.shape) + self.shared(x), logits


class MoELM(nn.Module):
    """A small language model; returns logits and the router's logits of all layers."""

    def __init__(self, count: int = 5, kind: type[nn.Module] = Stacked, layers: int = 2, skewed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.norm1, block.attn = nn.RMSNorm(WIDTH), models.Attention(WIDTH, 4)
            block.norm2, block.moe = nn.RMSNorm(WIDTH), Mixture(count, kind, skewed)
            self.layers.append(Block(block))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, routed = self.embed(ids), []
        for layer in self.layers:
            x, logits = layer(x)
            routed.append(logits)
        return self.head(x), torch.stack(routed)


class Block(nn.Module):
    """Attention and mixture, each after a norm."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.moe = parts.norm1, parts.attn, parts.norm2, parts.moe

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attn(self.norm1(x))
        y, logits = self.moe(self.norm2(x))
        return x + y, logits


def language_model(*args: Any, **kwargs: Any) -> Any:
    """The same random model on every rank, in float64."""
    torch.manual_seed(3)
    return models.roughen(MoELM(*args, **kwargs)).double()


def batches(count: int, size: int, length: int = 5) -> list[torch.Tensor]:
    """Ids of some steps, the same on every rank."""
    random = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB, (size, length), generator=random) for _ in range(count)]


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor, *, router: float = 0.0) -> torch.Tensor:
    """Cross entropy of the next id, and the router's losses: balance of the load, and the z-loss."""
    logits, routed = outputs
    return models.next_token_loss(logits, ids) + router * router_loss(routed)


def router_loss(routed: torch.Tensor) -> torch.Tensor:
    """Load balance (a product of two means over all tokens) and z-loss of logits `[layers, tokens, experts]`."""
    probabilities = routed.softmax(-1)
    count = routed.shape[-1]
    chosen = F.one_hot(probabilities.topk(2, dim=-1).indices, count).sum(-2).to(routed.dtype)
    balance = count * (probabilities.mean(1) * chosen.mean(1)).sum(-1).mean()
    return balance + routed.logsumexp(-1).square().mean()


def full_values(model: nn.Module, mesh: DeviceMesh, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Global values or gradients of all parameters, whatever they are made of; every rank calls it."""
    return {name: full_value(p, mesh, gradient=gradients) for name, p in model.named_parameters()}


def full_value(parameter: torch.Tensor, mesh: DeviceMesh, *, gradient: bool = False) -> torch.Tensor:
    """The global value or gradient of a parameter; a missing gradient is zeros."""
    value: torch.Tensor = parameter.detach()
    if gradient:
        value = torch.zeros_like(value) if parameter.grad is None else parameter.grad
    info = sharding_info_of(parameter)
    if info is not None:
        return full_tensor(value.as_subclass(torch.Tensor), TPGroup(mesh), split_of(info))
    return value.full_tensor() if isinstance(value, DTensor) else value


def average_dense(model: nn.Module, num_ranks: int) -> None:
    """Average the gradients of all parameters but experts over the ranks; divide those of experts."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)
        parameter.grad.div_(num_ranks)


def experts_plan(kind: type[nn.Module], tokens: Any, **options: Any) -> dict[str, tp.ParallelStyle]:
    """The plan of all layers' experts."""
    return {"layers.*.moe.experts": tp.ExpertParallel(tokens, **STYLES[kind], **options)}


# Attention by heads, and the shared expert by columns and rows.
ATTENTION = {
    "layers.*.attn.[qkv]": tp.ColwiseParallel(),
    "layers.*.attn.proj": tp.RowwiseParallel(),
    "layers.*.moe.shared.up": tp.ColwiseParallel(),
    "layers.*.moe.shared.down": tp.RowwiseParallel(),
}
STEPS = 3


def compare(
    model: nn.Module,
    alone: nn.Module,
    mesh: Any,
    *,
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids,
    before_step: Callable[[nn.Module], object] = lambda model: None,
    ranks: int = 1,
    router: float = 0.0,
    options: tuple[dict[str, Any], ...] = ({}, {}),
) -> int:
    """Train both and compare losses, clipped norms and all parameters; return how many numbers were compared.

    Args:
        model: The parallel model.
        alone: The same on one process.
        mesh: Ranks of the experts.
        rows: This rank's rows of a batch.
        before_step: Called with the model when it has its gradients.
        ranks: Number of ranks with rows of their own: their losses are averaged.
        router: Factor of the router's losses.
        options: Keyword arguments of both models.
    """
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, alone)]
    for ids in batches(STEPS, 8):
        mine = rows(ids)
        ours = loss_of(model(mine, **options[0]), mine, router=router)
        wanted = loss_of(alone(ids, **options[1]), ids, router=router)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours.backward()
        wanted.backward()
        before_step(model)
        value = ours.detach().clone()
        if ranks > 1:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        torch.testing.assert_close(value, wanted.detach(), atol=ATOL, rtol=ATOL)
        norms = tp.clip_grad_norm_(model.parameters(), 0.5), nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        torch.testing.assert_close(*norms, atol=ATOL, rtol=ATOL)
        for optimizer in optimizers:
            optimizer.step()
    state = {name.removeprefix("_orig_mod."): v for name, v in full_values(model, mesh).items()}
    return models.assert_close(state, {n: p.detach() for n, p in alone.named_parameters()}, ATOL)
