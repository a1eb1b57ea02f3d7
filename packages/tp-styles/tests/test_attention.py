"""Attention by heads: `nn.MultiheadAttention`, torch's transformer layers, grouped queries."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import mha_grid
import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate

EXACT = 1e-12


@pytest.mark.ranks(2, 4)
def test_multihead_attention(ranks: Ranks) -> None:
    """Every 17th of the 288 cells, others at each tp size. torch has no style for this module."""
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    chosen = list(mha_grid.cells())[ranks.world_size // 2 * 5 :: 17]
    assert len(chosen) >= 15
    assert sum(mha_grid.check(cell, mesh) for cell in chosen) > 12_000


@pytest.mark.ranks(2)
def test_no_batch(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    module = models.seeded(lambda: nn.MultiheadAttention(12, 4)).double()
    alone = copy.deepcopy(module)
    tp.apply_plan(module, mesh, tp.MultiheadAttentionParallel())
    x = torch.randn(5, 12, dtype=torch.float64)
    for out, expected in zip(module(x, x, x), alone(x, x, x), strict=True):
        torch.testing.assert_close(out, expected, atol=EXACT, rtol=0)
    with ranks.record() as log:
        module(x, x, x, need_weights=False)[0].sum().backward()
    assert log.ops == ("all_reduce",)  # the input needs no gradient


def test_keys_of_no_token() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        (problem,) = tp.plan_styles(
            nn.MultiheadAttention(12, 4, **options), tp.MultiheadAttentionParallel(), 2
        ).problems
        assert problem.code == "unsupported-option"


def test_heads_that_do_not_divide() -> None:
    plan = tp.plan_styles(nn.MultiheadAttention(12, 6), tp.MultiheadAttentionParallel(), 4)
    assert "num_heads=6 with tp=4" in plan.problems[0].found
    assert plan.problems[0].hint == "valid 1, 2, 3, 6"


def transformer(kind: str) -> nn.Module:
    options = {"dropout": 0.0, "batch_first": True}
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(12, 4, 20, **options)  # type: ignore[arg-type]
        return nn.TransformerEncoder(layer, 2).double()
    if kind == "decoder":
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 4, 20, norm_first=True, **options), 2).double()  # type: ignore[arg-type]
    return nn.Transformer(12, 4, 1, 1, 20, **options).double()  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the model alone
@pytest.mark.ranks(2, 4)
def test_transformer_layers(ranks: Ranks) -> None:
    """5 steps of training, then evaluation, where torch's fast path reads the children's weights past their hooks."""
    for kind in ("encoder", "decoder", "both"):
        check_transformer(ranks, kind)


def check_transformer(ranks: Ranks, kind: str) -> None:
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    model = models.seeded(lambda: transformer(kind))
    alone = copy.deepcopy(model)
    pattern = {"encoder": "layers.*", "decoder": "layers.*", "both": "*coder.layers.*"}[kind]
    handle = tp.apply_plan(model, mesh, {pattern: tp.TransformerLayerParallel()})
    x, y = (torch.randn(2, 5, 12, dtype=torch.float64) for _ in range(2))
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True

    def call(m: nn.Module) -> torch.Tensor:
        if kind == "encoder":
            result: torch.Tensor = m(x, src_key_padding_mask=padding)
        else:
            result = m(x, y)
        return result[~padding]

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    for _ in range(5):
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            models.square_loss(call(m), x).backward()
            optimizer.step()
    torch.testing.assert_close(call(model), call(alone), atol=1e-11, rtol=0)
    model.eval(), alone.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), torch.random.fork_rng():
            torch.testing.assert_close(call(model), call(alone), atol=1e-11, rtol=0)
    handle.undo()
    torch.testing.assert_close(call(model), call(alone), atol=1e-11, rtol=0)


class FastFeedForward(nn.Module):
    """Reads its layers' weights itself where it finds no hooks on them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        if self.training or any(layer._forward_hooks or layer._forward_pre_hooks for layer in (up, down)):
            hidden: torch.Tensor = down(torch.relu(up(x)))
            return hidden
        return F.linear(torch.relu(F.linear(x, up.weight, up.bias)), down.weight, down.bias)


@pytest.mark.ranks(2)
def test_no_fast_path_past_a_style(ranks: Ranks) -> None:
    """In evaluation a module would read one rank's rows itself: in later calls too, and where no plan knows of it."""
    mesh = ranks.mesh((2,), ("tp",))

    def encoder() -> Any:
        return models.seeded(lambda: nn.TransformerEncoderLayer(12, 4, 20, batch_first=True)).double().eval()

    first, second = encoder(), encoder()
    second.linear1, second.linear2 = first.linear1, first.linear2
    pair, third, alone = {"linear1": tp.ColwiseParallel(), "linear2": tp.RowwiseParallel()}, encoder(), encoder()
    container = nn.ModuleDict({"linear1": third.linear1, "linear2": third.linear2})
    styles = {"self_attn": tp.MultiheadAttentionParallel(), "linear1": tp.ColwiseParallel(output_layouts=Replicate())}
    own = models.seeded(FastFeedForward).double().eval()
    cases: list[tuple[nn.Module, nn.Module, dict[str, tp.ParallelStyle]]] = [
        (alone, alone, styles),
        (own, own, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}),
        (second, first, pair),
        (third, container, pair),
    ]
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for called, root, plan in cases:
        with torch.no_grad():
            expected = called(x)
            tp.apply_plan(root, mesh, plan)
            for _ in range(7):
                torch.testing.assert_close(called(x), expected, atol=EXACT, rtol=0)


class Grouped(nn.Module):
    """Attention with fewer key-value heads, separate or fused projections, norms of q and k."""

    def __init__(self, heads: int, keys: int, size: int = 2, fused: bool = False, norms: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.size = heads, keys, size
        self.num_key_value_groups = heads // keys
        width = 6
        if fused:
            self.qkv = nn.Linear(width, (heads + 2 * keys) * size)
        else:
            self.q_proj = nn.Linear(width, heads * size)
            self.k_proj, self.v_proj = (nn.Linear(width, keys * size) for _ in range(2))
        self.o_proj = nn.Linear(heads * size, width)
        self.q_norm, self.k_norm = (nn.RMSNorm(size) if norms else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "qkv"):
            sizes = [self.num_heads, self.num_key_value_heads, self.num_key_value_heads]
            q, k, v = self.qkv(x).split([count * self.size for count in sizes], dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (k, v))
        result: torch.Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


@pytest.mark.ranks(2, 4)
def test_grouped_queries(ranks: Ranks) -> None:
    """All shapes of up to 8 heads, and some of up to 32: exact or a plan error that says what would be valid."""
    size, mesh = ranks.world_size, ranks.mesh((ranks.world_size,), ("tp",))
    shapes = [(h, k) for h in range(1, 7) for k in range(1, h + 1) if h % k == 0]
    shapes += [(8, 2), (8, 8), (32, 8), (32, 1), (24, 3)]
    exact = refused = 0
    for (heads, keys), fused in itertools.product(shapes, (False, True)):
        model = models.seeded(lambda h=heads, k=keys, f=fused: Grouped(h, k, fused=f)).double()  # type: ignore[misc]
        for name in ("q_norm.weight", "k_norm.weight"):
            nn.init.normal_(model.get_parameter(name))
        alone = copy.deepcopy(model)
        style = tp.GQAParallel(kv_replicate=True, qkv="qkv" if fused else None, norms=("q_norm", "k_norm"))
        valid = heads % size == 0 and (keys % size == 0 or size % keys == 0)
        if not valid:
            with pytest.raises(tp.PlanError, match="valid 1"):
                tp.apply_plan(model, mesh, style, check="never")
            refused += 1
            continue
        handle = tp.apply_plan(model, mesh, style, check="never")
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        out, expected = model(x), alone(x)
        torch.testing.assert_close(out, expected, atol=EXACT, rtol=0)
        models.square_loss(out, x).backward()
        models.square_loss(expected, x).backward()
        gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        models.assert_close(models.full_gradients(model, mesh), gradients, atol=EXACT)
        handle.undo()
        assert vars(model)["num_heads"] == heads
        exact += 1
    assert (exact, refused) == {2: (24, 14), 4: (14, 24)}[size]


def test_grouped_queries_say_what_is_valid() -> None:
    def hint(heads: int, keys: int, tp_size: int, kv_replicate: bool = False) -> tuple[str, str]:
        style = tp.GQAParallel(kv_replicate=kv_replicate)
        (problem,) = tp.plan_styles(Grouped(heads, keys), style, tp_size).problems
        return problem.found, problem.hint

    assert hint(32, 4, 8) == ("num_key_value_heads=4 with tp=8", "valid 1, 2, 4, or kv_replicate=True")
    assert hint(12, 4, 8)[1] == "valid 1, 2, 4; with kv_replicate=True also 12"
    assert hint(12, 3, 8, True)[0] == "num_heads=12, num_key_value_heads=3 with tp=8"
