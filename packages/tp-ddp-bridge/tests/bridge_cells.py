"""The matrix: DDP's options and ways of training, by models. Every cell is 5 steps on 2 x 2 ranks against one process.

Tests run a sample, `benchmarks/matrix.py` all cells.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import bridge_models as models
import torch
from bridge_subjects import ADAM_ATOL, SUBJECTS, Run, adam, sgd
from ranktest import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tp_ddp_bridge import GradScaler, check_optimizer, check_replicas, clip_grad_norm_

# ---- options of DDP ------------------------------------------------------------------------------------------------

_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "batched_grad_copy": {"batched_grad_copy": True},
    "tiny buckets": {"bucket_cap_mb": 1e-4},
    "no init_sync": {"init_sync": False},
    "static, views, tiny": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
}
_KNOWN = inspect.signature(DistributedDataParallel).parameters  # torch 2.11 has no batched_grad_copy
OPTIONS = {name: kwargs for name, kwargs in _OPTIONS.items() if kwargs.keys() <= _KNOWN.keys()}


def option(run: Run, kwargs: dict[str, Any]) -> models.Compared:
    """The plain loop under an option of DDP; the optimizer was built before the bridge."""
    model = run.subject.shard(run.subject.build(), run.mesh["tp"])
    optimizer = run.subject.optimizer(model.parameters())
    ddp = run.wrapped(model, optimizers=optimizer, **kwargs)
    assert check_optimizer(ddp, optimizer) == run.subject.tensors
    run.train(ddp, optimizer)
    return run.compare(ddp, run.reference())


class Branches(nn.Module):
    """One branch is never used, one only in every second step."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = build(), build(), build()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if self.step % 2 else out


def unused(run: Run) -> models.Compared:
    """Parameters without a gradient, always and in some steps."""
    build = run.subject.build
    reference = Branches(build)
    models.train(reference, run.subject.optimizer(reference.parameters()), run.subject.task())
    model = Branches(build)
    for branch in model.children():
        run.subject.shard(branch, run.mesh["tp"])
    ddp = run.wrapped(model, find_unused_parameters=True)
    run.train(ddp)
    return run.compare(ddp, reference, copies=3)


# ---- ways to step

Loop = Callable[[Any, torch.optim.Optimizer, models.Task, int, int], None]


def both(run: Run, loop: Loop, *, steps: int = 5, atol: float | None = None) -> models.Compared:
    """The same loop on the whole batch in one process and on the ranks' shares."""
    reference, ddp = run.subject.build(), run.wrapped()
    loop(reference, run.subject.optimizer(reference.parameters()), run.subject.task(steps=steps), 0, 1)
    loop(ddp, run.subject.optimizer(ddp.parameters()), run.subject.task(steps=steps), *run.part)
    return run.compare(ddp, reference, atol=atol)


def accumulate(model: Any, optimizer: torch.optim.Optimizer, task: models.Task, index: int, count: int) -> None:
    """Four micro-batches a step, synchronized with the last."""
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(4):
            x, y = task.part(step * 4 + micro, index, count)
            with model.no_sync() if micro < 3 and count > 1 else contextlib.nullcontext():
                torch.autograd.backward(task.loss(model(x), y))
        optimizer.step()


def two_forwards(model: Any, optimizer: torch.optim.Optimizer, task: models.Task, index: int, count: int) -> None:
    """Two batches through the same parameters, one loss."""
    for step in range(5):
        optimizer.zero_grad()
        (x1, y1), (x2, y2) = (task.part(2 * step + one, index, count) for one in range(2))
        first, second = model(x1), model(x2)
        torch.autograd.backward(task.loss(first, y1) + task.loss(second, y2))
        optimizer.step()


def clipped(model: Any, optimizer: torch.optim.Optimizer, task: models.Task, index: int, count: int) -> None:
    """Gradients are cut down in every step."""
    clip = clip_grad_norm_ if count > 1 else nn.utils.clip_grad_norm_
    for step in range(5):
        optimizer.zero_grad()
        x, y = task.part(step, index, count)
        torch.autograd.backward(task.loss(model(x), y))
        assert float(clip(model.parameters(), 0.05)) > 0.05
        optimizer.step()


def scaled(model: Any, optimizer: torch.optim.Optimizer, task: models.Task, index: int, count: int) -> None:
    """A loss scale that is a power of two changes no bit."""
    scaler = GradScaler("cpu", init_scale=2.0**8) if count > 1 else torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(5):
        optimizer.zero_grad()
        x, y = task.part(step, index, count)
        torch.autograd.backward(scaler.scale(task.loss(model(x), y)))
        scaler.step(optimizer)
        scaler.update()


def join(run: Run) -> models.Compared:
    """The second data-parallel rank has two batches fewer. Who joins gets the parameters, but no optimizer state."""
    task, (index, count) = run.subject.task(), run.part
    reference, ddp = run.subject.build(), run.wrapped()
    full_optimizer, optimizer = run.subject.optimizer(reference.parameters()), run.subject.optimizer(ddp.parameters())
    for step in range(5):
        full_optimizer.zero_grad()
        for x, y in (task.part(step, part, 2) for part in range(2) if part == 0 or step < 3):
            torch.autograd.backward(task.loss(reference(x), y) / 2)  # join divides by the initial number of replicas
        full_optimizer.step()
    with ddp.join():
        for step in range(5 if index == 0 else 3):
            x, y = task.part(step, index, count)
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(ddp(x), y))
            optimizer.step()
    return run.compare(ddp, reference)


# ---- communication and sharded optimizers


def bf16_by_another_name(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook; under its own name DDP wants CUDA for it."""
    return default_hooks.bf16_compress_hook(state, bucket)


bf16_by_another_name.__annotations__ = default_hooks.bf16_compress_hook.__annotations__  # not texts


def power_sgd(group: Any) -> tuple[Any, Any]:
    """A rank as large as the matrices leaves the error of the orthogonalisation alone."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=32, start_powerSGD_iter=2, min_compression_rate=0.0
    )
    return state, powerSGD_hook.powerSGD_hook


def hook(run: Run, make: Callable[[Any], tuple[Any, Any]], atol: float | None) -> models.Compared:
    """Gradients through a communication hook. SGD: Adam would blow the error of a small gradient up to a step."""
    ddp = run.wrapped()
    ddp.register_comm_hook(*make(ddp.process_group))
    run.train(ddp, sgd(ddp.parameters()))
    return run.compare(ddp, run.reference(optimizer=sgd), atol=atol)


def zero_optimizer(parameters: Any, **kwargs: Any) -> torch.optim.Optimizer:
    """Adam, its state cut over the ranks of a group."""
    with warnings.catch_warnings():  # the package scripts its functional optimizers when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.Adam, lr=1e-3, **kwargs
    )
    return optimizer


def zero_1(run: Run) -> models.Compared:
    """Optimizer state cut over the data-parallel ranks."""
    ddp = run.wrapped()
    optimizer = zero_optimizer(ddp.parameters(), process_group=ddp.process_group)
    assert check_optimizer(ddp, optimizer) == run.subject.tensors
    run.train(ddp, optimizer)
    return run.compare(ddp, run.reference(optimizer=adam), atol=ADAM_ATOL)


# ---- forward and backward of another kind


def recomputed(run: Run, reentrant: bool, kwargs: dict[str, Any]) -> models.Compared:
    """The seed had plain tensors back in the module when backward recomputed a region."""
    model = run.subject.shard(run.subject.build(), run.mesh["tp"])
    runs: list[int] = []
    for region in run.subject.regions(model):
        _recompute(region, reentrant, runs)
    ddp = run.wrapped(model, **kwargs)
    run.train(ddp)
    assert len(runs) == 2 * 5 * len(list(run.subject.regions(model)))  # once in forward, once in backward
    return run.compare(ddp, run.reference())


def _recompute(region: Any, reentrant: bool, runs: list[int]) -> None:
    inner = region.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return inner(*args, **kwargs)

    def forward(first: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(counted, **kwargs), first, *args, use_reentrant=reentrant)

    region.forward = forward


def autocast(run: Run) -> models.Compared:
    """bfloat16 partial sums: 2**-8 of gradients below 0.5, times lr. SGD without momentum keeps it at that."""

    def train(model: Any, index: int, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        task = run.subject.task()
        for step in range(5):
            x, y = task.part(step, index, count)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            assert out.dtype == torch.bfloat16
            torch.autograd.backward(task.loss(out.float(), y))
            optimizer.step()

    reference, ddp = run.subject.build(), run.wrapped()
    train(reference, 0, 1)
    train(ddp, *run.part)
    assert all(parameter.dtype == torch.float32 for parameter in ddp.parameters())
    return run.compare(ddp, reference, atol=5e-4)


def variant(run: Run, name: str) -> models.Compared:
    """A plan that cuts activations along the sequence, or logits along the vocabulary."""
    ddp = run.wrapped(run.subject.shard(run.subject.build(), run.mesh["tp"], **{name: True}))
    with loss_parallel() if name == "loss_parallel" else contextlib.nullcontext():
        run.train(ddp)
    replicas = check_replicas(ddp, run.mesh["tp"].get_group())
    assert replicas >= run.subject.norms  # under SequenceParallel they are DTensors whose gradients are sums
    return run.compare(ddp, run.reference(), sharded=run.subject.variants[name])


SITUATIONS: dict[str, Callable[[Run], models.Compared]] = {
    **{name: functools.partial(option, kwargs=kwargs) for name, kwargs in OPTIONS.items()},
    "unused parameters": unused,
    "no_sync accumulation": functools.partial(both, loop=accumulate, steps=20, atol=ADAM_ATOL),  # 20 backward passes
    "two forwards, one backward": functools.partial(both, loop=two_forwards, steps=10),
    "clip_grad_norm_": functools.partial(both, loop=clipped),
    "GradScaler": functools.partial(both, loop=scaled),
    "join, uneven inputs": join,
    "all-reduce hook": functools.partial(hook, make=lambda group: (None, default_hooks.allreduce_hook), atol=None),
    # 5 steps at lr 0.1 with momentum, in half precision; bfloat16 has three bits fewer
    "fp16 hook": functools.partial(hook, make=lambda group: (None, default_hooks.fp16_compress_hook), atol=2e-4),
    "bf16 hook": functools.partial(hook, make=lambda group: (group, bf16_by_another_name), atol=2e-3),
    "PowerSGD hook": functools.partial(hook, make=power_sgd, atol=5e-6),
    "ZeroRedundancyOptimizer": zero_1,
    "checkpointing": functools.partial(recomputed, reentrant=False, kwargs={}),
    "checkpointing, reentrant": functools.partial(recomputed, reentrant=True, kwargs={}),
    "checkpointing, static": functools.partial(recomputed, reentrant=False, kwargs={"static_graph": True}),
    "checkpointing, reentrant, static": functools.partial(recomputed, reentrant=True, kwargs={"static_graph": True}),
    "autocast": autocast,
    "SequenceParallel": functools.partial(variant, name="sequence"),
    "loss_parallel": functools.partial(variant, name="loss_parallel"),
}


def cells() -> list[tuple[str, str]]:
    """All pairs of situation and subject but two. An MLP has no sequence and no vocabulary."""
    nothing = {("SequenceParallel", "MLP"), ("loss_parallel", "MLP")}
    return [pair for pair in itertools.product(SITUATIONS, SUBJECTS) if pair not in nothing]


def run_cell(ranks: Ranks, situation: str, subject: str) -> models.Compared:
    """Train one cell, "GradScaler" of "MLP" for example, and compare it with one process; an error names the cell."""
    try:
        return SITUATIONS[situation](Run(ranks, SUBJECTS[subject], ranks.mesh((2, 2), ("dp", "tp"))))
    except BaseException as error:
        error.add_note(f"cell: {situation}, {subject}")
        raise
