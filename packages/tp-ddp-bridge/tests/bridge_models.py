"""Small models, their tensor-parallel plans, and one loop for one process and many ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from ranktest import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from tp_ddp_bridge import pre_dp_module_transform


class MLP(nn.Module):
    """Two sharded layers between which nothing is whole, and one that is not sharded."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width] -> [batch, width]``."""
        out: Tensor = self.head(self.down(torch.relu(self.up(x))))
        return out


def parallelize_mlp(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Megatron's plan for an MLP; ``head`` stays a plain module."""
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Attention(nn.Module):
    """Causal self-attention; no bias on the key, whose true gradient is zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` in and out."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` in and out."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A transformer with tied embeddings if wanted."""

    def __init__(
        self, vocabulary: int = 32, width: int = 16, heads: int = 4, depth: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` token numbers to ``[batch, length, vocabulary]`` logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parallelize_gpt(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, loss_parallel: bool = False) -> Any:
    """Megatron's plan; with ``sequence`` the norms work on sequence shards, with ``loss_parallel`` logits stay
    sharded."""
    full, cut = Replicate(), Shard(1)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=full, output_layouts=cut if sequence else full),
        "head": ColwiseParallel(input_layouts=full, output_layouts=full),
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=full),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(output_layouts=full),
    }
    if sequence:
        plan |= {
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.norm2": SequenceParallel(),
            "norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(full,)),
            "blocks.*.attention.wo": RowwiseParallel(output_layouts=cut),
            "blocks.*.up": ColwiseParallel(input_layouts=cut),
            "blocks.*.down": RowwiseParallel(output_layouts=cut),
            "head": ColwiseParallel(input_layouts=cut, output_layouts=full),
        }
    if loss_parallel:
        plan["head"] = ColwiseParallel(input_layouts=full, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    return model


class Llama(nn.Module):
    """A small Llama of ``transformers``, from token numbers to logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.causal: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` token numbers to ``[batch, length, vocabulary]`` logits."""
        logits: Tensor = self.causal(
            input_ids=tokens, use_cache=False
        ).logits  # a cache would be filled again by a recomputation
        return logits


def parallelize_llama(model: Any, mesh: DeviceMesh, *, sequence: bool = False, loss_parallel: bool = False) -> Any:
    """Megatron's plan. With ``sequence`` what stands between layers is cut along it, with ``loss_parallel`` logits stay
    sharded."""
    full, cut = Replicate(), Shard(1)
    plan: dict[str, Any] = {
        f"model.layers.*.{name}": ColwiseParallel()
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    between = cut if sequence else full
    plan |= {
        f"model.layers.*.{name}": RowwiseParallel(output_layouts=between)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    if sequence:
        gather_hidden = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": full}
        )
        plan |= {
            "model.layers.0": PrepareModuleInput(
                input_layouts=(full,), desired_input_layouts=(cut,), use_local_output=True
            ),
            "model.layers.*.input_layernorm": SequenceParallel(use_local_output=True),
            "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
            "model.layers.*.self_attn": gather_hidden,
            "model.layers.*.mlp": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(full,)),
            "model.norm": SequenceParallel(use_local_output=True),
            "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=full),
        }
    if loss_parallel:
        plan["lm_head"] = ColwiseParallel(input_layouts=full, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model.causal, mesh, plan)
    return model


def seeded(factory: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model with the same weights on every rank."""
    torch.manual_seed(seed)
    return factory()


def bridged_mlp(ranks: Ranks) -> Any:
    """An MLP on all ranks as one tensor-parallel group, bridged without DDP."""
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    return pre_dp_module_transform(parallelize_mlp(seeded(MLP), mesh))


@dataclass
class Task:
    """Data and a loss. One process has the batches that are cut up over data-parallel ranks.

    Attributes:
        batches: Global batches, one per step.
        loss: From the model's output and the batch to a mean loss.
    """

    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = field(default=functional.mse_loss)

    def part(self, step: int, index: int, count: int) -> tuple[Tensor, Tensor]:
        """The share of data-parallel rank ``index`` of ``count``."""
        x, y = self.batches[step % len(self.batches)]
        return x.chunk(count)[index], y.chunk(count)[index]


def vectors(width: int = 16, batch: int = 8, steps: int = 5, dtype: torch.dtype = torch.float32) -> Task:
    """Random vectors to random vectors."""
    generator = torch.Generator().manual_seed(1)
    return Task(
        [
            (
                torch.randn(batch, width, generator=generator).to(dtype),
                torch.randn(batch, width, generator=generator).to(dtype),
            )
            for _ in range(steps)
        ]
    )


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(vocabulary: int = 32, batch: int = 4, length: int = 8, steps: int = 5) -> Task:
    """Random token sequences, each predicting the next token."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(vocabulary, (batch, length + 1), generator=generator) for _ in range(steps)]
    return Task([(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches], cross_entropy)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, *, index: int = 0, count: int = 1, steps: int = 5
) -> list[float]:
    """The plain loop: ``steps`` steps on the share ``index`` of ``count``. Returns its losses."""
    losses = []
    for step in range(steps):
        x, y = task.part(step, index, count)
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def whole(tensor: Any) -> Tensor:
    """The full tensor, whatever it is."""
    detached: Any = tensor.detach()
    full: Tensor = detached.full_tensor() if isinstance(tensor, DTensor) else detached
    return full


class Compared(NamedTuple):
    """Two state dicts compared: how many tensors, their greatest difference, and the greatest that is allowed."""

    tensors: int
    greatest: float
    atol: float


def assert_same_state(state: dict[str, Tensor], expected: dict[str, Tensor], *, count: int, atol: float) -> Compared:
    """Compare two state dicts tensor by tensor; exactly ``count`` of them."""
    assert list(state) == list(expected)
    compared = 0
    greatest = 0.0
    for name, tensor in expected.items():
        mine = whole(state[name])
        assert mine.shape == tensor.shape, name
        difference = float((mine.double() - tensor.double()).abs().max())
        assert difference <= atol, f"{name}: differs by {difference}"
        greatest = max(greatest, difference)
        compared += 1
    assert compared == count, f"compared {compared} tensors, meant to compare {count}"
    return Compared(compared, greatest, atol)
