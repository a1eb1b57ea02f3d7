"""Models and comparisons that the tests share."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_styles as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from tp_styles.runtime.parameters import full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int = 8, hidden: int = 12, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.up(x)))
        return result


class Attention(nn.Module):
    """Causal self-attention with q, k and v apart, or fused head by head (q, k, v of a head next to each other)."""

    def __init__(self, width: int, heads: int, fused: bool = False) -> None:
        super().__init__()
        self.num_heads = heads
        self.head = width // heads
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        if self.fused:
            qkv = self.qkv(x).view(batch, length, -1, 3, self.head).permute(3, 0, 2, 1, 4)
            q, k, v = qkv.unbind(0)
        else:
            q, k, v = (
                layer(x).view(batch, length, -1, self.head).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, fused)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """A small language model."""

    def __init__(
        self, vocab: int = 17, width: int = 16, heads: int = 4, layers: int = 2, fused: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width, heads, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def gpt_plan(fused: bool = False) -> dict[str, tp.ParallelStyle]:
    """Megatron's plan for `GPT`, whole logits."""
    from torch.distributed.tensor import Replicate

    return {
        "embed": tp.RowwiseParallel(),
        "layers.*.attn.qkv" if fused else "layers.*.attn.[qkv]": tp.ColwiseParallel(),
        "layers.*.attn.proj": tp.RowwiseParallel(),
        "layers.*.mlp.up": tp.ColwiseParallel(),
        "**.down": tp.RowwiseParallel(),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }


def preload(*modules: str) -> None:
    """Import modules where ranks are forked from, so that no rank does; packages that are not installed are left out.

    Test modules whose bodies import transformers say `before_ranks = partial(models.preload, ...)`: its import and that
    of a model's code take seconds of a core, on each rank of the first test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages of what is imported stay shared with the ranks


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same random model on every rank."""
    torch.manual_seed(seed)
    return make()


def full_state(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Global values of all parameters, whatever they are made of."""
    axis = TPGroup(mesh)
    return {name: whole(parameter, axis) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Global values of all gradients."""
    axis = TPGroup(mesh)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        info = getattr(parameter, "_sharding_info", None)
        gradients[name] = full_tensor(gradient, axis, split_of(info)) if info is not None else whole(gradient, axis)
    return gradients


def whole(value: torch.Tensor, axis: TPGroup) -> torch.Tensor:
    """The global value of one tensor."""
    value = value.detach()
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


def whole_parameter(parameter: torch.Tensor, axis: TPGroup) -> torch.Tensor:
    """The global value of one parameter."""
    info = getattr(parameter, "_sharding_info", None)
    return full_tensor(parameter, axis, split_of(info)) if info is not None else whole(parameter, axis)


def assert_close(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], atol: float, rtol: float = 0.0
) -> int:
    """Every tensor of both; returns how many numbers were compared."""
    assert tensors.keys() == expected.keys()
    count = 0
    for name, value in expected.items():
        difference = (tensors[name] - value).abs()
        assert bool((difference <= atol + rtol * value.abs()).all()), f"{name}: off by {difference.max().item()}"
        count += value.numel()
    return count


def train(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    lr: float = 0.1,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[float]:
    """One step for each batch; the losses."""
    optimizer = make(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(batch), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def square_loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """A loss that treats no output like another."""
    weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return (output * weight).pow(2).mean()


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next id."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def compare_training(
    model: nn.Module,
    apply: Callable[[nn.Module], object],
    batches: Sequence[torch.Tensor],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    mesh: DeviceMesh,
    *,
    atol: float,
    local: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    lr: float = 0.1,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> int:
    """Train a copy alone and the model in parallel; losses and all parameters agree. Returns numbers compared."""
    reference = copy.deepcopy(model)
    apply(model)
    expected = train(reference, batches, loss, lr=lr, make=make)
    losses = train(model, [local(batch) for batch in batches], loss, lr=lr, make=make)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=atol, rtol=0)
    axis = TPGroup(mesh)
    state = {name: whole_parameter(parameter, axis) for name, parameter in model.named_parameters()}
    return len(losses) + assert_close(state, {n: p.detach() for n, p in reference.named_parameters()}, atol)


def rows(batch: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's chunk of a batch."""
    return batch.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]


class GroupedAttention(nn.Module):
    """Causal attention with fewer key-value heads, norms of q and k, and a number of heads in its views."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.size = heads, keys, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, keys * self.size) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, length, self.num_heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(batch, length, self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.o(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class Gated(nn.Module):
    """Gate and up in one weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 24), nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(F.silu(gate) * up)
        return result


class GatedMLP(nn.Module):
    """Gate and up, a learned slope between, dropout, down."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.act, self.drop = nn.PReLU(), nn.Dropout(dropout)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.drop(self.act(self.gate_proj(x)) * self.up_proj(x)))
        return result


class Grouped(nn.Module):
    """A tied language model of such blocks."""

    def __init__(
        self, vocab: int = 18, width: int = 16, heads: int = 4, keys: int = 2, dropout: float = 0.0, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.norm1, block.attn = nn.RMSNorm(width), GroupedAttention(width, heads, keys)
            block.norm2, block.mlp = nn.RMSNorm(width), GatedMLP(width, 24, dropout)
            self.layers.append(block)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.attn(layer.norm1(x))  # type: ignore[operator]
            x = x + layer.mlp(layer.norm2(x))  # type: ignore[operator]
        result: torch.Tensor = self.head(self.norm(x))
        return result


def roughen(model: nn.Module) -> nn.Module:
    """Random norms and biases, which start as ones and zeros: a wrong one would not be seen."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model
