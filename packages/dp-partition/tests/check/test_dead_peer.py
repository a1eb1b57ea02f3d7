"""A rank that dies ends the call of the others in an error that names call and rank, and leaves them as before it."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import dp_models as models
import dp_partition as dp
import torch
from dp_partition.check import checked_call, gradients
from torch.distributed.device_mesh import init_device_mesh

# where rank 1 dies -> the call, what rank 0's error says
_DEATHS = {
    "before its first call": (1, "step"),
    "in the graph": (3, "call 3 of step on rank 0"),
    "in the eager run": (2, "the check of call 2 of step on rank 0"),
    "in the verdict": (2, "the check of call 2 of step on rank 0"),
}


def test_a_rank_that_dies_is_reported_by_the_others(tmp_path: Path) -> None:
    # Worlds of their own, so that the deaths are this test's; not forked from here, where autograd may have threads.
    context = multiprocessing.get_context("forkserver")
    # All that a first call imports is imported once, before ranks are forked.
    libraries = ["torch._dynamo", "torch._functorch.partitioners", "torch.fx.experimental.symbolic_shapes"]
    context.set_forkserver_preload([*libraries, "dp_partition.runner"])
    reports = {how: context.SimpleQueue() for how in _DEATHS}
    workers = [
        context.Process(target=_die_or_report, args=(rank, str(tmp_path / how), how, reports[how]))
        for how in _DEATHS
        for rank in (0, 1)
    ]
    for worker in workers:  # all worlds at once: most of their time they wait
        worker.start()
    for worker in workers:
        worker.join(180)
        assert worker.exitcode == 0
    for how in _DEATHS:
        message, unchanged = reports[how].get()
        assert _DEATHS[how][1] in message and "rank 0" in message, (how, message)
        assert unchanged, how


def _die_or_report(rank: int, path: str, how: str, reports: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = torch.distributed.FileStore(path, 2)  # type: ignore[attr-defined]  # public, though not declared so
        limit = timedelta(seconds=90)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        model = models.seeded(models.mlp)
        optim = torch.optim.AdamW(model.parameters(), 0.1)

        def step(model: torch.nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> Any:
            return models.mean_step(model, optim, x)

        compiled = dp.compile(step, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), style="fully_shard")
        last = _DEATHS[how][0]
        for call in range(1, last + 1):
            before = [p.detach().clone() for p in model.parameters()]
            if rank == 1 and call == last:
                _die(how)
            compiled(model, optim, torch.ones(4, 8) * call)
    except Exception as error:
        same = all(torch.equal(a, b) for a, b in zip(map(_local, before), map(_local, model.parameters()), strict=True))
        reports.put(("".join(traceback.format_exception(error)), same))
    finally:
        os._exit(0)


def _die(how: str) -> None:
    """Exit now, or where the check comes to."""

    def exit_now(*args: Any, **kwargs: Any) -> Any:
        os._exit(0)

    if how == "in the eager run":
        gradients.GradientAverage._after_backward = exit_now  # type: ignore[method-assign]
    elif how == "in the verdict":
        checked_call.live_outcome = exit_now  # type: ignore[attr-defined]
    else:
        exit_now()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()
