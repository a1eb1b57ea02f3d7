"""Helpers of a training loop: cross entropy over a sharded vocabulary, the full state dict."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tp_styles._shared.consensus import assert_consistent
from tp_styles._shared.sectioned_tensor import SectionedTensor
from tp_styles.check import in_original
from tp_styles.check.watched_loss import plain
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.parameters import ShardParameter
from tp_styles.runtime.redistribute import Redistribute, TPGroup
from tp_styles.values import Redistribution, Section


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
    if mesh is None:
        raise PlanError(Problem("missing-mesh", "mesh", found="None", hint='plain logits need mesh=mesh["tp"]'))
    if mesh.ndim != 1:
        raise PlanError(Problem("invalid-mesh", "mesh", found=f"{mesh.ndim} dims", hint='pass mesh["tp"]'))
    if reduction not in ("mean", "sum", "none"):
        raise PlanError(Problem("invalid-argument", "reduction", found=repr(reduction), hint='"mean", "sum" or "none"'))
    axis = TPGroup(mesh)
    target = target.long()
    classes = num_classes if num_classes is not None else logits.shape[-1] * axis.size
    start, stop = Section(classes).bounds(axis.rank, axis.size)
    _check(logits, target, stop - start, classes, weight, ignore_index, label_smoothing)

    counted = target != ignore_index
    safe = target.masked_fill(~counted, 0)  # any valid index: masked out below
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # exp cannot overflow; the highest logit cancels in every combination below, so it needs no gradient.
    shifted = exact - _highest(exact.detach(), axis, even=num_classes is None).unsqueeze(-1)
    here = (safe >= start) & (safe < stop)
    local = (safe - start).masked_fill(~here, 0)  # any valid index: masked out in the next lines
    terms = [shifted.exp().sum(-1)]
    picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) if logits.shape[-1] else terms[0]
    terms.append(picked.masked_fill(~here, 0))  # not a product: -inf * 0 is nan
    spread = label_smoothing > 0
    if spread:
        by_class = None if weight is None else weight[start:stop].to(exact.dtype)
        terms.append((shifted if by_class is None else shifted * by_class).sum(-1))
    total = Redistribute(Redistribution(Partial(), Replicate()), axis, "logits", inplace_ok=True)  # one sum for all
    summed = total(torch.stack(terms)) if axis.size > 1 else torch.stack(terms)
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
        hint = (
            "logits.redistribute(placements=[Shard(-1)]) of a 1-D mesh; on a mesh with a data-parallel axis pass"
            ' logits.to_local() of this rank\'s batch with mesh=mesh["tp"]'
        )
        problems.append(Problem("layout-mismatch", "logits", found=str(logits.placements), hint=hint))
    if mesh is not None and mesh != logits.device_mesh:
        hint = "leave it out: the logits have a mesh"
        problems.append(Problem("mesh-mismatch", "mesh", found=f"{mesh}, logits on {logits.device_mesh}", hint=hint))
    if num_classes not in (None, logits.shape[-1]):
        reason = f"{num_classes}, logits of {logits.shape[-1]} classes"
        problems.append(Problem("shape-mismatch", "num_classes", found=reason, hint="leave it out"))
    if problems:
        raise PlanError(problems)
    return logits.device_mesh, logits.shape[-1]


def _local_replica(x: torch.Tensor) -> torch.Tensor:
    """Return a target or weights as a plain tensor: every rank has them in full.

    Raises:
        PlanError: It is a sharded DTensor.
    """
    if isinstance(x, DTensor) and not all(placement.is_replicate() for placement in x.placements):
        hint = "target and weight are the same on every rank: redistribute(placements=[Replicate()])"
        raise PlanError(Problem("layout-mismatch", "target or weight", found=str(x.placements), hint=hint))
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
        hint = f"one class for each token: {tuple(logits.shape[:-1])}; classes are the last dim of the logits"
        problems.append(Problem("shape-mismatch", "target", found=str(tuple(target.shape)), hint=hint))
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
    highest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], lowest)
    if axis.size == 1:
        return highest
    check = even and logits.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:  # without num_classes all shards must have the same size
        count = logits.new_tensor([logits.shape[-1], -logits.shape[-1]])  # maximum and minimum in one all-reduce
        flat = torch.cat([highest.reshape(-1), count])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=axis.group)
        most, least = flat[-2].item(), -flat[-1].item()
        if most != least:
            hint = "pass num_classes=, the global number"
            raise PlanError(
                Problem(
                    "uneven-shards", "num_classes", found=f"shards of {int(least)} to {int(most)} classes", hint=hint
                )
            )
        return flat[:-2].view(highest.shape)
    return axis.all_reduce_max_(highest.contiguous())


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsharded model, on every rank; every rank calls it.

    Args:
        model: A model with parallel modules.

    Returns:
        Plain tensors under unchanged names.

    Raises:
        PlanError: A rank has no state dict, or other entries; on every rank.
    """
    state: dict[str, Any] = {}
    fault = None
    try:
        state = model.state_dict()
    except Exception as error:
        fault = error  # raised below, on all ranks
    divided = [
        f"{name}: {list(v.shape)} {v.dtype}" for name, v in state.items() if isinstance(v, DTensor | SectionedTensor)
    ]
    for mesh in _meshes(model):
        try:
            assert_consistent(mesh, "full_state_dict", divided, fault, hint="every rank needs the same parameters")
        except Exception as error:  # ranks of the other meshes must raise too
            fault = error
    if fault is not None:
        raise fault
    sharded = DTensor | SectionedTensor
    return {name: value.full_tensor() if isinstance(value, sharded) else value for name, value in state.items()}


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the meshes of the model's sharded parameters."""
    meshes: dict[DeviceMesh, None] = {}  # ordered, so ranks use them in one order
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            meshes[parameter.device_mesh] = None
        elif isinstance(parameter, ShardParameter):
            meshes[parameter._sharding_info.mesh] = None
    return list(meshes)
