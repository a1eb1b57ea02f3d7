"""Experts beside tensor and data parallelism, adapters, checkpoints and the router's losses."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import moe_models as moe
import pytest
import torch
import torch.distributed as dist
import tp_models as models
import tp_styles as tp
from moe_models import ATTENTION, compare
from ranktest import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint
from tp_styles.runtime.sequence import Kind
from tp_styles.values import ModuleInfo, Redistribution, StyleSpec

ATOL = 1e-12
STEPS = moe.STEPS


def pair(count: int = 4, **options: Any) -> tuple[Any, Any]:
    return moe.language_model(count, **options), moe.language_model(count, **options)


@pytest.mark.ranks(2, 4)
def test_attention_by_heads_and_whole_experts_on_one_axis(ranks: Ranks) -> None:
    """With the router's losses over all tokens, and a checkpoint around each layer."""
    mesh = ranks.mesh((ranks.world_size,), ("tp",))
    plan = ATTENTION | moe.experts_plan(moe.Stacked, "replicated")
    model, alone = pair(6)
    handle = tp.apply_plan(model, mesh, plan)
    assert compare(model, alone, mesh, router=0.1) > 3000
    assert ": unchecked" not in handle.report()
    for kind in (moe.Stacked, moe.Numbered):
        model, alone = pair(5, kind=kind)
        tp.apply_plan(model, mesh, ATTENTION | moe.experts_plan(kind, "replicated"))
        for layer in model.layers:
            layer.forward = Checkpointed(layer)
        assert compare(model, alone, mesh) > 3000


class Checkpointed:
    """A layer's forward, which runs again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        self.run = type(layer).forward.__get__(layer)

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint(self.run, x, use_reentrant=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tokens", ["replicated", "sharded"])
def test_attention_by_heads_and_whole_experts_on_two_axes(ranks: Ranks, tokens: str) -> None:
    """Tokens are the same along the axis of attention; along that of the experts too, or each has its own."""
    mesh = ranks.mesh((2, 2), ("ep", "tp"))
    model, alone = pair()
    tp.apply_plan(model, mesh["tp"], ATTENTION)
    if tokens == "replicated":
        tp.apply_plan(model, mesh["ep"], moe.experts_plan(moe.Stacked, tokens))
        assert compare(model, alone, mesh["ep"]) > 3000
        return
    for layer in model.layers:
        tp.apply_plan(layer.moe.experts, mesh["ep"], tp.ExpertParallel("sharded"))
    rank = mesh["ep"].get_local_rank()

    def average(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            gradient: Any = parameter.grad
            if ".experts." not in name:
                dist.all_reduce(getattr(gradient, "_local_tensor", gradient), group=mesh["ep"].get_group())
            gradient.div_(2)

    assert compare(model, alone, mesh["ep"], rows=lambda x: x.chunk(2)[rank], before_step=average, ranks=2) > 3000


class Logits(nn.Module):
    """The language model without the router's logits. Its attention is causal, and that alone orders its tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = moe.MoELM(6, **options)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids)[0]
        return logits


@pytest.mark.ranks(2, 4)
def test_experts_beside_shards_of_a_sequence(ranks: Ranks) -> None:
    """On one axis the tokens of a rank are those of its sequence; on another axis all ranks of it have them."""
    two_axes = ranks.world_size == 4
    mesh = ranks.mesh((2, 2) if two_axes else (2,), ("ep", "cp") if two_axes else ("cp",))
    cp = mesh["cp"]
    pairs: tuple[tuple[Kind, type[nn.Module]], ...] = (("ulysses", moe.Stacked), ("gather", moe.Numbered))
    for attention, kind in pairs:
        model, alone = (models.seeded(partial(Logits, kind=kind)).double() for _ in range(2))
        context = tp.ContextParallel(attention)
        experts = {f"model.{key}": style for key, style in moe.experts_plan(kind, "replicated").items()}
        if two_axes:
            tp.apply_plan(model, mesh["ep"], experts)
            model(moe.batches(1, 4, 8)[0]).sum().backward()  # the experts are checked by themselves
            model.zero_grad()
            handle = tp.apply_plan(model, cp, context)
        else:
            own = {f"model.{key}": style for key, style in moe.experts_plan(kind, "sharded").items()}
            handle = tp.apply_plan(model, cp, {**own, "": context})
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, alone)]
        for ids in moe.batches(STEPS, 4, 8):
            losses = [models.next_token_loss(each(ids), ids) for each in (model, alone)]
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            torch.testing.assert_close(*losses, atol=ATOL, rtol=ATOL)
        axis = mesh["ep"] if two_axes else cp
        wanted = {name: p.detach() for name, p in alone.named_parameters()}
        assert models.assert_close(moe.full_values(model, axis), wanted, ATOL) > 3000
        assert "equal to the original" in handle.report()


@pytest.mark.ranks(2, 4)
def test_fully_sharded_on_the_axis_of_the_experts(ranks: Ranks) -> None:
    """FSDP2 leaves the experts out; the gradient of an expert is divided by the number of averaged losses."""
    mesh, size = ranks.mesh((ranks.world_size,), ("ep",)), ranks.world_size
    model, alone = pair()
    for layer in model.layers:
        tp.apply_plan(layer.moe.experts, mesh, tp.ExpertParallel("sharded"))
    experts = {p for name, p in model.named_parameters() if ".experts." in name}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)

    def divide(model: nn.Module) -> None:
        for parameter in experts:
            assert parameter.grad is not None
            parameter.grad.div_(size)

    rows = ranks.rank
    assert compare(model, alone, mesh, rows=lambda x: x.chunk(size)[rows], before_step=divide, ranks=size) > 3000


@pytest.mark.ranks(4)
def test_fully_sharded_on_another_axis_and_clipped(ranks: Ranks) -> None:
    """Experts over ep and efsdp, everything else over both: norms over mixed meshes are those of one process."""
    mesh = ranks.mesh((2, 2), ("efsdp", "ep"))
    model, alone = pair(6)
    for layer in model.layers:
        tp.apply_plan(layer.moe.experts, mesh["ep"], tp.ExpertParallel("sharded"))
    everything = mesh._flatten("all")
    for layer in model.layers:
        fully_shard(layer.moe.experts, mesh=mesh["efsdp"])
        layer.moe.experts.set_gradient_divide_factor(4)
        fully_shard(layer, mesh=everything)
    fully_shard(model, mesh=everything)
    rank = ranks.rank
    placed = model.layers[0].moe.experts.down
    assert len(placed.placements) == 2
    assert placed.to_local().shape[0] < 6 / 2 + 1
    assert compare(model, alone, mesh, rows=lambda x: x.chunk(4)[rank], ranks=4) > 3000


@pytest.mark.ranks(4)
def test_numbered_experts_that_fsdp2_shards_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """Before the first call and after it, by themselves and within a layer: FSDP2 loses which rank has which expert."""
    mesh, count = ranks.mesh((2, 2), ("efsdp", "ep")), 0
    tokens, experts, weights = torch.ones(4, moe.WIDTH), torch.arange(4)[:, None], torch.ones(4, 1)
    # FSDP2 before torch 2.13 takes no list of modules by itself, whatever forward it has.
    ways = (False, True) if models.TORCH >= (2, 13) else (True,)
    for is_called, is_outside in itertools.product((False, True), ways):
        mixture: Any = models.seeded(lambda: moe.Mixture(5, moe.Numbered))
        tp.apply_plan(mixture.experts, mesh["ep"], tp.ExpertParallel("sharded"))
        if is_called:
            mixture.experts(tokens, experts, weights)
        fully_shard(mixture if is_outside else mixture.experts, mesh=mesh["efsdp"])
        call = partial(mixture, tokens) if is_outside else partial(mixture.experts, tokens, experts, weights)
        with pytest.raises(tp.PlanError) as error:
            call()
        assert "[local-shard-as-full] expert_0." in str(error.value)
        assert "ignored_params" in str(error.value)
        count += len(set(ranks.gather(str(error.value)))) == 1
    assert count == 2 * len(ways)


@pytest.mark.ranks(2)
def test_router_losses_over_all_ranks_tokens(ranks: Ranks) -> None:
    """Each rank has its own tokens: the loss of the mean is not the mean of losses, so the logits are gathered."""
    mesh, rank = ranks.mesh((2,), ("ep",)), ranks.rank

    def average(model: nn.Module) -> None:
        moe.average_dense(model, 2)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return ids.chunk(2)[rank]

    for gathers in (True, False):
        model, alone = pair()
        for layer in model.layers:
            style = {"router": tp.RouterLogits(outputs=3)} if gathers else {}
            tp.apply_plan(layer.moe, mesh, style | {"experts": tp.ExpertParallel("sharded")}, check="never")
        if gathers:
            assert compare(model, alone, mesh, rows=rows, before_step=average, ranks=2, router=0.1) > 3000
        else:
            with pytest.raises(AssertionError):
                compare(model, alone, mesh, rows=rows, before_step=average, ranks=2, router=0.1)


class LosesTheSum(tp.RouterLogits):
    """Each rank keeps the gradient of its own rows alone: half of what FSDP2's average on two ranks takes."""

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        flow = Redistribution(Shard(0), Replicate())
        return StyleSpec(outputs=(flow, None, None))


@pytest.mark.ranks(2)
def test_a_router_with_gathered_logits_is_compared_with_the_original(ranks: Ranks) -> None:
    """Each rank passes its own tokens, which no check of one call declares; `compare` deals out the rows itself."""
    mesh, ids = ranks.mesh((2,), ("ep",)), moe.batches(1, 4)[0]

    def sharded(router: tp.ParallelStyle | None) -> Any:
        model = moe.language_model(4)
        styles = {"router": router} if router else {}
        for layer in model.layers:
            tp.apply_plan(layer.moe, mesh, styles | {"experts": tp.ExpertParallel("sharded")}, check="never")
        experts = {p for name, p in model.named_parameters() if ".experts." in name}
        for parameter in experts:
            parameter.register_hook(lambda gradient: gradient / 2)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=experts)
        return fully_shard(model, mesh=mesh, ignored_params=experts)

    original = partial(moe.language_model, 4)
    right = sharded(tp.RouterLogits())
    found = tp.compare(right, original, ids, data_mesh=mesh)
    assert found.compared.tensors == 2
    assert found.unchecked == tuple(f"layers.{i}.attn.k.bias (zero in both)" for i in range(2))  # softmax takes none
    assert found.compared.gradients == len(dict(right.named_parameters())) - 2
    for style, text in ((None, r"shape \(2, 10, 4\)"), (LosesTheSum(), r"router\.gate\.weight: gradient differs")):
        with pytest.raises(tp.PlanError, match=text):
            tp.compare(sharded(style), original, ids, data_mesh=mesh)


class LoRA(nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 3, bias=False).double()
        self.lora_B = nn.Linear(3, base.out_features, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return result


@pytest.mark.ranks(2)
def test_adapters_beside_experts(ranks: Ranks) -> None:
    """LoRA on attention, frozen experts with a trained bias, and a frozen router: gradients flow where they should."""
    mesh = ranks.mesh((2,), ("tp",))
    both = pair()
    for model in both:
        torch.manual_seed(5)
        model.requires_grad_(False)
        for layer in model.layers:
            layer.attn.q, layer.attn.v = LoRA(layer.attn.q), LoRA(layer.attn.v)
            layer.moe.experts.down_bias.requires_grad_(True)
    model, alone = both
    lora = {"layers.*.attn.[qv]": tp.LoRAParallel("column"), "layers.*.attn.k": tp.ColwiseParallel()}
    rest = {"layers.*.attn.proj": tp.RowwiseParallel()}
    tp.apply_plan(model, mesh, lora | rest | moe.experts_plan(moe.Stacked, "replicated"))
    assert compare(model, alone, mesh) > 3000
