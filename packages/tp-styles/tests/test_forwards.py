"""Models under styles train as they do alone."""

from __future__ import annotations

import copy

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize

# float64: the ranks add in another order than one process does, and 5 steps of SGD do not amplify 1e-16.
EXACT = 1e-12


def ids(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 17, (2, 6), generator=generator) for _ in range(count)]


def vectors(width: int = 8, count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, 6, width, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.ranks(2, 4)
def test_gpt(ranks: Ranks) -> None:
    """Fused and tied, or neither, over the two tp sizes."""
    fused = tied = ranks.world_size == 4
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    model = models.seeded(lambda: models.GPT(fused=fused, tied=tied)).double()
    count = models.compare_training(
        model,
        lambda m: tp.apply_plan(m, mesh, models.gpt_plan(fused)),
        ids(),
        models.next_token_loss,
        mesh,
        atol=EXACT,
    )
    assert count > 6000
    if tied:
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    weight = model.get_parameter("layers.0.mlp.up.weight")
    assert isinstance(weight, DTensor)
    assert weight.to_local().numel() == 1024 // ranks.world_size


class Mixed(nn.Module):
    """What `GPT` has not: grouped queries with norms of heads, torch's attention, sequence shards around an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = models.GroupedAttention(16, 4, 2)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.before, self.after = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mlp = models.MLP(16, 20)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.grouped(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        result: torch.Tensor = self.out(self.after(self.mlp(self.before(x))))
        return result


@pytest.mark.ranks(2, 4)
def test_other_styles(ranks: Ranks) -> None:
    """5 steps of AdamW; 2 key-value heads, of which 4 ranks hold each twice."""
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    plan = {
        "grouped": tp.GQAParallel(q="q", k="k", v="v", o="o", norms=("q_norm", "k_norm"), kv_replicate=True),
        "attention": tp.MultiheadAttentionParallel(),
        "before": tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "after": tp.SequenceParallel(use_local_output=True),
        "mlp.up": tp.ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": tp.RowwiseParallel(output_layouts=Shard(1)),
        "out": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    model = models.roughen(models.seeded(Mixed)).double()
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(2, 8, 16, generator=generator, dtype=torch.float64) for _ in range(5)]
    count = models.compare_training(
        model,
        lambda m: tp.apply_plan(m, mesh, plan),
        batches,
        models.square_loss,
        mesh,
        atol=1e-9,  # AdamW divides by the root of squares
        lr=0.01,
        make=torch.optim.AdamW,
    )
    assert count > 2500


@pytest.mark.ranks(2)
def test_gradients_of_dtensors(ranks: Ranks) -> None:
    """They arrive as DTensors, whoever asks: hooks, `autograd.grad`, a second backward, a second derivative."""
    mesh = ranks.mesh((2,), ("tp",))
    layer = models.seeded(lambda: nn.Linear(4, 6)).double()
    alone = copy.deepcopy(layer)
    tp.apply_plan(layer, mesh, tp.ColwiseParallel(output_layouts=Replicate()))
    x = vectors(4)[0]
    grads = torch.autograd.grad(models.square_loss(layer(x), x), list(layer.parameters()))
    expected = torch.autograd.grad(models.square_loss(alone(x), x), list(alone.parameters()))
    captured: list[torch.Tensor] = []

    def doubled(gradient: torch.Tensor) -> torch.Tensor:
        captured.append(gradient)
        return gradient * 2

    handles = [p.register_hook(doubled) for p in layer.parameters()]
    for _ in range(2):
        torch.autograd.backward(models.square_loss(layer(x), x))
    for one, other, hooked, parameter in zip(grads, expected, captured, layer.parameters(), strict=False):
        assert isinstance(one, DTensor)
        assert isinstance(hooked, DTensor)
        assert type(parameter.grad) is DTensor
        torch.testing.assert_close(one.full_tensor(), other, atol=EXACT, rtol=0)
        torch.testing.assert_close((hooked + 0) * 2, parameter.grad / 2, atol=EXACT, rtol=0)
        torch.testing.assert_close(parameter.grad.full_tensor(), 4 * other, atol=EXACT, rtol=0)
    for handle in handles:
        handle.remove()
    for module in (layer, alone):
        module.zero_grad()
        module.get_parameter("bias").requires_grad_(False)
        loss, weight = models.square_loss(module(x), x), module.get_parameter("weight")
        (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
        full = first.full_tensor() if isinstance(first, DTensor) else first
        torch.autograd.backward(full.square().sum())
    assert layer.get_parameter("bias").grad is None
    gradients = {"weight": alone.get_parameter("weight").grad}
    assert models.assert_close(models.full_gradients(layer, mesh), gradients, atol=EXACT) == 24  # type: ignore[arg-type]


@pytest.mark.ranks(4)
def test_uneven_mlp(ranks: Ranks) -> None:
    mesh = ranks.mesh((4,), ("tp",))
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    for hidden in (10, 3):  # shards of 3, 3, 3, 1 rows and of 1, 1, 1, 0
        torch.manual_seed(0)
        model = models.MLP(8, hidden).double()
        models.compare_training(
            model, lambda m: tp.apply_plan(m, mesh, plan), vectors(), models.square_loss, mesh, atol=EXACT
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("down", [Replicate(), Shard(1), Shard(-1)])
@pytest.mark.parametrize("up", [Replicate(), Shard(1), Shard(-1)])
def test_layouts_at_the_edges(ranks: Ranks, up: Replicate | Shard, down: Replicate | Shard) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: models.MLP(8, 12)).double()
    reference = copy.deepcopy(model)
    tp.apply_plan(
        model,
        mesh,
        {"up": tp.ColwiseParallel(input_layouts=up), "down": tp.RowwiseParallel(output_layouts=down)},
        # A rank's loss is its own part of a sum here, which the check cannot tell from a loss of one rank's features.
        check="never" if down == Shard(-1) else "first",
    )
    weight = torch.linspace(0.5, 1.5, 96, dtype=torch.float64).view(2, 6, 8)

    def part(x: torch.Tensor, layout: Replicate | Shard) -> torch.Tensor:
        return x if isinstance(layout, Replicate) else models.rows(x, layout.dim)

    for x in vectors():
        local = part(x, up).clone().requires_grad_()
        alone = x.clone().requires_grad_()
        out, expected = model(local), reference(alone)
        torch.testing.assert_close(out, part(expected, down), atol=EXACT, rtol=0)
        (out * part(weight, down)).sum().backward()
        (expected * weight).sum().backward()
        torch.testing.assert_close(local.grad, part(alone.grad, up), atol=EXACT, rtol=0)  # type: ignore[arg-type]
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert models.assert_close(models.full_gradients(model, mesh), gradients, atol=1e-11) == 212


@pytest.mark.ranks(2)
def test_gradients_with_sequence_shards(ranks: Ranks) -> None:
    """Norm on a sequence shard, gathered into the MLP, scattered out of it: gradients as alone, norms included."""
    mesh = ranks.mesh((2,), ("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)).double()
    for name in ("0", "3"):
        nn.init.normal_(model.get_parameter(f"{name}.weight"))
    reference = copy.deepcopy(model)
    tp.apply_plan(
        model,
        mesh,
        {
            "0": tp.SequenceParallel(use_local_output=True),
            "1": tp.ColwiseParallel(input_layouts=Shard(1)),
            "2": tp.RowwiseParallel(output_layouts=Shard(1)),
            "3": tp.SequenceParallel(),
        },
    )
    weight = torch.linspace(0, 1, 2 * 6 * 8, dtype=torch.float64).view(2, 6, 8)
    for x in vectors():
        out = model(models.rows(x, 1))
        assert isinstance(out, DTensor)
        assert out.shape == x.shape
        torch.autograd.backward((out.to_local() * models.rows(weight, 1)).sum())
        (reference(x) * weight).sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert models.assert_close(models.full_gradients(model, mesh), gradients, atol=1e-11) == 244


@pytest.mark.ranks(2)
def test_sequence_output_of_a_dtensor_model_may_be_uneven(ranks: Ranks) -> None:
    """A length of 5 over 2 ranks: right where DTensors carry the global length, an error where nothing does."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: models.MLP(8, 12)).double()
    reference = copy.deepcopy(model)
    plan = {
        "up": tp.ColwiseParallel(),
        "down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    handle = tp.apply_plan(model, mesh, plan)
    x = vectors()[0][:, :5]
    out = model(x)
    assert isinstance(out, DTensor)
    assert out.shape == (2, 5, 8)
    torch.testing.assert_close(out.full_tensor(), reference(x), atol=EXACT, rtol=0)
    for one in (model, reference):  # backward gathers shards of 3 and 2 positions, which a local gradient shows nowhere
        for _ in range(5):
            one.zero_grad()
            result = one(x)
            result = result.full_tensor() if isinstance(result, DTensor) else result
            models.square_loss(result, x).backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert models.assert_close(models.full_gradients(model, mesh), gradients, atol=EXACT) == 212
    assert "check of MLP (training, with gradients): equal to the original" in handle.report()
    handle.undo()
    tp.apply_plan(model, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel(output_layouts=Shard(1))})
    with pytest.raises(tp.PlanError, match="uneven-shards"):
        model(x)


@pytest.mark.ranks(2)
def test_fused_sections(ranks: Ranks) -> None:
    """`chunk(3)` of a fused weight: a plain shard gives q of one rank and half of k; sections give a third of each."""
    mesh = ranks.mesh((2,), ("tp",))

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Linear(8, 36)
            self.down = nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.fused(x).chunk(3, dim=-1)
            result: torch.Tensor = self.down(a * torch.sigmoid(b) + c)
            return result

    model = models.seeded(Gated).double()
    count = models.compare_training(
        model,
        lambda m: tp.apply_plan(m, mesh, {"fused": tp.FusedColwiseParallel(3), "down": tp.RowwiseParallel()}),
        vectors(),
        models.square_loss,
        mesh,
        atol=EXACT,
    )
    assert count == 5 + 36 * 9 + 8 * 13
    weight = model.get_parameter("fused.weight")
    assert not isinstance(weight, DTensor)
    assert weight._sharding_info.sections == ((12, 1, 1, 0),) * 3  # type: ignore[attr-defined]
    gathered = models.seeded(lambda: nn.Linear(8, 36)).double()
    alone = copy.deepcopy(gathered)
    tp.apply_plan(gathered, mesh, tp.FusedColwiseParallel((12, 24), output_layouts=Replicate()))
    x = vectors()[0]
    torch.testing.assert_close(gathered(x), alone(x), atol=EXACT, rtol=0)


@pytest.mark.ranks(2)
def test_with_torchs_own_entry_and_styles(ranks: Ranks) -> None:
    """Our styles under torch's `parallelize_module`, and torch's under ours, in one model."""
    mesh = ranks.mesh((2,), ("tp",))
    for way in range(3):
        model = models.seeded(lambda: models.MLP(8, 12)).double()

        def apply(m: nn.Module, way: int = way) -> object:
            if way == 0:
                return torch_parallelize(m, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
            if way == 1:
                return tp.parallelize_module(m, mesh, {"up": TorchColwise(), "down": TorchRowwise()})
            return tp.parallelize_module(m, mesh, {"up": TorchColwise(), "down": tp.RowwiseParallel()})

        models.compare_training(model, apply, vectors(), models.square_loss, mesh, atol=EXACT)


@pytest.mark.ranks(2)
def test_what_is_communicated(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: models.MLP(8, 12))
    tp.apply_plan(model, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    x = torch.randn(2, 6, 8, requires_grad=True)
    model(x)  # the first call is checked
    with ranks.record() as log:
        out = model(x)
    assert log.ops == ("all_reduce",)
    assert log.bytes_sent() == 2 * 6 * 8 * 4
    with ranks.record() as log:
        out.sum().backward()
    assert log.ops == ("all_reduce",)
    assert log.bytes_sent() == 2 * 6 * 8 * 4
    with ranks.delayed():
        model(x).sum().backward()
