"""One train step, four ways to run it: on one device, TP x DDP, and as a data-parallel graph in two styles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Batch = tuple[Tensor, Tensor]
Progress = Callable[[int, float], None]  # (step, loss)


@dataclass
class Run:
    """What a training run leaves for the comparisons and the report."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """The step as one would write it for one device; every run of this job uses it unchanged."""
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def repeat(
    name: str,
    step: Callable[[Batch], Tensor],
    batches: Iterator[Batch],
    num_steps: int,
    *,
    mean_over: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run `num_steps` steps and keep their losses; `mean_over` averages them over data-parallel ranks."""
    run = Run(name)
    for number, batch in enumerate(itertools.islice(batches, num_steps), 1):
        began = time.perf_counter()
        loss = step(batch)
        run.step_seconds.append(time.perf_counter() - began)
        run.losses.append(mean(loss, mean_over))
        if progress is not None:
            progress(number, run.losses[-1])
    return run


def mean(loss: Tensor, group: dist.ProcessGroup | None) -> float:
    """The mean of a scalar over a group, in the scalar's own precision."""
    if group is None:
        return loss.item()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item() / dist.get_world_size(group)


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    return mesh.get_group(axis)


class LiveBytes:
    """Bytes on this rank at the moment of an optimizer step, when gradients and (from the second step) state live."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts: dict[str, int] = {}
        optimizer.register_step_pre_hook(self._measure)

    def _measure(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
        self.parts = {
            "parameters": _bytes(parameters),
            "gradients": _bytes([p.grad for p in parameters if p.grad is not None]),
            "optimizer": _bytes(state),
        }


def _bytes(tensors: list[Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)
