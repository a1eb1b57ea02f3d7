"""Regions are recorded in one sharded forward and compared afterwards: mistakes in them, however they are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import tp_models as models
import tp_styles as tp
from ranktest import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Between = Callable[[Tensor], Tensor]
WIDTH = 16


class Pair(nn.Module):
    """A column-wise and a row-wise layer around a function, and an input that the forward writes to."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.between = between
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.auxiliary: Tensor | None = None
        self.writes, self.keeps, self.scale = False, "", nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        hidden = self.between(self.up(x * 1.0 if shift is None else x + shift))
        if self.keeps == "attribute":
            self.auxiliary = hidden.square().mean()
        if self.keeps == "buffer":
            self.mean.add_(hidden.detach().square().mean())
        if self.writes:
            x.mul_(0.5)
        result: Tensor = self.down(hidden) * self.scale
        return result


class Block(nn.Module):
    """Two pairs, the second inside a block with a gain of its own."""

    def __init__(self, first: Between, second: Between, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner = Pair(first), nn.Sequential(Pair(second), nn.LayerNorm(WIDTH))
        self.call, self.norm = call, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.call(self, x))
        return result


def block(first: Between, second: Between, call: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Block(first, second, call))


PLAN = {"**.up": tp.ColwiseParallel(), "**.down": tp.RowwiseParallel()}


def wrong(h: Tensor) -> Tensor:
    return h - 0.1 * h.mean(-1, keepdim=True)


def in_order(block: Block, x: Tensor) -> Tensor:
    result: Tensor = block.inner(block.first(x))
    return result


def twice(block: Block, x: Tensor) -> Tensor:
    return in_order(block, in_order(block, x))


def checkpointed(block: Block, x: Tensor) -> Tensor:
    result: Any = checkpoint(block.inner, block.first(x), use_reentrant=False)
    return result  # type: ignore[no-any-return]  # torch's checkpoint


def teacher(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = block.first(x)
    result: Tensor = block.inner(x) * target
    return result


def by_keyword(block: Block, x: Tensor) -> Tensor:
    result: Tensor = block.inner(block.first(x, shift=x.roll(1, 0)))
    return result


def writing(block: Block, x: Tensor) -> Tensor:
    block.first.writes = True
    fresh = x * 2
    result: Tensor = block.inner(block.first(fresh) + fresh)
    return result


def hidden_by_zero(block: Block, x: Tensor) -> Tensor:
    return in_order(block, x) * torch.zeros_like(x)


# Name -> how the regions are called, the place of the mistake, the region that the error names.
MISTAKES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, str]] = {
    "in an inner region": (in_order, "second", "inner.0"),
    "in the first region, which feeds another": (in_order, "first", "first"),
    "in a region called twice": (twice, "second", "inner.0"),
    "under activation checkpointing": (checkpointed, "second", "inner.0"),
    "without gradients, inside of a forward with them": (teacher, "first", "first"),
    "behind an argument by keyword": (by_keyword, "first", "first"),
    "in a region that writes to its input": (writing, "first", "first"),
    "hidden by a product with zero": (hidden_by_zero, "second", "inner.0"),
    "in a value kept as an attribute": (in_order, "", "first"),
    "in a buffer": (in_order, "", "first"),
}


@pytest.mark.ranks(2)
def test_ten_mistakes_in_recorded_regions_are_found_and_their_right_twins_pass(ranks: Ranks) -> None:
    mesh, x = ranks.mesh((2,), ("tp",)), torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    right = 0
    for name, (call, place, region) in MISTAKES.items():
        between = [wrong if place == key else torch.tanh for key in ("first", "second")]
        model: Any = models.seeded(partial(block, between[0], between[1], call))
        model[0].first.keeps = "" if place else name.rpartition(" ")[2]
        before = {key: value.clone() for key, value in model[0].first.named_buffers()}
        tp.apply_plan(model, mesh, PLAN)
        for _ in range(2):  # what was refused is refused again
            with pytest.raises(tp.PlanError, match=rf"check-mismatch.*in region '0\.{region}'"):
                model(x)
        assert all(torch.equal(value, before[key]) for key, value in model[0].first.named_buffers()), name
        if place:
            twin: Any = models.seeded(partial(block, torch.tanh, torch.tanh, call))
            handle = tp.apply_plan(twin, mesh, PLAN)
            twin(x).sum().backward()
            report = handle.report()
            for scope in ("0.first", "0.inner.0", "Sequential"):
                assert f"check of {scope} (training, " in report, (name, report)
            assert "unchecked: the" not in report, (name, report)
            right += 1
    assert (len(MISTAKES), right) == (10, 8)


@pytest.mark.ranks(2)
def test_regions_of_several_plans_are_compared_before_the_model_around_them(ranks: Ranks) -> None:
    mesh, x = ranks.mesh((2,), ("tp",)), torch.randn(3, 5, WIDTH)
    model: Any = models.seeded(lambda: nn.Sequential(Block(torch.tanh, wrong, in_order)))
    tp.parallelize_module(model[0].inner[0], mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    tp.apply_plan(model, mesh, {"0.first.up": tp.ColwiseParallel(), "0.first.down": tp.RowwiseParallel()})
    with pytest.raises(tp.PlanError, match=r"check-mismatch.*in region 'Pair'"):
        model(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.body(x)))
        return result


# Name -> whether one rank's shard may be read so, and the part of the loss that is added to the cross entropy.
LOSSES: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "no more": (True, lambda logits: None),
    "z-loss": (False, lambda logits: 1e-4 * logits.logsumexp(-1).square().mean()),
    "z-loss by hand": (False, lambda logits: 1e-2 * logits.exp().sum(-1).log().mean()),
    "mean": (False, lambda logits: logits.float().view(-1, logits.shape[-1]).mean()),
    "max": (False, lambda logits: logits.amax(-1).mean()),
    "a norm of tokens": (False, lambda logits: torch.linalg.vector_norm(logits, dim=-1).mean()),
    "no part of the logits": (True, lambda logits: logits.new_ones(()) * 3),
}


@pytest.mark.ranks(2)
def test_a_loss_of_one_ranks_logits_is_refused_at_its_first_backward(ranks: Ranks) -> None:
    """No hook of ours runs outside of the model. With DTensor logits the same losses are those of one process."""
    mesh = ranks.mesh((2,), ("tp",))
    x, target = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)), torch.arange(4)
    refused = 0
    for name, (is_right, more) in LOSSES.items():
        alone: Any = models.seeded(Head)
        extra = more(alone(x))
        (nn.functional.cross_entropy(alone(x), target) + (0 if extra is None else extra)).backward()
        for local in (True, False):
            model: Any = models.seeded(Head)
            tp.apply_plan(model, mesh, {"head": tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=local)})
            logits = model(x)
            loss = tp.vocab_parallel_cross_entropy(logits, target, mesh=mesh if local else None)
            extra = more(logits)
            if extra is not None:
                loss = loss + (extra.full_tensor() if isinstance(extra, DTensor) else extra)
            if local and not is_right:
                with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*loss.*on the ranks.*use_local_output"):
                    loss.backward()
                refused += 1
                continue
            loss.backward()
            gradient = models.full_gradients(model, mesh)["body.weight"]
            torch.testing.assert_close(gradient, alone.body.weight.grad, atol=1e-6, rtol=1e-5, msg=f"{name} {local}")
            assert type(model(x)) is (Tensor if local else DTensor)  # a second call is not watched
    assert refused == 5


@pytest.mark.ranks(2)
def test_a_loss_beside_fsdp2_is_watched_without_a_check_of_the_root(ranks: Ranks) -> None:
    """The root is not compared there, so which of its outputs are shards is not known: all are watched once."""
    mesh = ranks.mesh((1, 2), ("dp", "tp"))
    x, target, refused = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)), torch.arange(4), 0
    for is_right, more in LOSSES.values():
        model: Any = models.seeded(Head)
        tp.apply_plan(model, mesh["tp"], {"head": tp.ColwiseParallel(output_layouts=Shard(-1))})
        fully_shard(model.body, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        logits = model(x)
        loss, extra = tp.vocab_parallel_cross_entropy(logits, target, mesh=mesh["tp"]), more(logits)
        loss = loss if extra is None else loss + extra
        if is_right:
            loss.backward()
            assert type(model(x)) is Tensor  # a second call is not watched
            continue
        with pytest.raises(tp.PlanError, match=r"local-shard-as-full.*loss.*on the ranks.*use_local_output"):
            loss.backward()
        refused += 1
    assert refused == 5


class Rooted(Pair):
    """A block before a pair of the root, whose region holds the block's norms too."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.block = Block(torch.tanh, torch.tanh, in_order)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        return super().forward(self.block(x), shift=shift)


@pytest.mark.ranks(2, 4)
def test_units_of_fsdp2_stand_for_a_root_that_cannot_run_alone(ranks: Ranks) -> None:
    """FSDP2's hooks would gather within the root's runs, so a norm in the root's region was compared by none."""
    mesh = ranks.mesh((ranks.world_size // 2, 2), ("dp", "tp"))

    def sharded(styles: dict[str, tp.ParallelStyle]) -> tuple[Any, tp.TPHandle]:
        model: Any = models.seeded(Rooted).double()
        handle = tp.apply_plan(model, mesh["tp"], PLAN | styles)
        fully_shard(model.block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"]), handle

    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, handle = sharded({})
    for is_training in (True, False, True):
        model.train(is_training)(x).square().mean().backward()
    lines = [line for line in handle.report().splitlines() if line.startswith("check of block (")]
    assert len(lines) == 2, handle.report()
    assert all("equal to the original (1 tensors and 14 gradients" in line for line in lines), lines
    wrong, _ = sharded({"block.norm": tp.NoParallel(sum_gradient=True)})
    with pytest.raises(tp.PlanError, match=r"block\.norm\.weight: in region 'block'.*it is 2 times"):
        wrong(x)
    with pytest.raises(tp.PlanError, match=r"model-changed.*undo\(\): FSDP2 holds.*full_state_dict"):
        handle.undo()
    inner: Any = models.seeded(lambda: nn.Sequential(Pair(torch.tanh)))
    handle = tp.apply_plan(inner[0], mesh["tp"], PLAN)
    fully_shard(inner, mesh=mesh["dp"])  # around the module of the plan
    with pytest.raises(tp.PlanError, match=r"model-changed.*undo\(\): FSDP2 holds"):
        handle.undo()
    before = models.seeded(Rooted).double().state_dict()
    assert models.assert_close(tp.full_state_dict(model), before, atol=1e-12) > 3000
