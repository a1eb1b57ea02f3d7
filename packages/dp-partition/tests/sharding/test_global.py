"""`compile` under global semantics: equal to one device on all ranks' rows, whatever the loss does with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_models as models
import pytest
import torch
from dp_matrix_models import Contrast
from dp_models import warm_up as before_ranks  # noqa: F401  # ranktest calls it
from dp_partition.analysis import messages_of
from ranktest import Ranks
from torch import nn

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Centred(nn.Module):
    """The original all-reduces the mean over the batch with SUM."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        out: torch.Tensor = self.outer(torch.tanh(hidden - hidden.mean(0))).square().sum() / x.shape[0]
        return out


def loss_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss: Any = model(x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    return loss


@pytest.mark.ranks(2)
def test_gpt(ranks: Ranks) -> None:
    models.compare_with_one_device(
        ranks, models.token_step, models.GPT, ADAMW, models.tokens, style="zero1", semantics="global"
    )


def narrow_gpt() -> nn.Module:
    return models.GPT(width=8)


# Width, length and batch are all 8: the original matches sizes and takes a feature dim for the batch.
@pytest.mark.ranks(2)
def test_features_as_many_as_rows(ranks: Ranks) -> None:
    models.compare_with_one_device(
        ranks, models.token_step, narrow_gpt, ADAMW, models.tokens, style="fully_shard", semantics="global"
    )


# The original bakes the global numel in and averages again: gradients 1/world too small.
@pytest.mark.ranks(2)
def test_hand_written_mean(ranks: Ranks) -> None:
    optim = partial(torch.optim.SGD, lr=0.1)
    for style in ("replicate", "default"):
        models.compare_with_one_device(
            ranks, models.mean_step, models.mlp, optim, models.vectors, style=style, semantics="global"
        )


@pytest.mark.ranks(4)
def test_rows_that_see_each_other(ranks: Ranks) -> None:
    for make in (Contrast, Centred):
        with models.case(make):
            models.compare_with_one_device(
                ranks, loss_step, make, ADAMW, models.vectors, style="fully_shard", semantics="global"
            )


def weighted_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, weight: torch.Tensor) -> Any:
    loss: Any = weight * model(x).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def weighted_rows(generator: torch.Generator) -> tuple[Any, ...]:
    return (*models.vectors(generator), torch.rand((), generator=generator, dtype=torch.float64))


# The original breaks: it looks for a batch dim of the scalar.
@pytest.mark.ranks(2)
def test_a_scalar_tensor_argument(ranks: Ranks) -> None:
    for semantics in ("local", "global"):
        models.compare_with_one_device(
            ranks, weighted_step, models.mlp, ADAMW, weighted_rows, style="fully_shard", semantics=semantics
        )


def penalty_step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss: Any = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total: Any = loss + torch.stack([grad.square().sum() for grad in grads]).sum()
    total.backward()
    optim.step()
    optim.zero_grad()
    return total


# A tag whose derivative autograd does not know would drop the penalty.
@pytest.mark.ranks(2)
def test_second_derivatives(ranks: Ranks) -> None:
    models.compare_with_one_device(
        ranks, penalty_step, models.mlp, ADAMW, models.vectors, style="replicate", semantics="global"
    )


@pytest.mark.ranks(2)
def test_batch_statistics_are_those_of_the_whole_batch(ranks: Ranks) -> None:
    step = models.compare_with_one_device(
        ranks, models.class_step, models.Conv, ADAMW, models.images, style="fully_shard", semantics="global"
    )
    gathered = [one for one in messages_of(step.graph.graph, 2) if one.kind == "all_gather" and not one.carries]
    assert not gathered, "only parameters are gathered: every operator on activations has a rule"
