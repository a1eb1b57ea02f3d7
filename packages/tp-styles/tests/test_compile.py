"""Under the compiler: one graph, the same random numbers, the same checks. One test a world: the tracer starts once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Shard

EXACT = 1e-12
pytestmark = pytest.mark.skipif(models.TORCH < (2, 12), reason="torch 2.11 cannot compile hooks that are objects")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(2, timeout=180)  # tracing takes long where the machine is busy
def test_compile(ranks: Ranks) -> None:
    without_graph_breaks(ranks)
    a_fused_weight_that_is_declared_a_plain_one(ranks)
    draws_as_in_eager_training(ranks)


class Compiled(nn.Module):
    """A Llama-like attention with DTensor parameters, an attention of torch with local ones, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = models.GroupedAttention(16, 4, 2)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 17, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.llama(x)
        out: torch.Tensor = self.head(x + self.attention(x, x, x, need_weights=False)[0])
        return out


def without_graph_breaks(ranks: Ranks) -> None:
    """Llama-like block, attention block and vocabulary-parallel loss under fullgraph (aot_eager: no C++ compiler)."""
    mesh = ranks.mesh((2,), ("tp",))
    model: Any = models.seeded(Compiled).double()
    grouped = tp.GQAParallel(q="q", k="k", v="v", o="o", norms=("q_norm", "k_norm"))
    tp.apply_plan(model.llama, mesh, grouped)
    tp.apply_plan(
        model,
        mesh,
        {"attention": tp.MultiheadAttentionParallel(), "head": tp.ColwiseParallel(output_layouts=Shard(-1))},
        params="local",
    )
    x, ids = torch.randn(2, 6, 16, dtype=torch.float64), torch.randint(0, 17, (2, 6))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return tp.vocab_parallel_cross_entropy(model(x), ids, mesh=mesh, num_classes=17)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
    torch.autograd.backward(compiled)
    found = models.full_gradients(model, mesh)
    model.zero_grad()
    eager = loss(x)
    torch.autograd.backward(eager)
    torch.testing.assert_close(compiled, eager, atol=EXACT, rtol=0)
    assert models.assert_close(found, models.full_gradients(model, mesh), atol=EXACT) > 1500
    fresh = models.seeded(lambda: nn.Sequential(models.MLP(), nn.Linear(8, 6)))
    tp.apply_plan(
        fresh,
        mesh,
        {
            "0.up": tp.ColwiseParallel(),
            "0.down": tp.RowwiseParallel(),
            "1": tp.ColwiseParallel(output_layouts=Shard(-1)),
        },
    )
    logits = torch.compile(fresh, backend="aot_eager", fullgraph=True)(torch.randn(2, 8))
    assert type(logits) is torch.Tensor


def a_fused_weight_that_is_declared_a_plain_one(ranks: Ranks) -> None:
    """The first call is checked while it is traced, with its own values."""
    for compiles in (False, True):
        model: Any = models.seeded(models.Gated)
        tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"both": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
        run = torch.compile(model, backend="aot_eager") if compiles else model
        for _ in range(3):  # also from compiled code
            with pytest.raises(tp.PlanError, match="check-mismatch"):
                run(torch.ones(3, 8))
        torch.compiler.reset()
    model = models.seeded(models.MLP)
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(3, 8))
    assert "check of MLP (training, with gradients): equal to the original" in handle.report()
    torch.compiler.reset()


def draws_as_in_eager_training(ranks: Ranks) -> None:
    """Outputs and gradients are bit-equal, ranks differ inside; what needs one graph gets an error."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(), nn.Linear(32, 8))).double()
    handle = tp.apply_plan(model, mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    x = torch.randn(4, 8, dtype=torch.float64)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        torch.manual_seed(1)
        model.zero_grad()
        out = run(x)
        out.sum().backward()
        found.append({"out": out.detach(), "next": torch.rand(1), **models.full_gradients(model, mesh)})
    assert models.assert_close(found[1], found[0], atol=0) > 500
    one, other = ranks.gather([value.tolist() for value in found[1].values()])
    assert one == other
    zeros = ranks.gather((model.get_parameter("2.weight").grad.to_local() == 0).any(0).tolist())  # type: ignore[union-attr]
    assert zeros[0] != zeros[1]  # channels dropped in all rows
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    handle.undo()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(4, timeout=300)
def test_compile_next_to_fsdp2(ranks: Ranks) -> None:
    """Tensor parallel over 2 ranks, fully sharded over 2: each block one graph, or the model; five steps as alone."""
    from torch.distributed.fsdp import fully_shard

    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    batches = [torch.randint(0, 17, (4, 6)) for _ in range(5)]
    own = [batch.chunk(2)[mesh["dp"].get_local_rank()] for batch in batches]
    alone: Any = models.seeded(models.GPT).double()
    start = copy.deepcopy(alone)
    models.train(alone, batches, models.next_token_loss)
    for by_block in (True, False):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model: Any = copy.deepcopy(start)
        handle = tp.apply_plan(model, mesh["tp"], models.gpt_plan())
        for layer in model.layers:
            if by_block:
                layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        if not by_block:
            model.compile(backend="aot_eager")  # graphs break where FSDP2 gathers
        models.train(model, own, models.next_token_loss)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        found = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert models.assert_close(found, dict(alone.named_parameters()), atol=1e-11) > 6000
        assert "equal to the original" in handle.report()
