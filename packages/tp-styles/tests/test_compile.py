"""Under the compiler: one graph, the same random numbers, the same checks. One test a world: the tracer starts once."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]  # torch exports it so
from torch.distributed.tensor import DTensor, Replicate, Shard

EXACT = 1e-12
pytestmark = pytest.mark.skipif(models.TORCH < (2, 12), reason="torch 2.11 cannot compile hooks that are objects")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(2, timeout=300)  # tracing takes long where the machine is busy
def test_compile(ranks: Ranks) -> None:
    without_graph_breaks(ranks)
    a_fused_weight_that_is_declared_a_plain_one(ranks)
    draws_as_in_eager_training(ranks)
    a_mistake_in_a_later_mode(ranks)
    a_layer_that_comes_after_a_graph_break(ranks)


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
    gathered = models.seeded(lambda: nn.Linear(8, 6))  # backward cuts what forward has gathered
    tp.apply_plan(gathered, mesh, tp.ColwiseParallel(output_layouts=Replicate()))
    torch.compile(gathered.forward, backend="aot_eager", fullgraph=True)(torch.randn(2, 8)).sum().backward()


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


class WrongInOneMode(models.MLP):
    """Shards give another result than full values, in one mode."""

    wrong = (True, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if (self.training, torch.is_grad_enabled()) == self.wrong:
            hidden = hidden.flip(-1)
        out: torch.Tensor = self.down(hidden)
        return out


def a_mistake_in_a_later_mode(ranks: Ranks) -> None:
    """A compiled root is checked in its third mode too, whether or not `check_compiled` was called in the others."""
    for wrong in ((True, False), (False, True)):
        for compares in (False, True):
            model: Any = models.seeded(WrongInOneMode)
            model.wrong = wrong
            plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
            handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), plan)
            compiled: Any = torch.compile(model, backend="eager")
            for training, grad in ((True, True), (False, False), wrong):
                model.train(training)
                with torch.set_grad_enabled(grad):
                    if (training, grad) == wrong:
                        with pytest.raises(tp.PlanError, match="check-mismatch"):
                            compiled(torch.ones(3, 8))
                    elif compares:
                        handle.check_compiled(compiled, torch.ones(3, 8))
                    else:
                        compiled(torch.ones(3, 8))
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
        with pytest.raises(tp.PlanError, match="model-changed"):
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
    for make, plan in (
        (lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(), nn.Linear(32, 8)), pair),
        (lambda: models.GatedMLP(8, 32, 0.5), several),
    ):
        model = models.seeded(make).double()
        handle = tp.apply_plan(model, mesh, plan)
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
        row: Any = model.get_parameter(f"{list(plan)[-1]}.weight")
        zeros = ranks.gather((row.grad.to_local() == 0).any(0).tolist())
        assert zeros[0] != zeros[1]  # channels dropped in all rows
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        torch.compiler.reset()
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
        handle.check_compiled(model, own[0])
        models.train(model, own, models.next_token_loss)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        found = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert models.assert_close(found, dict(alone.named_parameters()), atol=1e-11) > 6000
        assert f"1 outputs, {len(found)} gradients" in handle.report()
        assert "equal to the original" in handle.report()


class Breaking(nn.Module):
    """A pair, with a graph break between its layers if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.breaks = False
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
            self.calls.append(len(x))
        out: torch.Tensor = self.down(hidden)
        return out


class Stateful(nn.Module):
    """Everything that a call can leave behind, and several outputs, one of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pair = nn.BatchNorm1d(8), Breaking()

    def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = F.dropout(self.norm(x), 0.5, self.training)
        out = self.pair(x) * scale["scale"]
        return {"out": out, "more": [out.detach().square(), (x + torch.sin(out),)]}


def only_the_sum(model: nn.Module, *args: Any) -> torch.Tensor:
    total: torch.Tensor = model(*args)["out"].sum()
    return total


STATEFUL = {"pair.up": tp.ColwiseParallel(), "pair.down": tp.RowwiseParallel()}


def faulty(old: Any, new: Any) -> Any:
    """A backend that computes one operation as another, in forward and backward."""

    def replaced(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            node.target = new if node.target is old else node.target
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=replaced, bw_compiler=replaced)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by it, too
@pytest.mark.ranks(2, timeout=300)
def test_a_compiled_call_is_compared_with_the_eager_one(ranks: Ranks) -> None:
    a_right_one_leaves_nothing_behind(ranks)
    mistakes_of_the_compiler(ranks)
    what_cannot_be_compared(ranks)


def stateful(ranks: Ranks, params: Any = "dtensor", check: Any = "first") -> tuple[Any, tp.TPHandle]:
    model: Any = models.seeded(Stateful).double()
    handle = tp.apply_plan(model, ranks.mesh((2,), ("tp",)), STATEFUL, params=params, check=check)
    return model, handle


def batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    return torch.randn(4, 8, dtype=torch.float64), {"scale": torch.ones(8, dtype=torch.float64, requires_grad=True)}


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters and buffers."""
    both = dict([*model.named_parameters(), *model.named_buffers()])
    return {name: (x.to_local() if isinstance(x, DTensor) else x).detach().clone() for name, x in both.items()}


def a_right_one_leaves_nothing_behind(ranks: Ranks) -> None:
    """Whole, by a function, or by its parts; compiled before or after the plan; then no call compiles again."""
    for breaks in (False, True):
        for index, order in enumerate(("after", "before", "parts", "function")):
            torch.compiler.reset()
            model: Any = models.seeded(Stateful).double()
            model.pair.breaks = breaks
            compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=not breaks)
            handle = tp.apply_plan(
                model, ranks.mesh((2,), ("tp",)), STATEFUL, params="local" if (index + breaks) % 2 else "dtensor"
            )
            if order == "after":
                compiled = torch.compile(model, backend="aot_eager", fullgraph=not breaks)
            elif order == "parts":
                compiled = model
                model.pair.compile(backend="aot_eager", fullgraph=not breaks)
            elif order == "function":
                compiled = torch.compile(partial(only_the_sum, model), backend="aot_eager")
            steps: list[torch.Tensor] = []
            model.pair.down.weight.register_post_accumulate_grad_hook(steps.append)
            x, scale = batch()
            (model.pair.up.weight * 1.0).sum().backward()
            before = held(model)
            gradient, drawn = model.pair.up.weight.grad, torch.get_rng_state()
            gradients = gradient.clone()
            handle.check_compiled(compiled, x, scale)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert model.pair.up.weight.grad is gradient and torch.equal(gradient, gradients)
            assert (
                model.pair.down.weight.grad is None
                and scale["scale"].grad is None
                and not steps
                and not model.pair.calls
            )
            assert models.assert_close(held(model), before, atol=0) > 170
            outputs = 1 if order == "function" else 3
            report = handle.report()
            assert f"compiled call (training, {outputs} outputs, " in report, report
            assert "check of Stateful (training, with gradients): equal to the original" in report
            with torch.compiler.set_stance("fail_on_recompile"):
                handle.check_compiled(compiled, x, scale)
                out = compiled(x, scale)
            (out if order == "function" else out["out"].sum()).backward()
            assert len(steps) == 1


def mistakes_of_the_compiler(ranks: Ranks) -> None:
    """In an output, in a nested one alone, in gradients alone, behind a graph break, on one rank alone."""
    aten = torch.ops.aten
    for breaks, old, new, name in (
        (False, aten.tanh.default, aten.sigmoid.default, "-> output 0"),
        (True, aten.tanh.default, aten.sigmoid.default, "-> output 0"),
        (False, aten.sin.default, aten.cos.default, "-> output 2"),
        (True, aten.sin.default, aten.cos.default, "-> output 2"),
        (False, aten.tanh_backward.default, lambda gradient, y: gradient, "pair.up.weight"),
        (True, aten.tanh_backward.default, lambda gradient, y: gradient, "pair.up.weight"),
    ):
        for bad_rank in (None, 1) if not breaks else (None,):
            torch.compiler.reset()
            model, handle = stateful(ranks)
            model.pair.breaks = breaks
            backend = faulty(old, new if bad_rank in (None, ranks.rank) else old)
            compiled = torch.compile(model, backend=backend, fullgraph=not breaks)
            before = held(model)
            for _ in range(2):
                with pytest.raises(tp.PlanError, match=r"check-mismatch.*in the compiled call") as caught:
                    handle.check_compiled(compiled, *batch())
                assert any(problem.name == name for problem in caught.value.problems), (name, caught.value)
            assert models.assert_close(held(model), before, atol=0) > 170
            if name == "pair.up.weight":
                with torch.no_grad():  # a graph without a backward
                    handle.check_compiled(compiled, *batch())


def what_cannot_be_compared(ranks: Ranks) -> None:
    """An error of either call is one on every rank, and so is a model that nothing has compiled."""
    torch.compiler.reset()
    model, handle = stateful(ranks, check="never")
    with pytest.raises(tp.PlanError, match=r"invalid-argument.*no module in it is compiled"):
        handle.check_compiled(model, *batch())
    with pytest.raises(tp.PlanError, match=r"check-raises.*the call without the compiler"):
        handle.check_compiled(torch.compile(model, backend="aot_eager"), torch.ones(2, 3), {})

    def refuses(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("this backend")

    def draws(graph: Any, inputs: Any) -> Any:
        return lambda *values: (torch.rand(1), graph(*values))[1]

    compiled = torch.compile(model, backend=draws)
    with pytest.raises(
        tp.PlanError, match=r"^\[check-mismatch\] random numbers: the compiled call draws others.*in eval\(\)$"
    ):
        handle.check_compiled(compiled, *batch())
    handle.check_compiled(torch.compile(model.eval(), backend=draws), *batch())  # drawn for nothing
    model.train()

    compiled = torch.compile(model, backend=refuses)
    with pytest.raises(tp.PlanError, match=r"check-raises.*the compiled call.*this backend"):
        handle.check_compiled(compiled, *batch())
    mistaken: Any = models.seeded(models.Gated)
    plan = {"both": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    handle = tp.apply_plan(mistaken, ranks.mesh((2,), ("tp",)), plan)
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*of the original module"):  # the sharded eager one is wrong
        handle.check_compiled(torch.compile(mistaken, backend="aot_eager"), torch.ones(3, 8))
