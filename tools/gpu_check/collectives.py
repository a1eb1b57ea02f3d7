"""Versions, collectives with one rank, and calls that must not wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_check.common import GIB, Result, Settings, claim, nccl_version, no_host_waits, one_rank
from gpu_check.partition import data_parallel_step

if TYPE_CHECKING:
    pass


def environment(settings: Settings) -> Result:
    """Versions and the device."""
    import torch

    found: Result = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if not settings.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_gib": round(properties.total_memory / GIB, 1)}
        found |= {"devices": torch.cuda.device_count(), "nccl": ".".join(map(str, nccl_version()))}
    return found


def nccl_one_rank(settings: Settings) -> Result:
    """Collectives of each kind under NCCL with one rank: what they return, and that none waits for the host."""
    import torch
    import torch.distributed as dist

    rows: list[Result] = []
    with one_rank(settings):
        x = torch.arange(1024, dtype=torch.float32, device=settings.device)
        out = torch.empty_like(x)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(out.copy_(x)),
            "broadcast": lambda: dist.broadcast(out.copy_(x), src=0),
            "all_gather": lambda: dist.all_gather([out], x),
            "reduce_scatter": lambda: dist.reduce_scatter(out, [x]),
            "all_to_all_single": lambda: dist.all_to_all_single(out, x, [1024], [1024]),
        }
        for name, call in calls.items():
            call()
            out.fill_(-1)
            with no_host_waits(settings):
                call()
            rows.append({"call": name, "right": bool(torch.equal(out, x))})
    return {
        "rows": rows,
        "claims": [claim(row["call"], float(row["right"]), "equal values", row["right"]) for row in rows],
    }


def sync_debug(settings: Settings) -> Result:
    """After its first call no package waits for the device: `set_sync_debug_mode("error")` on the later ones."""
    rows = []
    wanted = "runs; the CPU cannot tell more" if settings.dry else "no waits"
    for name, make in PROGRAMS.items():
        error = ""
        with one_rank(settings):
            try:
                call = make(settings)
                call()
                call()
                with no_host_waits(settings):
                    for _ in range(3):
                        call()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"[:2000]
        rows.append({"program": name, "error": error})
    return {
        "rows": rows,
        "claims": [claim(row["program"], float(not row["error"]), wanted, not row["error"]) for row in rows],
    }


def reshard_program(settings: Settings) -> Callable[[], object]:
    """shard-reshard: one plan, called again and again."""
    import torch
    from shard_reshard import Resharder, plan_reshard

    resharder = Resharder(plan_reshard((64, 96), torch.float32, "1: S(0)", "1: S(1)"))
    x = torch.ones(64, 96, device=settings.device)
    return lambda: resharder(x)


def async_reshard_program(settings: Settings) -> Callable[[], object]:
    """shard-reshard: a handle, waited for later."""
    import torch
    from shard_reshard import reshard

    x = torch.ones(64, 96, device=settings.device)
    return lambda: reshard(x, "1: S(0)", "1: S(1)", shape=(64, 96), async_op=True).wait()


def styles_program(settings: Settings, bridged: bool = False) -> Callable[[], object]:
    """tp-styles: a step of a model with column- and row-wise layers; with tp-ddp-bridge's DDP around it."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from tp_styles import ColwiseParallel, RowwiseParallel, apply_plan

    mesh = init_device_mesh(torch.device(settings.device).type, (1, 1), mesh_dim_names=("dp", "tp"))
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(settings.device)
    apply_plan(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if bridged:
        from tp_ddp_bridge import wrap_ddp

        model = wrap_ddp(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.ones(8, 32, device=settings.device)

    def call() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def bridge_program(settings: Settings) -> Callable[[], object]:
    """tp-ddp-bridge: the same model inside DDP."""
    return styles_program(settings, bridged=True)


def replicate_program(settings: Settings) -> Callable[[], object]:
    """dp-partition, replicated."""
    step, arguments = data_parallel_step(settings, "replicate")
    return lambda: step(*arguments)


def fully_shard_program(settings: Settings) -> Callable[[], object]:
    """dp-partition, fully sharded."""
    step, arguments = data_parallel_step(settings, "fully_shard")
    return lambda: step(*arguments)


PROGRAMS = {
    "shard-reshard": reshard_program,
    "shard-reshard, async": async_reshard_program,
    "tp-styles": styles_program,
    "tp-ddp-bridge": bridge_program,
    "dp-partition, replicate": replicate_program,
    "dp-partition, fully_shard": fully_shard_program,
}
