"""Memory that was promised against what the CUDA allocator saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_check.common import Result, Settings, claim, one_rank, peak_of
from gpu_check.partition import data_parallel_step, graph_inputs

if TYPE_CHECKING:
    pass


def allocator_peaks(settings: Settings) -> Result:
    """Memory that was promised against what the CUDA allocator saw."""
    rows: list[Result] = []
    measures: dict[str, Callable[[], tuple[int, int]]] = {
        "reshard": lambda: reshard_peak(settings, None),
        "reshard, workspace limited to an eighth": lambda: reshard_peak(settings, 8),
        "dp-partition replicate, one step": lambda: partition_peak(settings, "replicate"),
        "dp-partition fully_shard, one step": lambda: partition_peak(settings, "fully_shard"),
    }
    claims = []
    for name, measure in measures.items():
        try:
            promised, measured = measure()
        except Exception as problem:
            rows.append({"what": name, "error": f"{type(problem).__name__}: {problem}"[:2000]})
            claims.append(claim(name, 0.0, "runs", False))
            continue
        rows.append({"what": name, "promised_mib": promised / 2**20, "measured_mib": measured / 2**20})
        if promised and not settings.dry:
            ratio = measured / promised
            claims.append(claim(f"{name}: measured of promised", ratio, "<= 1.02", ratio <= 1.02))
    return {"rows": rows, "claims": claims}


def reshard_peak(settings: Settings, part: int | None) -> tuple[int, int]:
    """Promised and measured bytes of a change of layout, nothing sent; its workspace limited to 1 / part of a shard."""
    import torch
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering.program import build_program

    side, device = (64 if settings.dry else 16384), torch.device(settings.device)
    limit = None if part is None else side * side * 4 // 8 // part
    plan = plan_reshard((side, side), torch.float32, "8: S(0)", "8: S(1)", max_workspace_bytes=limit)
    exchange = Exchange(build_program((plan,), 3, 8))
    sources = [torch.ones(shape, device=device) for shape in plan.src.local_shapes(3)]

    def call() -> None:
        exchange.prepare(sources, exchange.allocate(device), device).run(lambda *_: None, False)

    return plan.peak_bytes(3), peak_of(call, settings)


def partition_peak(settings: Settings, style: str) -> tuple[int, int]:
    """No promise, and measured bytes, of one run of a partitioned graph."""
    import torch

    with one_rank(settings):
        step, arguments = data_parallel_step(settings, style)
        for _ in range(2):
            step(*arguments)
        inputs = graph_inputs(step, arguments)

        def call() -> None:
            with torch.no_grad():
                step.graph(*inputs)

        return 0, peak_of(call, settings)
