"""Several calls of `parallelize_module` on parts of one model, as torch's own examples have them."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

VIEWS = models.TORCH >= (2, 12)  # DTensors of torch 2.11 merge no sharded dim


class Attention(nn.Module):
    """As in torch's example: the number of heads is an attribute, which callers with local outputs divide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.size()
        q, k, v = (
            f(x).view(batch, length, self.n_heads, self.head_dim).transpose(1, 2) for f in (self.wq, self.wk, self.wv)
        )
        out = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1) @ v  # DTensor has no attention on the CPU
        result: torch.Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.gelu(self.w1(x)))
        return result


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.ffn_norm, self.feed_forward = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        result: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return result


class Transformer(nn.Module):
    """`torch.testing._internal.distributed._tensor.common_dtensor.Transformer` of torch 2.13, without dropout."""

    def __init__(self, vocab: int = 8, width: int = 16) -> None:
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocab, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        h = h + self.pos_embeddings(torch.arange(0, tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            h = layer(h)
        result: torch.Tensor = self.output(self.norm(h))
        return result


EXACT = 1e-12


def parallelize(module: Any, mesh: DeviceMesh, *, sequence: bool, local: bool, ties: bool) -> None:
    """`Transformer.parallelize` of torch 2.13, call by call, with this package's function and styles."""
    shard = Shard(1) if sequence else Replicate()
    root: dict[str, tp.ParallelStyle] = {
        "tok_embeddings": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=shard),
        "pos_embeddings": tp.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0) if sequence else Replicate()
        ),
    }
    if sequence:
        root["norm"] = tp.SequenceParallel()
    tp.parallelize_module(module, mesh, root)
    for layer in module.layers:
        plan: dict[str, tp.ParallelStyle] = {}
        if sequence:
            plan["attention"] = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan["attention_norm"] = plan["ffn_norm"] = tp.SequenceParallel()
        for name in ("wq", "wk", "wv"):
            plan[f"attention.{name}"] = tp.ColwiseParallel(use_local_output=local)
        plan["attention.wo"] = tp.RowwiseParallel(output_layouts=shard)
        plan["feed_forward.w1"] = tp.ColwiseParallel(input_layouts=shard)
        plan["feed_forward.w2"] = tp.RowwiseParallel(output_layouts=shard)
        tp.parallelize_module(layer, mesh, plan)
    head = tp.ColwiseParallel(input_layouts=shard, output_layouts=Replicate())
    tp.parallelize_module(module.output, mesh, head)
    if local:
        for layer in module.layers:
            layer.attention.n_heads //= mesh.size()
    if ties:
        module.output.weight = module.tok_embeddings.weight


@pytest.mark.ranks(2)
def test_the_transformer_of_torch(ranks: Ranks) -> None:
    """Tied ends stay tied, whether or not the caller ties them again; five steps are those of one process."""
    mesh = ranks.mesh((2,), ("tp",))
    for sequence, local, ties in itertools.product((False, True), (True, False) if VIEWS else (True,), (True, False)):
        model: Any = models.seeded(Transformer).double()
        batches = [torch.randint(0, 8, (2, 8)) for _ in range(5)]
        count = models.compare_training(
            model,
            partial(parallelize, mesh=mesh, sequence=sequence, local=local, ties=ties),
            batches,
            models.next_token_loss,
            mesh,
            atol=EXACT,
        )
        assert count > 6000
        assert model.output.weight is model.tok_embeddings.weight


@pytest.mark.ranks(2)
def test_ties_that_are_sharded_in_two_ways(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(lambda: models.GPT(tied=True))
    tp.parallelize_module(model, mesh, {"embed": tp.RowwiseParallel()})
    with pytest.raises(tp.PlanError, match="tied-weights"):
        tp.parallelize_module(model.head, mesh, tp.RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(tp.PlanError, match="parameter-replaced"):  # no later call has sharded the head
        torch.optim.SGD([model.head.weight], lr=0.1).step()
    untouched = copy.deepcopy(model.norm.weight)
    with pytest.raises(tp.PlanError, match="tied-weights"):
        tp.apply_plan(models.seeded(lambda: models.GPT(tied=True)), mesh, {"embed": tp.RowwiseParallel()})
    assert torch.equal(model.norm.weight, untouched)
    assert isinstance(model.head, nn.Linear)


MODES = [(training, grad) for training in (True, False) for grad in (True, False)]


@pytest.mark.ranks(2)
def test_a_region_that_a_check_around_it_does_not_reach(ranks: Ranks) -> None:
    """A check in float64 that fails before a region, or in it, leaves the region for the next one."""
    refused = sum(refusals(ranks, where, wrong) for where, wrong in itertools.product(("layer", "region"), MODES))
    assert refused == 8 * 3


def refusals(ranks: Ranks, where: str, wrong: tuple[bool, bool]) -> int:
    """Call a model in a right mode and in the one with a mistake, thrice each; return how many calls are refused."""
    mesh, refused = ranks.mesh((2,), ("tp",)), 0

    class InFloat32(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float()

    class Mistaken(FeedForward):
        def __init__(self, wrong: tuple[bool, bool]) -> None:
            super().__init__(16)
            self.wrong, self.cast = wrong, InFloat32() if where == "region" else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.w1(self.cast(x))
            h = h.flip(-1) if (self.training, torch.is_grad_enabled()) == self.wrong else h
            result: torch.Tensor = self.w2(h.tanh())
            return result

    model: Any = models.seeded(Transformer)
    model.layers[1].feed_forward = models.seeded(partial(Mistaken, wrong))
    if where == "layer":
        model.layers[1].attention_norm = nn.Sequential(InFloat32(), model.layers[1].attention_norm)
    parallelize(model, mesh, sequence=False, local=True, ties=False)  # local head counts: no original to run
    for mode in (MODES[MODES.index(wrong) - 1], wrong):  # over the four parameters, each mode is right once
        model.train(mode[0])
        with torch.set_grad_enabled(mode[1]):
            for _ in range(3):
                if mode == wrong:
                    with pytest.raises(tp.PlanError, match="check-mismatch"):
                        model(torch.arange(8).view(1, 8))
                    refused += 1
                else:
                    model(torch.arange(8).view(1, 8))
    return refused
