"""Losses over shards of a sequence, and log-sum-exp, probabilities and entropy over shards of a vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
        problems.append(
            Problem(
                "shape-mismatch",
                "target",
                found=str(list(target.shape)),
                hint=f"one class for each token of this rank: {list(logits.shape[:-1])}, two dims",
            )
        )
    if reduction not in ("mean", "sum", "none"):
        problems.append(Problem("invalid-argument", "reduction", found=repr(reduction), hint='"mean", "sum" or "none"'))
    if mesh.ndim != 1:
        problems.append(Problem("invalid-mesh", "mesh", found=f"{mesh.ndim} dims", hint='pass mesh["cp"]'))
    if problems:
        raise PlanError(problems)
    is_full = not torch.compiler.is_compiling() and in_original()  # the original of a check has all tokens
    axis = None if is_full else TPGroup(mesh, "sharded_cross_entropy")
    if shift:
        target = torch.cat([target[:, 1:], first_of_next_rank(target, axis, ignore_index)], 1)
    flat = target.flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), flat, reduction="none", **options)
    if reduction == "none":
        return losses.view(target.shape)
    total = _summed(losses.sum(), axis)
    if reduction == "sum":
        return total
    counted = flat != ignore_index
    shares = counted if weight is None else torch.where(counted, weight.detach()[flat.masked_fill(~counted, 0)], 0)
    return total / _summed(shares.sum().to(total.dtype), axis)  # nan without a target on any rank, as torch's


def sharded_mean(values: torch.Tensor, counted: torch.Tensor, *, mesh: DeviceMesh) -> torch.Tensor:
    """Return the mean of the counted values of all ranks, the same on every rank; nan if there are none.

    The losses of a vocabulary that is sharded beside the sequence become one loss by it:
    `sharded_mean(vocab_parallel_cross_entropy(..., reduction="none"), target != -100, mesh=mesh["cp"])`.

    Args:
        values: `[...]`: this rank's, zero where they do not count.
        counted: `[...]`, boolean: the values that count.
        mesh: 1-D mesh of the shards.
    """
    axis = None if not torch.compiler.is_compiling() and in_original() else TPGroup(mesh, "sharded_mean")
    return _summed(values.sum(), axis) / _summed(counted.sum().to(values.dtype), axis)


def first_of_next_rank(target: torch.Tensor, axis: TPGroup | None, ignore_index: int) -> torch.Tensor:
    """Return the first column of the next rank, `[batch, 1]`; the last rank's is ignored."""
    nothing = torch.full_like(target[:, :1], ignore_index)
    if axis is None or axis.size == 1:
        return nothing
    firsts = axis.gather_parts(target[:, :1], 1)
    return firsts[axis.rank + 1] if axis.rank + 1 < axis.size else nothing


def _summed(x: torch.Tensor, axis: TPGroup | None, *, inplace_ok: bool = False) -> torch.Tensor:
    """Return the sum over the ranks; its gradient reaches every rank's summand."""
    if axis is None or axis.size == 1:
        return x
    return Redistribute(Redistribution(Partial(), Replicate()), axis, axis.subject, inplace_ok=inplace_ok)(x)


# ---------------------------------------------------------------------------------------------- a sharded vocabulary


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    mesh: DeviceMesh | None = None,
    num_classes: int | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits sharded over their last dim, the classes.

    Communicates one maximum and one sum for each token, forward; nothing backward.

    Args:
        logits: `[..., local classes]`: this rank's shard, as from a column-wise head; or a DTensor `[..., classes]`,
            sharded on the last dim over a 1-D mesh, as from one with `use_local_output=False`.
        target: `[...]`: class of each token, the same on every rank.
        mesh: 1-D mesh of the shards; a DTensor has it.
        num_classes: Global number of classes; optional for even shards, and for a DTensor.
        weight: `[num_classes]`: weight of each class, the same on every rank.
        ignore_index: Target without a loss.
        label_smoothing: As in torch.
        reduction: As in torch.

    Returns:
        The loss, the same on every rank: a scalar, or `[...]` without reduction.

    Raises:
        PlanError: No mesh, shards of another size than `num_classes` gives, a target of another shape, or a DTensor
            in another layout.
        IndexError: On CPU, a target outside of the classes.
    """
    if not torch.compiler.is_compiling() and in_original():
        options: Any = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        # The original of a check has full logits.
        losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction, **options)
        return losses.view(target.shape) if reduction == "none" else losses
    logits = plain(logits)
    target = _local_replica(target)
    weight = None if weight is None else _local_replica(weight)
    if isinstance(logits, DTensor):
        mesh, num_classes = _vocabulary(logits, mesh, num_classes)
        logits = logits.to_local()
    axis = _axis(mesh, "vocab_parallel_cross_entropy")
    if reduction not in ("mean", "sum", "none"):
        raise PlanError(Problem("invalid-argument", "reduction", found=repr(reduction), hint='"mean", "sum" or "none"'))
    target = target.long()
    classes = num_classes if num_classes is not None else logits.shape[-1] * axis.size
    start, stop = Section(classes).bounds(axis.rank, axis.size)
    _check(logits, target, stop - start, classes, weight, ignore_index, label_smoothing)

    counted = target != ignore_index
    safe = target.masked_fill(~counted, 0)  # any valid index: masked out below
    shifted, _ = _shifted(logits, axis, even=num_classes is None)
    here = (safe >= start) & (safe < stop)
    local = (safe - start).masked_fill(~here, 0)  # any valid index: masked out in the next lines
    terms = [shifted.exp().sum(-1)]
    picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) if logits.shape[-1] else terms[0]
    terms.append(picked.masked_fill(~here, 0))  # not a product: -inf * 0 is nan
    spread = label_smoothing > 0
    if spread:
        by_class = None if weight is None else weight[start:stop].to(shifted.dtype)
        terms.append((shifted if by_class is None else shifted * by_class).sum(-1))
    summed = _summed(torch.stack(terms), axis, inplace_ok=True)  # one sum for all
    normalizer, chosen = summed[0].log(), summed[1]
    per_target = counted.to(normalizer.dtype) if weight is None else weight.to(normalizer.dtype)[safe] * counted
    loss = per_target * (normalizer - chosen)
    if spread:
        classes_weight = float(classes) if weight is None else weight.to(normalizer.dtype).sum()
        smoothed = (classes_weight * normalizer - summed[2]) * counted
        loss = (1 - label_smoothing) * loss + label_smoothing / classes * smoothed
    loss = loss.masked_fill(~counted, 0)  # nan and infinite logits of ignored targets too
    if reduction == "mean":
        weights = per_target.sum()
        loss = loss.sum() / weights.masked_fill(weights == 0, 1)
        loss = loss.masked_fill(weights == 0, float("nan"))  # as torch's, with zero gradients
    elif reduction == "sum":
        loss = loss.sum()
    in_float32 = torch.is_autocast_enabled(logits.device.type)  # as torch's loss
    result: torch.Tensor = loss if in_float32 else loss.to(logits.dtype)
    return result


def _vocabulary(logits: DTensor, mesh: DeviceMesh | None, num_classes: int | None) -> tuple[DeviceMesh, int]:
    """Return the mesh and the number of classes of logits sharded on their last dim.

    Raises:
        PlanError: They lie otherwise, or the arguments contradict them.
    """
    problems = []
    if tuple(logits.placements) not in ((Shard(logits.dim() - 1),), (Shard(-1),)):
        problems.append(
            Problem(
                "layout-mismatch",
                "logits",
                found=str(logits.placements),
                hint="logits.redistribute(placements=[Shard(-1)]) of a 1-D mesh; on a mesh with a data-parallel axis"
                " pass"
                ' logits.to_local() of this rank\'s batch with mesh=mesh["tp"]',
            )
        )
    if mesh is not None and mesh != logits.device_mesh:
        problems.append(
            Problem(
                "mesh-mismatch",
                "mesh",
                found=f"{mesh}, logits on {logits.device_mesh}",
                hint="leave it out: the logits have a mesh",
            )
        )
    if num_classes not in (None, logits.shape[-1]):
        problems.append(
            Problem(
                "shape-mismatch",
                "num_classes",
                found=f"{num_classes}, logits of {logits.shape[-1]} classes",
                hint="leave it out",
            )
        )
    if problems:
        raise PlanError(problems)
    return logits.device_mesh, logits.shape[-1]


def _local_replica(x: torch.Tensor) -> torch.Tensor:
    """Return a target or weights as a plain tensor: every rank has them in full.

    Raises:
        PlanError: It is a sharded DTensor.
    """
    if isinstance(x, DTensor) and not all(placement.is_replicate() for placement in x.placements):
        raise PlanError(
            Problem(
                "layout-mismatch",
                "target or weight",
                found=str(x.placements),
                hint="target and weight are the same on every rank: redistribute(placements=[Replicate()])",
            )
        )
    return x.to_local() if isinstance(x, DTensor) else x


def _check(
    logits: torch.Tensor,
    target: torch.Tensor,
    local: int,
    classes: int,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    problems = []
    if not 0 <= label_smoothing <= 1:
        problems.append(
            Problem("invalid-argument", "label_smoothing", found=str(label_smoothing), hint="it is between 0 and 1")
        )
    if logits.shape[-1] != local:
        problems.append(
            Problem(
                "shape-mismatch",
                "logits",
                dim=logits.dim() - 1,
                found=f"{logits.shape[-1]} classes on this rank",
                hint=f"of {classes} it holds {local}; pass num_classes= if the shards are uneven",
            )
        )
    if logits.shape[:-1] != target.shape:
        problems.append(
            Problem(
                "shape-mismatch",
                "target",
                found=str(tuple(target.shape)),
                hint=f"one class for each token: {tuple(logits.shape[:-1])}; classes are the last dim of the logits",
            )
        )
    if weight is not None and weight.shape != (classes,):
        problems.append(
            Problem("shape-mismatch", "weight", found=str(tuple(weight.shape)), hint=f"all {classes} on every rank")
        )
    if problems:
        raise PlanError(problems)
    if target.device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU it would synchronise
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if bool(wrong.any()):
            raise IndexError(f"target: a class is outside of 0..{classes - 1}")


def _highest(logits: torch.Tensor, axis: TPGroup, *, even: bool) -> torch.Tensor:
    """Return the highest logit of each token over all ranks."""
    lowest = torch.finfo(logits.dtype).min
    highest = logits.amax(-1).clamp(min=lowest) if logits.shape[-1] else logits.new_full(logits.shape[:-1], lowest)
    if axis.size == 1:
        return highest
    check = even and logits.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:  # without num_classes all shards must have the same size
        count = logits.new_tensor([logits.shape[-1], -logits.shape[-1]])  # maximum and minimum in one all-reduce
        flat = torch.cat([highest.reshape(-1), count])
        axis.all_reduce_max_(flat)
        most, least = flat[-2].item(), -flat[-1].item()
        if most != least:
            raise PlanError(
                Problem(
                    "uneven-shards",
                    "num_classes",
                    found=f"shards of {int(least)} to {int(most)} classes",
                    hint="pass num_classes=, the global number",
                )
            )
        return flat[:-2].view(highest.shape)
    return axis.all_reduce_max_(highest.contiguous())


def vocab_parallel_logsumexp(logits: torch.Tensor, *, mesh: DeviceMesh) -> torch.Tensor:
    """Return `logits.logsumexp(-1)` over a sharded vocabulary, with gradients; the same on every rank.

    The z-loss of a model is `vocab_parallel_logsumexp(logits, mesh=mesh["tp"]).square().mean()`.

    Args:
        logits: `[..., local classes]`: this rank's shard of any size, also an empty one.
        mesh: 1-D mesh of the shards.
    """
    if not torch.compiler.is_compiling() and in_original():
        return logits.logsumexp(-1)
    axis = _axis(mesh, "vocab_parallel_logsumexp")
    shifted, highest = _shifted(plain(logits), axis)
    total = _summed(shifted.exp().sum(-1), axis)
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
    # No class is -1: every target has a loss.
    return -vocab_parallel_cross_entropy(
        logits, target, mesh=mesh, num_classes=num_classes, ignore_index=-1, reduction="none"
    )


def vocab_parallel_entropy(logits: torch.Tensor, *, mesh: DeviceMesh) -> torch.Tensor:
    """Return the entropy of each token's distribution, `[...]`, over a sharded vocabulary; the same on every rank.

    Args:
        logits: `[..., local classes]`.
        mesh: 1-D mesh of the shards.
    """
    if not torch.compiler.is_compiling() and in_original():
        logs = logits.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)
    axis = _axis(mesh, "vocab_parallel_entropy")
    shifted, _ = _shifted(plain(logits), axis)
    powers = shifted.exp()
    weighted = (powers * shifted.masked_fill(powers == 0, 0)).sum(-1)  # a class of -inf adds nothing
    normalizer, weighted = _summed(torch.stack([powers.sum(-1), weighted]), axis)
    result: torch.Tensor = (normalizer.log() - weighted / normalizer).to(logits.dtype)
    return result


def _axis(mesh: DeviceMesh | None, subject: str) -> TPGroup:
    """Return the ranks of a 1-D mesh.

    Raises:
        PlanError: There is none, or it has several dims.
    """
    if mesh is None:
        raise PlanError(Problem("missing-mesh", "mesh", found="None", hint='plain logits need mesh=mesh["tp"]'))
    if mesh.ndim != 1:
        raise PlanError(Problem("invalid-mesh", "mesh", found=f"{mesh.ndim} dims", hint='pass mesh["tp"]'))
    return TPGroup(mesh, subject)


def _shifted(logits: torch.Tensor, axis: TPGroup, *, even: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits minus the highest of each token, so that `exp` cannot overflow, and the highest itself.

    The highest cancels in every loss, so it has no gradient. With `even` all shards must have the same size.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = _highest(exact.detach(), axis, even=even)
    return exact - highest.unsqueeze(-1), highest
