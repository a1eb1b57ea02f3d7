"""Loss over a sharded vocabulary, gradient clipping, random regions, compile, checkpointing, FSDP2 beside it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tp_styles.values import Split

EXACT = 1e-12


@pytest.mark.ranks(2, 4)
def test_vocab_parallel_cross_entropy(ranks: Ranks) -> None:
    """Every option against torch on the whole logits, uneven vocabularies too (9 classes over 4 ranks: 3, 3, 3, 0)."""
    size, mesh = ranks.world_size, ranks.mesh((ranks.world_size,), ("tp",))
    generator = torch.Generator().manual_seed(0)
    count = 0
    for classes, weighted, smoothing, reduction in itertools.product(
        (8, 9), (False, True), (0.0, 0.1), ("mean", "sum", "none")
    ):
        logits = torch.randn(3, 5, classes, generator=generator, dtype=torch.float64) * 5
        target = torch.randint(0, classes, (3, 5), generator=generator)
        target[0, 1] = target[2, 4] = -100
        weight = torch.rand(classes, generator=generator, dtype=torch.float64) if weighted else None
        ((start, stop),) = Split.along(0, classes).ranges(ranks.rank, size)
        local = logits[..., start:stop].clone().requires_grad_()
        alone = logits.clone().requires_grad_()
        loss = tp.vocab_parallel_cross_entropy(
            local,
            target,
            mesh=mesh,
            num_classes=classes,
            weight=weight,
            label_smoothing=smoothing,
            reduction=reduction,  # type: ignore[arg-type]
        )
        expected = F.cross_entropy(
            alone.movedim(-1, 1), target, weight=weight, label_smoothing=smoothing, reduction=reduction
        )
        torch.testing.assert_close(loss, expected, atol=EXACT, rtol=1e-12)
        torch.autograd.backward(loss.square().sum())
        torch.autograd.backward(expected.square().sum())
        assert alone.grad is not None
        torch.testing.assert_close(local.grad, alone.grad[..., start:stop], atol=EXACT, rtol=1e-12)
        placed: Any = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
        replicated = distribute_tensor(target, mesh, [Replicate()])
        other = tp.vocab_parallel_cross_entropy(
            placed,
            replicated if weighted else target,
            weight=weight,
            label_smoothing=smoothing,
            reduction=reduction,  # type: ignore[arg-type]
        )
        assert torch.equal(other, loss)
        torch.autograd.backward(other.square().sum())
        assert isinstance(placed.grad, DTensor)
        if models.TORCH >= (2, 13):  # before, autograd keeps a gradient of other strides replicated
            assert placed.grad.placements == placed.placements
        torch.testing.assert_close(placed.grad.full_tensor(), alone.grad, atol=EXACT, rtol=1e-12)
        count += 1
    assert count == 24
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        (r"layout-mismatch.*Shard\(dim=0\)", distribute_tensor(logits, mesh, [Shard(0)]), {}),
        ("layout-mismatch.*redistribute", distribute_tensor(logits, mesh, [Replicate()]), {}),
        ("shape-mismatch.*num_classes", placed, {"num_classes": classes + 1}),
        ("layout-mismatch.*weight", placed, {"weight": distribute_tensor(logits[0, 0], mesh, [Shard(0)])}),
    ]
    for match, tensor, options in wrong:
        with pytest.raises(tp.PlanError, match=match):
            tp.vocab_parallel_cross_entropy(tensor, target, **options)
    with ranks.record() as log:
        loss = tp.vocab_parallel_cross_entropy(local, target, mesh=mesh, num_classes=classes)
        torch.autograd.backward(loss)
    assert log.ops == ("all_reduce", "all_reduce")
    low = tp.vocab_parallel_cross_entropy(logits.bfloat16()[..., start:stop], target, mesh=mesh, num_classes=classes)
    assert low.dtype == torch.bfloat16
    with pytest.raises(tp.PlanError, match="uneven-shards"):
        tp.vocab_parallel_cross_entropy(torch.randn(2, 3 + ranks.rank), torch.tensor([0, 1]), mesh=mesh)
    with pytest.raises(IndexError):
        tp.vocab_parallel_cross_entropy(torch.randn(2, 3), torch.tensor([0, 3 * size]), mesh=mesh)
    with pytest.raises(tp.PlanError, match="missing-mesh"):
        tp.vocab_parallel_cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]))


class WithZLoss(nn.Module):
    """A language model that returns its loss, with the square of the logits' normalizer added."""

    def __init__(self, mesh: Any, normalizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.mesh, self.normalizer = mesh, normalizer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids))
        if self.mesh is None:  # one process
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flip(-1).flatten())
        else:
            mesh = None if isinstance(logits, DTensor) else self.mesh
            loss = tp.vocab_parallel_cross_entropy(logits, ids.flip(-1), mesh=mesh)
        z = self.normalizer(logits).square().mean()
        result: torch.Tensor = loss + 0.1 * (z.full_tensor() if isinstance(z, DTensor) else z)
        return result


@pytest.mark.ranks(2)
def test_a_z_loss_is_right_on_dtensors_and_found_on_shards(ranks: Ranks) -> None:
    mesh, ids = ranks.mesh((2,), ("tp",)), torch.arange(12).view(2, 6)
    normalizers: list[Callable[[Any], Any]] = [lambda x: x.exp().sum(-1).log(), lambda x: x.sum(-1)]
    compared = found = 0
    for normalizer in normalizers:
        places = (None, mesh, mesh)
        alone, model, local = (models.seeded(partial(WithZLoss, place, normalizer)).double() for place in places)
        tp.apply_plan(model, mesh, {"head": tp.ColwiseParallel(use_local_output=False)})
        losses = [each(ids) for each in (alone, model)]
        torch.testing.assert_close(losses[1], losses[0], atol=EXACT, rtol=EXACT)
        for loss in losses:
            loss.backward()
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        compared += models.assert_close(models.full_gradients(model, mesh), expected, atol=1e-10)
        tp.apply_plan(local, mesh, {"head": tp.ColwiseParallel(output_layouts=Shard(-1))})
        with pytest.raises(tp.PlanError, match=r"check-mismatch.*-> output"):
            local(ids)
        found += 1
    assert compared == 2 * 2 * 16 * 8 and found == 2


@pytest.mark.ranks(2, 4)
def test_clip_grad_norm(ranks: Ranks) -> None:
    """Torch raises on tensors and DTensors mixed; the norm counts whole parameters and copies once, on every rank."""
    size, mesh = ranks.world_size, ranks.mesh((ranks.world_size,), ("tp",))
    for order in (2.0, 1.0, 3.0, math.inf):
        model = models.seeded(lambda: models.GPT(fused=True)).double()
        key = models.seeded(lambda: nn.Linear(4, 2)).double()  # one head on all ranks: as many copies as ranks
        both = nn.ModuleList([model, key])
        alone = copy.deepcopy(both)
        copies = tp.FusedColwiseParallel((2,), unit=2, copies=size, output_layouts=Shard(-1))
        plan = {f"0.{name}": style for name, style in models.gpt_plan(True).items() if "**" not in name}
        tp.apply_plan(both, mesh, {**plan, "0.**.down": tp.RowwiseParallel(), "1": copies})
        ids, x = torch.randint(0, 17, (2, 6)), torch.randn(3, 4, dtype=torch.float64)
        for pair, ones in ((both, 1 / size), (alone, 1.0)):
            gpt, linear = pair
            torch.autograd.backward(models.next_token_loss(gpt(ids), ids) + (linear(x) * ones).square().sum() * size**0)
            if pair is both:  # the copies' losses add up to the one of the module alone
                for parameter in linear.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(size)
        assert len([p for p in both.parameters() if p.grad is not None]) == len(list(alone.parameters()))
        with ranks.record() as log:
            norm = tp.clip_grad_norm_(both.parameters(), 0.01, order)
        assert log.ops == ("all_reduce",)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01, order)
        torch.testing.assert_close(norm, expected, atol=1e-10, rtol=1e-10)
        values = ranks.gather(norm.item())
        assert len(set(values)) == 1
        gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        assert models.assert_close(models.full_gradients(both, mesh), gradients, atol=1e-10) > 6000
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        tp.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    partial = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    partial.grad = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
    with pytest.raises(tp.PlanError, match="partial-gradient"):
        tp.clip_grad_norm_([partial], 1.0)
    assert tp.clip_grad_norm_([], 1.0) == 0


@pytest.mark.ranks(2)
def test_random_regions(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    def run(x: torch.Tensor) -> torch.Tensor:
        with tp.tp_rng(mesh):
            inside = F.dropout(x)
            for _ in range(ranks.rank):  # ranks may draw different amounts
                torch.rand(3)
        return inside + F.dropout(x)

    torch.manual_seed(4)
    draws: list[torch.Tensor] = []
    with tp.tp_rng(mesh):
        draws.append(torch.rand(8))
    with tp.tp_rng(mesh):
        draws.append(torch.rand(8))
    outside = torch.rand(8)
    inside = ranks.gather(draws)
    assert len({tuple(value.tolist()) for values in inside for value in values}) == 4
    assert len({tuple(value.tolist()) for value in ranks.gather(outside)}) == 1
    torch.manual_seed(4)
    with tp.tp_rng(mesh):
        assert torch.equal(torch.rand(8), draws[0])
    x = torch.ones(32, requires_grad=True)
    state = torch.get_rng_state()
    torch.autograd.backward(run(x).sum())
    torch.set_rng_state(state)
    second = torch.ones(32, requires_grad=True)
    torch.autograd.backward(checkpoint(run, second, use_reentrant=False).sum())
    assert x.grad is not None
    assert torch.equal(x.grad, second.grad)  # type: ignore[arg-type]


UNCHECKED = "ignore:.*gradients of the sharded model are not checked.*When use_reentrant=True"
"""A re-entrant checkpoint refuses to give chosen gradients."""


@pytest.mark.filterwarnings(UNCHECKED)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks: Ranks, reentrant: bool) -> None:
    mesh = ranks.mesh((2,), ("tp",))

    class Checkpointed(models.GPT):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            result: torch.Tensor = self.head(self.norm(x))
            return result

    model = models.seeded(Checkpointed).double()
    plan = {**models.gpt_plan(), "**.norm1": tp.NoParallel()}
    batches = [torch.randint(0, 17, (2, 6)) for _ in range(5)]
    handles: list[tp.TPHandle] = []

    def apply(module: Any) -> None:
        handles.append(tp.apply_plan(module, mesh, plan))
        module.place.requires_grad_(False)

    models.compare_training(
        model,
        apply,
        batches,
        models.next_token_loss,
        mesh,
        atol=EXACT,
    )
    outcome = "unchecked: the sharded backward raised" if reentrant else "equal to the original"
    assert f"check of Checkpointed (training, with gradients): {outcome}" in handles[0].report()
    if reentrant:
        return
    # A gradient that is summed although every rank has all of it, in a module that no region holds.
    wrong = models.seeded(Checkpointed).double()
    tp.apply_plan(wrong, mesh, {**plan, "**.norm1": tp.NoParallel(sum_gradient=True)})
    wrong.get_parameter("place.weight").requires_grad_(False)
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*norm1"):
        wrong(batches[0])
    assert all(p.grad is None for p in wrong.parameters())


@pytest.mark.ranks(4)
def test_next_to_fsdp2(ranks: Ranks) -> None:
    """Tensor parallel over 2 ranks, fully sharded over 2."""
    from torch.distributed.fsdp import fully_shard

    mesh = ranks.mesh((2, 2), ("dp", "tp"))
    model: Any = models.seeded(models.GPT).double()
    alone = copy.deepcopy(model)
    tp.apply_plan(model, mesh["tp"], models.gpt_plan())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    batches = [torch.randint(0, 17, (4, 6)) for _ in range(5)]
    own = [batch.chunk(2)[mesh["dp"].get_local_rank()] for batch in batches]
    models.train(alone, batches, models.next_token_loss)
    models.train(model, own, models.next_token_loss)
    state = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert models.assert_close(state, dict(alone.named_parameters()), atol=1e-11) > 6000
    fused = models.seeded(models.MLP)  # FSDP2 takes a local part for the whole
    tp.apply_plan(fused, mesh["tp"], {"up": tp.FusedColwiseParallel(2), "down": tp.RowwiseParallel()})
    fully_shard(fused, mesh=mesh["dp"])
    for call in (fused.state_dict, lambda: fused(torch.randn(2, 8))):
        with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*up.weight"):
            call()


@pytest.mark.ranks(2)
def test_predicted_collectives_are_those_that_happen(ranks: Ranks) -> None:
    from tp_styles.plan.model import collectives

    mesh = ranks.mesh((2,), ("tp",))
    plans: list[dict[str, tp.ParallelStyle]] = [
        {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()},
        {"up": tp.ColwiseParallel(output_layouts=Replicate()), "down": tp.RowwiseParallel(input_layouts=Replicate())},
        {
            "up": tp.ColwiseParallel(input_layouts=Shard(1)),
            "down": tp.RowwiseParallel(output_layouts=Shard(1)),
        },
        {"up": tp.ColwiseParallel(input_layouts=Shard(-1)), "down": tp.RowwiseParallel(output_layouts=Shard(-1))},
        {"up": tp.FusedColwiseParallel(2, output_layouts=Replicate()), "down": tp.NoParallel()},
    ]
    tokens = 2 * 6
    for plan in plans:
        model = models.seeded(lambda: models.MLP(8, 12))
        handle = tp.apply_plan(model, mesh, plan)
        predicted = list(collectives(handle.plan))
        first = plan["up"].input_layouts[0]  # type: ignore[attr-defined]
        x = torch.randn(2, 6, 8)
        x = (x if isinstance(first, Replicate) else x.chunk(2, first.dim)[ranks.rank]).requires_grad_()
        torch.autograd.backward(model(x).sum())  # the ranks compare sizes in the first call
        for when in ("forward", "backward"):
            with ranks.record(allow_empty=True) as log:
                if when == "forward":
                    out = model(x)
                else:
                    out.sum().backward()
            expected = [one for one in predicted if one.when == when]
            assert sorted(log.ops) == sorted(one.step.op for one in expected)
            sent = sum(4 * (one.elements_per_token * tokens + one.elements) for one in expected)
            assert log.bytes_sent() == sent
        handle.undo()


@pytest.mark.ranks(2)
def test_predictions_for_a_whole_model(ranks: Ranks) -> None:
    """Embedding, attention, feed-forward blocks and head: `explain`'s counts and bytes are those that the group saw."""
    from tp_styles.plan.model import collectives

    mesh = ranks.mesh((2,), ("tp",))
    model = models.seeded(lambda: models.GPT(vocab=18))
    # Counts only: a sum of whole gradients is wrong, which the check of the first call would say.
    plan = {**models.gpt_plan(), "norm": tp.NoParallel(sum_gradient=True)}
    handle = tp.apply_plan(model, mesh, plan, check="never")
    ids = torch.randint(0, 17, (2, 6))
    torch.autograd.backward(model(ids).sum())
    predicted = list(collectives(handle.plan))
    with ranks.record() as forward:
        out = model(ids)
    with ranks.record() as backward:
        out.sum().backward()
    for log, when in ((forward, "forward"), (backward, "backward")):
        expected = [one for one in predicted if one.when == when]
        assert sorted(log.ops) == sorted(one.step.op for one in expected)
        assert log.bytes_sent() == sum(4 * (f.elements_per_token * 12 + f.elements) for f in expected)
    assert (len(forward.ops), len(backward.ops)) == (6, 2 * 2 + 1 + 2)
