"""Trial of an optimizer: on shards each element's update may depend on that element alone.

Adafactor, Muon, LBFGS, Shampoo, LAMB and others use full matrices or all parameters at once. On a shard they
compute something else, without an error. A list of names would miss the next one. So a second optimizer of the same
class, with the same settings, takes a few steps on a small full tensor, and a third one on its halves: they have to
agree. The real optimizer, its parameters and all random states stay as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .problems import Problem

STEPS = 12  # preconditioners often start late, or are renewed every tenth step
SIDE = 4  # halves of 2
RTOL = 1e-3  # of the largest update; kernels may round the last bits of a short row otherwise


def elementwise_problems(optimizer: Optimizer, is_sharded: Callable[[torch.Tensor], bool]) -> list[Problem]:
    """Return all reasons against ``optimizer`` on local shards.

    Args:
        optimizer: Any optimizer; of a wrapper the inner one is tried.
        is_sharded: True for a parameter that is, or becomes, a local shard.
    """
    problems: list[Problem] = []
    # A wrapper steps its inner optimizer, so that one is tried instead.
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    for each in inner or [optimizer]:
        if getattr(each, "is_elementwise", None) is True:  # stated by the author
            continue
        groups = [(group, [x for x in group["params"] if is_sharded(x)]) for group in each.param_groups]
        if reason := next(filter(None, (_first_reason(each, *group) for group in groups)), ""):
            hint = "use an elementwise optimizer for them (SGD, Adam, AdamW, ...); if it is one all the same, set "
            hint += "optimizer.is_elementwise = True"
            name, description = f"optimizer: {type(each).__name__}", f"it holds local shards, and {reason}"
            problems.append(Problem("not-elementwise", name, found=description, hint=hint))
    return problems


def _first_reason(optimizer: Optimizer, group: dict[str, Any], sharded: list[torch.Tensor]) -> str:
    """Return why the optimizer needs more than one element at a time, or nothing."""
    for example in {each.dim(): each for each in sharded if each.dim()}.values():
        shape = (SIDE,) * example.dim()
        like = example.to_local() if isinstance(example, DTensor) else example
        full = _values(shape, 0.0, like)
        if type(full) is not torch.Tensor or like.is_meta:
            continue  # fake tensors have no values to compare
        for dim in range(example.dim()):
            reason = _reason(optimizer, group, full, dim)
            if reason:
                return reason
    return ""


def _reason(optimizer: Optimizer, group: dict[str, Any], full: torch.Tensor, dim: int) -> str:
    halves = [half.contiguous() for half in full.chunk(2, dim)]
    grads = [_values(tuple(full.shape), step + 1.0, full) for step in range(STEPS)]
    devices = [full.device] if full.device.type != "cpu" else []  # the CPU's generator is always restored
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), full.device:  # of what the optimizer makes, too
            full_update = _train(optimizer, group, full, grads)
            parts = [
                _train(optimizer, group, half, [grad.chunk(2, dim)[index].contiguous() for grad in grads])
                for index, half in enumerate(halves)
            ]
    except Exception as error:
        return f"it cannot be tried on a small tensor ({type(error).__name__}: {error})"
    count = min(map(len, (full_update, *parts)))  # a closure may be called another number of times
    difference = float((full_update[:count] - torch.cat([x[:count] for x in parts], dim + 1)).double().abs().max())
    update = float((full_update - full).double().abs().max())
    if math.isfinite(difference) and difference <= RTOL * max(update, torch.finfo(full.dtype).eps):
        return ""
    return f"it updates half a tensor differently from the full one (by {difference:.1e} of {update:.1e})"


def _train(
    optimizer: Optimizer, group: dict[str, Any], value: torch.Tensor, grads: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Return ``value`` at each call of the closure and at the end: the end alone would not expose LBFGS."""
    parameter, values = nn.Parameter(value.clone()), list[torch.Tensor]()
    accepted = inspect.signature(type(optimizer).__init__).parameters
    settings = {key: setting for key, setting in optimizer.defaults.items() if key in accepted}
    trial = type(optimizer)([parameter], **settings)
    own = {key: setting for key, setting in group.items() if key != "params"}
    trial.param_groups[0].update({key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in own.items()})
    if float(own.get("lr", 1.0)) == 0.0:  # a warmup's first step would show nothing
        trial.param_groups[0]["lr"] = optimizer.defaults.get("lr") or 1e-2
    needs_closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    for grad in grads:

        def closure(grad: torch.Tensor = grad) -> torch.Tensor:
            values.append(parameter.detach().clone())
            parameter.grad = grad + parameter.detach() * 0.1  # a function of each element alone
            return (parameter.detach() * parameter.grad).sum()

        closure()
        if needs_closure is not None and needs_closure.default is inspect.Parameter.empty:
            trial.step(closure)  # type: ignore[arg-type]  # a tensor will do for a number
        else:
            trial.step()
    return torch.stack([*values, parameter.detach()])


def _values(shape: tuple[int, ...], phase: float, like: torch.Tensor) -> torch.Tensor:
    """Return numbers of both signs and several sizes, with distinct rows and columns. Draws nothing random."""
    count = math.prod(shape)
    place = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    return (torch.sin(place * place + phase) * (1 + place / count)).view(shape).to(like.device, like.dtype)
