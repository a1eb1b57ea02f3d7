"""Ten planted mistakes of context parallelism: the first call's check refuses each, with its place, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import test_context_parallel as right
import torch
import torch.nn.functional as F
import tp_styles as tp
from context_models import Own
from ranktest import Ranks
from torch import nn
from tp_styles import losses
from tp_styles.runtime.gradient_sum import GradientSum
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.runtime.sequence import GradientScale, SequenceAttention
from tp_styles.styles import context_attention
from tp_styles.styles.context_parallel import ContextForward

before_ranks = right.before_ranks

LENGTH = right.LENGTH
POSITIONS = {"position_ids": torch.arange(LENGTH)[None]}


@contextmanager
def patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    with mock.patch.object(owner, name, function):
        yield


def wrong_offset() -> Any:
    """Queries of every rank start at position 0."""
    return patched(SequenceAttention, "positions", lambda self, length, device: torch.arange(length, device=device))


def forgotten_positions() -> Any:
    """Rotary positions of every rank start at 0."""

    def prepare(self: Any, bound: Any, call: Any, *, is_sharded: bool) -> None:
        bound["position_ids"] = torch.arange(call.length // self.axis.size).repeat(1, self.axis.size)

    return patched(ContextForward, "_positions_and_masks", prepare)


def mean_of_gradients() -> Any:
    """Gradients are averaged over the ranks."""
    reduced = GradientSum.reduced

    def averaged(self: Any, gradients: Any, like: Any) -> Any:
        return [None if g is None else g / self.axis.size for g in reduced(self, gradients, like)]

    return patched(GradientSum, "reduced", averaged)


def divided_gradient() -> Any:
    """The gradient of gathered outputs is divided by the number of ranks."""
    leave = ContextForward._leave

    def left(self: Any, x: torch.Tensor, dim: int, call: Any) -> Any:
        return leave(self, GradientScale.apply(x, 1 / self.axis.size), dim, call)  # type: ignore[no-untyped-call]

    return patched(ContextForward, "_leave", left)


def mask_of_another_rank() -> Any:
    """Each rank's queries get the mask of the next rank's."""
    make = context_attention.mask_of_transformers

    def shifted(base: str, *args: Any, **kwargs: Any) -> Any:
        state = context_attention.ACTIVE.get()
        if state is None:
            return make(base, *args, **kwargs)
        axis = state.attention.moves.axis
        with mock.patch.object(axis, "rank", (axis.rank + 1) % axis.size):
            return make(base, *args, **kwargs)

    return _masks(shifted)


def _masks(function: Any) -> Any:
    from transformers.masking_utils import AttentionMaskInterface

    name = context_attention.register("sdpa")
    return mock.patch.dict(
        AttentionMaskInterface._global_mapping, {name: lambda *args, **kwargs: function("sdpa", *args, **kwargs)}
    )


def no_shift_at_borders() -> Any:
    """The first token of a shard is nobody's target."""
    return patched(losses, "first_of_next_rank", lambda target, axis, index: torch.full_like(target[:, :1], index))


def doubled_key_value_gradient() -> Any:
    """Copies of key-value heads get their gradient twice."""
    copied = SequenceAttention._copied

    def doubled(self: Any, x: torch.Tensor, heads: int) -> torch.Tensor:
        return copied(self, 2 * x - x.detach(), heads)

    return patched(SequenceAttention, "_copied", doubled)


def dropped_document_border() -> Any:
    """Packed documents attend to each other."""

    def find(self: Any, positions: torch.Tensor, call: Any, bound: Any) -> None:
        bound["attention_mask"] = torch.ones(positions.shape, dtype=torch.bool)

    return patched(ContextForward, "_find_documents", find)


def stale_mask() -> Any:
    """A mask is kept from an earlier call of the same shape."""
    make, kept = context_attention.mask_of_transformers, {}

    def memo(base: str, *args: Any, **kwargs: Any) -> Any:
        key = context_attention.ACTIVE.get() is not None, kwargs["q_length"]
        if key not in kept:
            kept[key] = make(base, *args, **kwargs)
        return kept[key]

    return _masks(memo)


class OwnLoss(Own):
    """An own model that returns its loss, of this rank's tokens."""

    def __init__(self, mesh: Any, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.mesh, self.loss = [mesh], loss

    def forward(  # type: ignore[override]  # a loss in place of logits
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        return self.loss(super().forward(input_ids, position_ids), labels, self.mesh[0])


def sharded_loss(logits: torch.Tensor, labels: torch.Tensor, mesh: Any) -> torch.Tensor:
    return tp.sharded_cross_entropy(logits, labels, mesh=mesh, shift=True)


def local_divisor(logits: torch.Tensor, labels: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A mean of the ranks' means: a rank with few targets counts as much as another."""
    if logits.shape[1] == LENGTH:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    mine = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()
    total: torch.Tensor = losses._summed(mine, TPGroup(mesh)) / mesh.size()
    return total


Cell = tuple[Callable[[], Any], str, str, dict[str, Any], str]
"""The mistake, the way, `"hf"` or `"own"`, the batch beside ids, and what the error says."""

CELLS: dict[str, Cell] = {
    "wrong offset": (wrong_offset, "gather", "own", POSITIONS, r"output of blocks\.0"),
    "forgotten positions": (forgotten_positions, "gather", "hf", {}, r"output of model\.rotary_emb|layers\.0"),
    "a mean of gradients": (
        mean_of_gradients,
        "ulysses",
        "hf",
        {},
        r"\] model\..*weight: .*gradient differs.*by 0\.5 ",
    ),
    "a divided gradient": (divided_gradient, "gather", "hf", {}, r"\] .*\.weight: .*gradient differs.*by 0\.5 "),
    "the mask of another rank": (mask_of_another_rank, "gather", "hf", {}, r"output of model\.layers\.0"),
    "doubled key-value gradients": (
        doubled_key_value_gradient,
        "ulysses",
        "hf",
        {},
        r"[kv]_proj\.weight: .*gradient differs",
    ),
    "a dropped document border": (dropped_document_border, "ulysses", "hf", right.packed(), r"model\.layers\.0"),
}


@pytest.mark.extra("transformers")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.ranks(2, timeout=300)
def test_planted_mistakes(ranks: Ranks) -> None:
    mesh = ranks.mesh((2,), ("cp",))
    for name, (plant, kind, of, more, text) in CELLS.items():
        model = right.llama(num_key_value_heads=1) if of == "hf" else right.own()
        style = tp.ContextParallel(kind, inputs={} if of == "hf" else {"mask": None})  # type: ignore[arg-type]
        tp.apply_plan(model, mesh, style)
        with plant(), pytest.raises(tp.PlanError, match="check-mismatch") as error:
            model(input_ids=right.tokens(), **more)
        messages = ranks.gather(str(error.value))
        assert len(set(messages)) == 1, name
        assert re.search(text, messages[0]), (name, messages[0][:400])
        model(input_ids=right.tokens(), **more)  # without the mistake

    model = right.llama()
    tp.apply_plan(model, mesh, tp.ContextParallel("gather"))
    with stale_mask():
        model.eval()
        model(input_ids=right.tokens())
        model.train()
        with pytest.raises(tp.PlanError, match=r"check-mismatch.*model\.layers\.0"):
            model(input_ids=right.tokens(), **right.packed())

    labels = right.tokens().masked_fill(torch.arange(LENGTH) < 6, -100)
    batch = {"input_ids": right.tokens(), **POSITIONS, "labels": labels}
    for loss, mistake in ((sharded_loss, no_shift_at_borders), (local_divisor, nullcontext)):
        torch.manual_seed(0)
        with_loss: nn.Module = OwnLoss(mesh, loss).double()
        tp.apply_plan(with_loss, mesh, tp.ContextParallel(output_dim=None))
        with mistake(), pytest.raises(tp.PlanError, match=r"check-mismatch.*-> output"):
            with_loss(**batch)
        if loss is sharded_loss:
            with_loss(**batch)  # without the mistake
