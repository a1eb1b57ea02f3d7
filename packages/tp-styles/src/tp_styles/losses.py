"""Losses over shards of a sequence, and log-sum-exp, probabilities and entropy over shards of a vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from tp_styles.check import in_original
from tp_styles.check.watched_loss import plain
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.redistribute import Redistribute, TPGroup
from tp_styles.values import Redistribution, Section


def sharded_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    mesh: DeviceMesh,
    shift: bool = False,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits whose tokens are shards on the ranks.

    The mean is each rank's sum over the count of all ranks, so a rank without targets adds zero. The result is the loss
    of one process on every rank, and each rank's gradient is its tokens' part: their sum over the axis is the gradient
    of one process. It communicates the loss and the count; with `shift` also one token of each sequence.

    Args:
        logits: `[batch, tokens, classes]`: this rank's tokens, as from `ContextParallel(output_layouts=Shard(1))`.
        target: `[batch, tokens]`: the class of each of this rank's tokens.
        mesh: 1-D mesh of the shards, `mesh["cp"]`.
        shift: Targets are the tokens themselves, and each is predicted by the one before, also over the border of two
            shards. The last token of the last rank has no target. Shards follow each other in rank order.
        weight: `[classes]`: weight of each class.
        ignore_index: Target without a loss.
        label_smoothing: As in torch.
        reduction: As in torch; `"none"` gives this rank's `[batch, tokens]`.

    Raises:
        PlanError: The target has another shape, or an argument has no meaning.
    """
    options: Any = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    problems = []
    if logits.shape[:-1] != target.shape or target.dim() != 2:
        hint = f"one class for each token of this rank: {list(logits.shape[:-1])}, two dims"
        problems.append(Problem("shape-mismatch", "target", found=str(list(target.shape)), hint=hint))
    if reduction not in ("mean", "sum", "none"):
        problems.append(Problem("invalid-argument", "reduction", found=repr(reduction), hint='"mean", "sum" or "none"'))
    if mesh.ndim != 1:
        problems.append(Problem("invalid-mesh", "mesh", found=f"{mesh.ndim} dims", hint='pass mesh["cp"]'))
    if problems:
        raise PlanError(problems)
    is_full = not torch.compiler.is_compiling() and in_original()  # the original of a check has all tokens
    axis = None if is_full else TPGroup(mesh)
    if shift:
        target = torch.cat([target[:, 1:], _following(target, axis, ignore_index)], 1)
    flat = target.flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), flat, reduction="none", **options)
    if reduction == "none":
        return losses.view(target.shape)
    total = _summed(losses.sum(), axis)
    if reduction == "sum":
        return total
    counted = flat != ignore_index
    shares = counted if weight is None else torch.where(counted, weight.detach()[flat.masked_fill(~counted, 0)], 0)
    count = shares.sum().to(total.dtype)
    return total / (count if axis is None else axis.all_reduce(count))  # nan without a target on any rank, as torch's


def sharded_mean(values: torch.Tensor, counted: torch.Tensor, *, mesh: DeviceMesh) -> torch.Tensor:
    """Return the mean of the counted values of all ranks, the same on every rank; nan if there are none.

    The losses of a vocabulary that is sharded beside the sequence become one loss by it:
    `sharded_mean(vocab_parallel_cross_entropy(..., reduction="none"), target != -100, mesh=mesh["cp"])`.

    Args:
        values: `[...]`: this rank's, zero where they do not count.
        counted: `[...]`, boolean: the values that count.
        mesh: 1-D mesh of the shards.
    """
    axis = None if not torch.compiler.is_compiling() and in_original() else TPGroup(mesh)
    total, count = _summed(values.sum(), axis), counted.sum().to(values.dtype)
    return total / (count if axis is None else axis.all_reduce(count))


def _following(target: torch.Tensor, axis: TPGroup | None, ignore_index: int) -> torch.Tensor:
    """Return the first column of the next rank; the last rank's is ignored."""
    nothing = torch.full_like(target[:, :1], ignore_index)
    if axis is None or axis.size == 1:
        return nothing
    firsts = axis.gather_parts(target[:, :1], 1)
    return firsts[axis.rank + 1] if axis.rank + 1 < axis.size else nothing


def _summed(x: torch.Tensor, axis: TPGroup | None) -> torch.Tensor:
    """Return the sum over the ranks; its gradient reaches every rank's summand."""
    if axis is None or axis.size == 1:
        return x
    return Redistribute(Redistribution(Partial(), Replicate()), axis, "loss")(x)


# ---------------------------------------------------------------------------------------------- a sharded vocabulary


def vocab_parallel_logsumexp(logits: torch.Tensor, *, mesh: DeviceMesh) -> torch.Tensor:
    """Return `logits.logsumexp(-1)` over a sharded vocabulary, with gradients; the same on every rank.

    The z-loss of a model is `vocab_parallel_logsumexp(logits, mesh=mesh["tp"]).square().mean()`.

    Args:
        logits: `[..., local classes]`: this rank's shard of any size, also an empty one.
        mesh: 1-D mesh of the shards.
    """
    if not torch.compiler.is_compiling() and in_original():
        return logits.logsumexp(-1)
    exact, highest, axis = _shifted(logits, mesh)
    total = _summed((exact - highest.unsqueeze(-1)).exp().sum(-1), axis)
    result: torch.Tensor = (total.log() + highest).to(logits.dtype)
    return result


def vocab_parallel_log_probs(
    logits: torch.Tensor, target: torch.Tensor, *, mesh: DeviceMesh, num_classes: int | None = None
) -> torch.Tensor:
    """Return the log-probability of each target, `[...]`, over a sharded vocabulary; the same on every rank.

    Args:
        logits: `[..., local classes]`.
        target: `[...]`: a class of each token, the same on every rank.
        mesh: 1-D mesh of the shards.
        num_classes: Global number of classes; optional for even shards.
    """
    if not torch.compiler.is_compiling() and in_original():
        picked: torch.Tensor = logits.log_softmax(-1).gather(-1, target.long().unsqueeze(-1)).squeeze(-1)
        return picked
    exact, highest, axis = _shifted(logits, mesh)
    classes = num_classes if num_classes is not None else logits.shape[-1] * axis.size
    start, stop = Section(classes).bounds(axis.rank, axis.size)
    if stop - start != logits.shape[-1] or target.shape != logits.shape[:-1]:
        found = f"{list(logits.shape)} for targets {list(target.shape)}, {stop - start} classes on this rank"
        hint = "num_classes= of uneven shards; one class for each token"
        raise PlanError(Problem("shape-mismatch", "logits", found=found, hint=hint))
    shifted = exact - highest.unsqueeze(-1)
    here = (target >= start) & (target < stop)
    terms = [shifted.exp().sum(-1)]
    index = (target.long() - start).masked_fill(~here, 0)  # any valid class: masked out in the next line
    picked = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1) if logits.shape[-1] else terms[0]
    terms.append(picked.masked_fill(~here, 0))
    normalizer, chosen = _summed(torch.stack(terms), axis)
    result: torch.Tensor = (chosen - normalizer.log()).to(logits.dtype)
    return result


def vocab_parallel_entropy(logits: torch.Tensor, *, mesh: DeviceMesh) -> torch.Tensor:
    """Return the entropy of each token's distribution, `[...]`, over a sharded vocabulary; the same on every rank.

    Args:
        logits: `[..., local classes]`.
        mesh: 1-D mesh of the shards.
    """
    if not torch.compiler.is_compiling() and in_original():
        logs = logits.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)
    exact, highest, axis = _shifted(logits, mesh)
    shifted = exact - highest.unsqueeze(-1)
    powers = shifted.exp()
    weighted = (powers * shifted.masked_fill(powers == 0, 0)).sum(-1)  # a class of -inf adds nothing
    normalizer, weighted = _summed(torch.stack([powers.sum(-1), weighted]), axis)
    result: torch.Tensor = (normalizer.log() - weighted / normalizer).to(logits.dtype)
    return result


def _shifted(logits: torch.Tensor, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor, TPGroup]:
    """Return exact logits, the highest of each token over the ranks, without a gradient, and the axis."""
    if mesh.ndim != 1:
        raise PlanError(Problem("invalid-mesh", "mesh", found=f"{mesh.ndim} dims", hint='pass mesh["tp"]'))
    axis = TPGroup(mesh)
    exact = plain(logits).to(torch.promote_types(logits.dtype, torch.float32))
    lowest = torch.finfo(exact.dtype).min
    local = exact.detach()
    highest = local.amax(-1).clamp(min=lowest) if logits.shape[-1] else local.new_full(logits.shape[:-1], lowest)
    return exact, axis.all_reduce_max_(highest.contiguous()) if axis.size > 1 else highest, axis
