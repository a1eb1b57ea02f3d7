"""Under the compiler: one graph, the same random numbers, the same checks. One test a world: the tracer starts once."""

from __future__ import annotations

import copy
from typing import Any

import moe_models as moe
import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from ranktest import warm_up_compiler as before_ranks  # noqa: F401  # ranktest calls it
from torch import nn
from torch.distributed.tensor import Replicate, Shard

EXACT = 1e-12
pytestmark = [
    pytest.mark.skipif(models.TORCH < (2, 12), reason="torch 2.11 cannot compile hooks that are objects"),
    pytest.mark.filterwarnings("ignore:.*compiled before its first call:UserWarning"),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(2, timeout=300)  # tracing takes long where the machine is busy
def test_compile(ranks: Ranks) -> None:
    without_graph_breaks(ranks)
    a_first_call_that_is_compiled(ranks)
    draws_as_in_eager_training(ranks)
    a_layer_that_comes_after_a_graph_break(ranks)
    whole_experts(ranks)


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
    )
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 17, (2, 6))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return tp.vocab_parallel_cross_entropy(model(x), ids, mesh=mesh, num_classes=17)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
    with ranks.record() as graph_log:
        torch.autograd.backward(compiled)
    gradients = models.full_gradients(model, mesh)
    model.zero_grad()
    eager = loss(x)
    with ranks.record() as eager_log:
        torch.autograd.backward(eager)
    # Of q, k and v together, of torch's attention, of the head; and of the two norms, whose gradients are summed.
    assert graph_log.count("all_reduce") == eager_log.count("all_reduce") == 5
    torch.testing.assert_close(compiled, eager, atol=EXACT, rtol=0)
    assert models.assert_close(gradients, models.full_gradients(model, mesh), atol=EXACT) > 1500
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
    logits = torch.compile(fresh, backend="eager", fullgraph=True)(torch.randn(2, 8))
    assert type(logits) is torch.Tensor
    gathered = models.seeded(lambda: nn.Linear(8, 6))  # backward cuts what forward has gathered
    tp.apply_plan(gathered, mesh, tp.ColwiseParallel(output_layouts=Replicate()))
    torch.compile(gathered.forward, backend="aot_eager", fullgraph=True)(torch.randn(2, 8)).sum().backward()


def a_first_call_that_is_compiled(ranks: Ranks) -> None:
    """It is reported as unchecked, with one warning; an eager call checks, also of a model that is compiled."""
    plan = {"both": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    model: Any = models.seeded(models.Gated)  # a fused weight declared a plain one
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), plan)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="Gated: compiled before its first call, so it is unchecked"):
        compiled(torch.ones(3, 8))
    assert "check of Gated (training, with gradients): unchecked: compiled before its first call" in handle.report()
    compiled(torch.ones(5, 8))  # another graph, no other warning
    with pytest.raises(tp.PlanError, match="check-mismatch"), torch.compiler.set_stance("force_eager"):
        compiled(torch.ones(3, 8))
    torch.compiler.reset()
    model = models.seeded(models.MLP)
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.compiler.set_stance("force_eager"):
        compiled(torch.ones(3, 8))
    compiled(torch.ones(3, 8))
    assert "check of MLP (training, with gradients): equal to the original" in handle.report()
    torch.compiler.reset()


class WithAdapter(nn.Module):
    """A pair with a graph break, after which a layer may come in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        out: torch.Tensor = self.down(self.middle(hidden))
        return out


def a_layer_that_comes_after_a_graph_break(ranks: Ranks) -> None:
    """The graph with the check holds nothing of the layer; other models change none."""
    model: Any = models.seeded(WithAdapter)
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    model = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="eager")
    for training in (True, False):
        model.train(training)
        model(torch.ones(3, 8))
        compiled(torch.ones(3, 8))
    nn.Sequential(WithAdapter())
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.ones(3, 8))
    shard = model.down.weight
    model.down.weight = nn.Parameter(shard.detach().to_local())
    with pytest.raises(tp.PlanError, match="local-shard-as-full"):
        compiled(torch.ones(3, 8))
    model.down.weight = shard
    model.middle = models.seeded(lambda: nn.Linear(8, 8))  # as long as a shard
    for training in (True, False, True):
        model.train(training)
        with pytest.raises(tp.PlanError, match="model-changed"), torch.compiler.set_stance("force_eager"):
            compiled(torch.ones(3, 8))
    torch.compiler.reset()


def draws_as_in_eager_training(ranks: Ranks) -> None:
    """Outputs and gradients are bit-equal, ranks differ inside; what needs one graph gets an error."""
    mesh = ranks.mesh((2,), ("tp",))
    pair = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    several = {
        "gate_proj": tp.ColwiseParallel(),
        "up_proj": tp.ColwiseParallel(),
        "act": tp.NoParallel(sum_gradient=True),
        "down_proj": tp.RowwiseParallel(),
    }
    for make, plan, backend in (
        (lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(), nn.Linear(32, 8)), pair, "aot_eager"),
        (lambda: models.GatedMLP(8, 32, 0.5), several, "eager"),
    ):
        model = models.seeded(make).double()
        handle = tp.apply_plan(model, mesh, plan)
        x = torch.randn(4, 8, dtype=torch.float64)
        results = []
        for run in (model, torch.compile(model, backend=backend)):
            torch.manual_seed(1)
            model.zero_grad()
            out = run(x)
            out.sum().backward()
            results.append({"out": out.detach(), "next": torch.rand(1), **models.full_gradients(model, mesh)})
        assert models.assert_close(results[1], results[0], atol=0) > 500
        one, other = ranks.gather([value.tolist() for value in results[1].values()])
        assert one == other
        row: Any = model.get_parameter(f"{list(plan)[-1]}.weight")
        zeros = ranks.gather((row.grad.to_local() == 0).any(0).tolist())
        assert zeros[0] != zeros[1]  # channels dropped in all rows
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(model, backend="eager", fullgraph=True)(x)
        torch.compiler.reset()
        handle.undo()


def whole_experts(ranks: Ranks) -> None:
    """Attention by heads beside whole experts, compiled after the check: three steps as one process.

    Experts run outside of the graph, five of them on two ranks.
    """
    model, alone = (moe.language_model(5, layers=1) for _ in range(2))
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    tp.apply_plan(model, mesh, moe.ATTENTION | moe.experts_plan(moe.Stacked, "replicated"))
    model(moe.batches(1, 8)[0])  # the check's call
    torch._dynamo.utils.counters.clear()
    compiled: Any = torch.compile(model, backend="eager")
    assert moe.compare(compiled, alone, mesh) > 3000
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(4, timeout=300)
def test_compile_next_to_fsdp2(ranks: Ranks) -> None:
    """Tensor parallel over 2 ranks, fully sharded over 2: each block one graph, or the model; five steps as alone."""
    from torch.distributed.fsdp import fully_shard

    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    batches = [torch.randint(0, 17, (4, 6)) for _ in range(5)]
    own = [batch.chunk(2)[mesh["dp"].get_local_rank()] for batch in batches]
    alone: Any = models.seeded(lambda: models.GPT(layers=1)).double()
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
            model.compile(backend="eager")  # graphs break where FSDP2 gathers; blocks go through autograd's graphs
        with torch.compiler.set_stance("force_eager"):
            models.next_token_loss(model(own[0]), own[0]).backward()
        model.zero_grad()
        models.train(model, own, models.next_token_loss)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        state = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert models.assert_close(state, dict(alone.named_parameters()), atol=1e-11) > 3500
        assert "equal to the original" in handle.report()
    torch.compiler.reset()
