"""Optimizers allowed on shards: those that update each element from that element, its gradient and its state alone.

Adafactor, Muon, LBFGS, Shampoo, LAMB and others use full matrices or all parameters at once. On a shard they
compute something else, without an error. A trial on a small tensor lets some of them through (a preconditioner of
blocks of 8 rows, a threshold on the side of a matrix), so an optimizer is elementwise by its class or by its author's
word, and everything else is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from .problems import Problem

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Torch's elementwise optimizers; every setting of theirs is elementwise, `foreach` and `fused` too."""

WRAPPERS = frozenset(
    {
        ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
        ("torch.distributed.optim.post_localSGD_optimizer", "PostLocalSGDOptimizer"),
        ("accelerate.optimizer", "AcceleratedOptimizer"),
    }
)
"""Module and name of classes whose `step` is that of an inner optimizer; importing the first one would warn."""


def elementwise_problems(optimizer: Optimizer, is_sharded: Callable[[torch.Tensor], bool]) -> list[Problem]:
    """Return all reasons against ``optimizer`` on local shards.

    Args:
        optimizer: Any optimizer; of a known wrapper the inner one counts.
        is_sharded: True for a parameter that is, or becomes, a local shard.
    """
    problems: list[Problem] = []
    for each in stepped_by(optimizer):
        if is_elementwise(each):
            continue
        if any(is_sharded(parameter) for group in each.param_groups for parameter in group["params"]):
            reason = "it holds local shards, and is not known to update each element from that element alone"
            hint = (
                "on shards use SGD, Adam, AdamW or another of torch's elementwise optimizers; if this one is"
                " elementwise, say so: optimizer.is_elementwise = True; one that needs full matrices (Muon, Shampoo,"
                " SOAP, Adafactor, LAMB) is right as shard_reshard.WholeMatrices(model.named_parameters(),"
                " lambda params: torch.optim.Muon(params)), which gives each matrix one owner rank, or with full"
                " parameters: leave their modules out of the plan"
            )
            problems.append(Problem("not-elementwise", f"optimizer: {type(each).__name__}", found=reason, hint=hint))
    return problems


def stepped_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer itself, or of a known wrapper all inner ones."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner and any((kind.__module__, kind.__name__) in WRAPPERS for kind in type(optimizer).__mro__):
        for each in inner:
            yield from stepped_by(each)
    else:
        yield optimizer


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True for one of torch's elementwise optimizers, and for one that says so itself.

    A subclass with a ``step`` of its own (Adam with a trust ratio) is another optimizer.
    """
    said: Any = getattr(optimizer, "is_elementwise", None)
    if said is not None:
        return said is True
    step = inspect.unwrap(type(optimizer).step)  # torch wraps it at the class's first instance
    return any(isinstance(optimizer, kind) and inspect.unwrap(kind.step) is step for kind in ELEMENTWISE)
