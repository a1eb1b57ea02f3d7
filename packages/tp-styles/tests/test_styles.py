"""What today's styles in torch 2.13 do wrong without a word, or break on: right here, or an error that says what to do.

Each test says in its first line what torch does.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_tp

EXACT = 1e-12


def x64(*shape: int) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.ranks(2)
def test_a_key_that_matches_nothing(ranks: Ranks) -> None:
    """Torch warns and trains unsharded."""
    mesh = ranks.mesh((2,), ("tp",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_tp.parallelize_module(models.MLP(), mesh, {"upp": torch_tp.ColwiseParallel()})
    assert len(caught) == 1
    with pytest.raises(tp.PlanError, match=r"unmatched-pattern.*upp.*similar names: up"):
        tp.parallelize_module(models.MLP(), mesh, {"upp": tp.ColwiseParallel()})


@pytest.mark.ranks(2)
def test_two_stars_cross_levels(ranks: Ranks) -> None:
    """Torch takes `**` for one level: nothing of a deeper model is sharded."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.GPT()
    tp.parallelize_module(model, mesh, {"**.up": tp.ColwiseParallel()})
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == 4


@pytest.mark.ranks(2)
def test_rowwise_embedding(ranks: Ranks) -> None:
    """Torch takes the ids as sharded: with the same ids on every rank the output is doubled."""
    mesh = ranks.mesh((2,), ("tp",))
    ids = torch.tensor([[0, 3, 6, 2]])
    layer = models.seeded(lambda: nn.Embedding(7, 4, padding_idx=2))
    alone, torchs = copy.deepcopy(layer), copy.deepcopy(layer)
    torch_tp.parallelize_module(torchs, mesh, torch_tp.RowwiseParallel())
    assert torchs(ids).shape != (1, 4, 4)
    tp.parallelize_module(layer, mesh, tp.RowwiseParallel())
    torch.testing.assert_close(layer(ids), alone(ids), atol=0, rtol=0)
    layer(ids).square().sum().backward()
    alone(ids).square().sum().backward()
    gradient = alone.get_parameter("weight").grad
    assert gradient is not None
    assert torch.equal(models.full_gradients(layer, mesh)["weight"], gradient)
    with pytest.raises(IndexError):
        layer(torch.tensor([7]))


@pytest.mark.ranks(2)
def test_sequence_parallel_keeps_frozen_parameters(ranks: Ranks) -> None:
    """Torch unfreezes them, and takes each rank's own values for equal."""
    mesh = ranks.mesh((2,), ("tp",))
    torch.manual_seed(ranks.rank)
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    norm.weight.requires_grad_(False)
    tp.parallelize_module(norm, mesh, tp.SequenceParallel())
    assert not norm.weight.requires_grad
    assert norm.bias.requires_grad
    assert isinstance(norm.weight, DTensor)
    values = ranks.gather(norm.weight.to_local())
    assert torch.equal(values[0], values[1])


@pytest.mark.ranks(2)
def test_sequence_parallel_on_an_uneven_sequence(ranks: Ranks) -> None:
    """Torch gives a DTensor with another global length on each rank (6 and 4 for 5)."""
    mesh = ranks.mesh((2,), ("tp",))
    norm = nn.LayerNorm(4)
    tp.parallelize_module(norm, mesh, tp.SequenceParallel())
    batch = torch.randn(2, 5, 4)
    with pytest.raises(tp.PlanError, match="uneven-shards"):
        norm(batch.chunk(2, 1)[ranks.rank])
    known = DTensor.from_local(batch, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    assert norm(known).shape == batch.shape


@pytest.mark.ranks(2)
def test_the_empty_key_keeps_src_data_rank(ranks: Ranks) -> None:
    """Torch drops it for the key `""`, and sends rank 0's values."""
    mesh = ranks.mesh((2,), ("tp",))
    torch.manual_seed(ranks.rank)
    layer = nn.Linear(4, 4)
    own = layer.weight.detach().clone()
    tp.parallelize_module(layer, mesh, {"": tp.ColwiseParallel()}, src_data_rank=None)
    assert isinstance(layer.weight, DTensor)
    assert torch.equal(layer.weight.to_local(), own.chunk(2)[ranks.rank])


@pytest.mark.ranks(2)
def test_prepare_input_of_a_dtensor_with_another_layout(ranks: Ranks) -> None:
    """Torch passes it through as if it had the declared layout."""
    mesh = ranks.mesh((2,), ("tp",))
    model = nn.Identity()
    style = tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    tp.parallelize_module(model, mesh, style)
    sharded = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    assert model(sharded).placements == (Replicate(),)
    theirs = torch_tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    assert torch_tp.parallelize_module(nn.Identity(), mesh, theirs)(sharded).placements == (Shard(0),)


class Two(nn.Module):
    def forward(self, a: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"product": a * scale, "scale": scale}


def test_wrong_names_of_keyword_arguments() -> None:
    """Torch redistributes nothing."""
    layouts: dict[str, Any] = {"scael": Shard(0)}
    style = tp.PrepareModuleInput(
        input_kwarg_layouts=layouts, desired_input_kwarg_layouts=dict.fromkeys(layouts, Replicate())
    )
    (problem,) = tp.plan_styles(Two(), style, 2).problems
    assert (problem.code, problem.hint) == ("unknown-name", "forward takes a, scale")
    with pytest.raises(TypeError):
        tp.PrepareModuleInput(input_kwarg_layouts={"a": Shard(0)}, desired_input_kwarg_layouts={"b": Shard(0)})


@pytest.mark.ranks(2)
def test_keyword_inputs_and_dict_outputs(ranks: Ranks) -> None:
    """Torch ignores an input that is passed by name, and breaks on a dict."""
    mesh = ranks.mesh((2,), ("tp",))
    model = Two()
    style = tp.PrepareModuleInputOutput(
        input_layouts=(Shard(0),),
        desired_input_layouts=(Replicate(),),
        input_kwarg_layouts={"scale": Replicate()},
        desired_input_kwarg_layouts={"scale": Replicate()},
        use_local_input=True,
        output_layouts=(Replicate(), None),
        desired_output_layouts=(Shard(0), None),
    )
    tp.parallelize_module(model, mesh, style)
    a = torch.full((2, 3), float(ranks.rank))
    for outputs in (model(a, scale=torch.tensor(2.0)), model(a=a, scale=torch.tensor(2.0))):
        assert list(outputs) == ["product", "scale"]
        assert torch.equal(outputs["product"], 2 * a)
    layer = models.seeded(lambda: nn.Linear(4, 4))
    alone = copy.deepcopy(layer)
    tp.parallelize_module(layer, mesh, tp.ColwiseParallel(output_layouts=Replicate()))
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(input=x), alone(x))  # "lin(input=x)"


@pytest.mark.ranks(2)
def test_a_tuple_of_one_stays_a_tuple(ranks: Ranks) -> None:
    """Torch returns the bare tensor."""

    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x,)

    mesh = ranks.mesh((2,), ("tp",))
    model = One()
    style = tp.PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(0),))
    tp.parallelize_module(model, mesh, style)
    out = model(torch.ones(4, 2))
    assert isinstance(out, tuple)
    assert out[0].shape == (2, 2)


@pytest.mark.ranks(2)
def test_tied_weights(ranks: Ranks) -> None:
    """Torch unties them: two parameters drift apart."""
    mesh = ranks.mesh((2,), ("tp",))
    model = models.GPT(tied=True)
    with pytest.raises(tp.PlanError, match=r"tied-weights.*embed.weight: dim 0; head.weight: no style"):
        tp.apply_plan(model, mesh, {"embed": tp.RowwiseParallel()})
    staged = models.GPT(tied=True)  # a later call may shard the head; until then nothing trains its full weight
    tp.parallelize_module(staged, mesh, {"embed": tp.RowwiseParallel()})
    with pytest.raises(tp.PlanError, match=r"parameter-replaced"):
        torch.optim.SGD(staged.parameters(), lr=0.1).step()
    tp.parallelize_module(staged.head, mesh, tp.ColwiseParallel())
    assert staged.get_parameter("embed.weight") is staged.get_parameter("head.weight")
    with pytest.raises(tp.PlanError, match="tied-weights"):
        tp.parallelize_module(model, mesh, {"embed": torch_tp.RowwiseParallel(), "head": tp.ColwiseParallel()})
    tp.parallelize_module(model, mesh, {"embed": tp.RowwiseParallel(), "head": tp.ColwiseParallel()})
    assert model.get_parameter("embed.weight") is model.get_parameter("head.weight")


@pytest.mark.ranks(2)
def test_replicated_parameters_in_a_sharded_region(ranks: Ranks) -> None:
    """Torch gives a q_norm the gradient of this rank's heads alone, 52 % off."""
    mesh = ranks.mesh((2,), ("tp",))

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.norm, self.o = nn.Linear(8, 8), nn.RMSNorm(4), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.o(self.norm(self.q(x).unflatten(-1, (-1, 4))).flatten(-2))
            return result

    model = models.seeded(Heads).double()
    alone = copy.deepcopy(model)
    plan = {"q": tp.ColwiseParallel(), "norm": tp.NoParallel(sum_gradient=True), "o": tp.RowwiseParallel()}
    tp.apply_plan(model, mesh, plan)
    x = x64(2, 3, 8)
    for _ in range(2):  # accumulated gradients are summed once
        model(x).square().sum().backward()
        alone(x).square().sum().backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert models.assert_close(models.full_gradients(model, mesh), gradients, atol=1e-11) == 148
    model, pair = models.seeded(Heads), {"q": tp.ColwiseParallel(), "o": tp.RowwiseParallel()}
    tp.apply_plan(model, mesh, pair)  # the norm is forgotten
    with torch.no_grad():
        model(torch.ones(2, 3, 8))
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*norm.*NoParallel\(sum_gradient=True\)"):
        model(torch.ones(2, 3, 8))
    frozen = models.seeded(Heads)
    frozen.get_parameter("norm.weight").requires_grad_(False)
    tp.apply_plan(frozen, mesh, pair)
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*norm.*NoParallel\(sum_gradient=True\)"):
        frozen(torch.ones(2, 3, 8))  # frozen now; it may thaw after its only check


@pytest.mark.ranks(2)
def test_unstyled_norms_outside_of_sharded_regions(ranks: Ranks) -> None:
    """The first call is compared with the module alone, once; gradients are those of the module alone."""
    mesh = ranks.mesh((2,), ("tp",))

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(8), nn.RMSNorm(8)
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.after(self.down(torch.relu(self.up(self.before(x)))))
            return result

    model = models.seeded(Flat).double()
    alone = copy.deepcopy(model)
    tp.apply_plan(model, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    x = x64(2, 3, 8)
    for first in (True, False):
        with ranks.record() as log:
            out = model(x)
        assert first or log.count("all_reduce") == 1
        assert (log.count() > 1) == first
    out.square().sum().backward()
    alone(x).square().sum().backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert models.assert_close(models.full_gradients(model, mesh), gradients, atol=1e-11) > 200


@pytest.mark.ranks(2)
def test_dropout_on_shards(ranks: Ranks) -> None:
    """Torch's local dropout draws one mask for all ranks."""
    mesh = ranks.mesh((2,), ("tp",))
    sharded, plain = nn.Dropout(0.5), nn.Dropout(0.5)
    tp.parallelize_module(sharded, mesh, tp.SequenceParallel(use_local_output=True))
    torch.manual_seed(0)
    masks = ranks.gather(sharded(torch.ones(1, 64)))
    assert not torch.equal(masks[0], masks[1])
    masks = ranks.gather(plain(torch.ones(1, 64)))
    assert torch.equal(masks[0], masks[1])
    assert sharded.eval()(torch.ones(1, 4)).sum() == 4


@pytest.mark.ranks(2)
def test_an_error_inside_the_loss_leaves_nothing_behind(ranks: Ranks) -> None:
    """Torch's `loss_parallel` keeps its handlers installed: ours is a function."""
    mesh = ranks.mesh((2,), ("tp",))
    logits = torch.randn(3, 4)
    with pytest.raises(tp.PlanError, match="shape-mismatch"):
        tp.vocab_parallel_cross_entropy(logits, torch.tensor([1]), mesh=mesh)
    plain = nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3]))
    assert type(plain) is torch.Tensor


@pytest.mark.ranks(2)
def test_layouts_that_cannot_be(ranks: Ranks) -> None:
    """Torch notices `input_layouts=(Shard(0),)` at the first forward."""
    assert tp.ColwiseParallel(input_layouts=(Shard(0),)) == tp.ColwiseParallel(input_layouts=Shard(0))
    with pytest.raises(TypeError, match="wrong-type"):
        tp.ColwiseParallel(input_layouts=(Shard(0), Shard(1)))
    with pytest.raises(TypeError, match="wrong-type"):
        tp.RowwiseParallel(output_layouts="replicate")  # type: ignore[arg-type]
    layer = nn.Linear(4, 4)
    tp.parallelize_module(layer, ranks.mesh((2,), ("tp",)), tp.RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(tp.PlanError, match=r"shape-mismatch.*dim 1: 3 -> the module takes 4"):
        layer(torch.randn(2, 3))


@pytest.mark.ranks(2)
def test_lora(ranks: Ranks) -> None:
    """Torch refuses a LoRA-wrapped linear layer."""
    mesh = ranks.mesh((2,), ("tp",))

    class LoRA(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base_layer = nn.Linear(inputs, outputs)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 3, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(3, outputs, bias=False)})
            self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.0)})
            self.base_layer.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            update = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
            result: torch.Tensor = self.base_layer(x) + 0.5 * update
            return result

    torch.manual_seed(0)
    model = nn.Sequential(LoRA(8, 12), nn.GELU(), LoRA(12, 8)).double()
    with pytest.raises(NotImplementedError, match="module-kind"):
        tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})
    batches = [x64(2, 3, 8) for _ in range(5)]
    plan = {"0": tp.LoRAParallel("column"), "2": tp.LoRAParallel("row")}
    models.compare_training(
        model, lambda m: tp.apply_plan(m, mesh, plan), batches, models.square_loss, mesh, atol=EXACT
    )


@pytest.mark.ranks(2)
def test_own_forward_of_a_linear_subclass(ranks: Ranks) -> None:
    """Torch runs it on DTensors; here its own forward runs on local ones, the bias once and after the sum."""
    mesh = ranks.mesh((2,), ("tp",))

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input * 2)

    class Scaled(Doubled):
        """A scale for each output feature: sharded as the bias."""

        def __init__(self, inside: int, outside: int) -> None:
            super().__init__(inside, outside)
            self.scale = nn.Parameter(torch.rand(outside))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(8, 12), Doubled(12, 8)).double()
    plan = {"0": tp.ColwiseParallel(), "1": tp.RowwiseParallel()}
    batches = [x64(2, 3, 8) for _ in range(5)]
    models.compare_training(
        model, lambda m: tp.apply_plan(m, mesh, plan), batches, models.square_loss, mesh, atol=1e-10
    )


@pytest.mark.ranks(2)
def test_fewer_layouts_than_inputs(ranks: Ranks) -> None:
    """Torch raises at the call; the other inputs passed as they were."""
    mesh = ranks.mesh((2,), ("tp",))

    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y

    style = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    model = tp.parallelize_module(Product(), mesh, style)
    with pytest.raises(ValueError, match="module inputs and input_layouts should have same length!"):
        model(torch.ones(2, 3), torch.ones(2, 1))
    with ranks.record(allow_empty=True) as log:  # as in torch, nothing is compared
        tp.parallelize_module(models.MLP(), mesh, {"up": tp.ColwiseParallel()}, src_data_rank=None)
    assert log.count() == 0


@pytest.mark.ranks(2)
def test_inputs_laid_out_as_dtensors_for_plain_parameters(ranks: Ranks) -> None:
    """The error of torch about mixed tensors comes with the argument that mends it."""
    layout = Replicate()
    prepare = tp.PrepareModuleInput(input_layouts=layout, desired_input_layouts=layout)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    tp.apply_plan(model, ranks.mesh((2,), ("tp",)), {"0": prepare, "1": tp.ColwiseParallel(output_layouts=layout)})
    with pytest.raises(tp.PlanError, match="use_local_output=True"):
        model(torch.ones(2, 4))
