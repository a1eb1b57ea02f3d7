"""Pack and unpack bandwidth of shard-reshard."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_check.common import GIB, Result, Settings, claim, timed

if TYPE_CHECKING:
    pass


def pack_bandwidth(settings: Settings) -> Result:
    """shard-reshard's packing and unpacking against a device-to-device copy of the same bytes; nothing is sent."""
    import torch
    from shard_reshard import plan_reshard
    from shard_reshard.execution.exchange import Exchange
    from shard_reshard.lowering.program import build_program

    side, world, rank = (64 if settings.dry else 32768), 8, 3
    device = torch.device(settings.device)
    rows, claims = [], []
    for dtype in (torch.bfloat16, torch.float32):
        for src, dst in (("8: S(0)", "8: S(1)"), ("8: S(1)", "8: S(0)"), ("2x4: S(0), S(1)", "2x4: S(1), S(0)")):
            plan = plan_reshard((side, side * 2), dtype, src, dst)
            exchange = Exchange(build_program((plan,), rank, world), keep_workspace=True)
            sources = [torch.ones(shape, dtype=dtype, device=device) for shape in plan.src.local_shapes(rank)]
            outs = exchange.allocate(device)
            copied = bytes_copied([recipe.memory for recipe in exchange.recipes(sources, outs)], plan.itemsize)

            def call(exchange: Any = exchange, sources: Any = sources, outs: Any = outs) -> None:
                exchange.prepare(sources, outs, device).run(lambda *_: None, False)

            plain = torch.ones(max(copied // 4, 1), dtype=torch.float32, device=device)
            target = torch.empty_like(plain)
            ours, copy = timed(call, settings), timed(partial(target.copy_, plain), settings)
            ratio = copy / ours if copied else 1.0
            name = f"{str(dtype).removeprefix('torch.')} {src} -> {dst}"
            rows.append(
                {"change": name, "copied_gib": round(copied / GIB, 3), "ms": round(1e3 * ours, 3)}
                | {"gb_per_s": round(2 * copied / ours / 1e9, 1), "of_plain_copy": round(ratio, 3)}
            )
            if not settings.dry:
                claims.append(claim(name, ratio, ">= 0.85 of a plain copy", ratio >= 0.85))
            del exchange, sources, outs, plain, target
    return {"rows": rows, "claims": claims}


def bytes_copied(memories: Any, itemsize: int) -> int:
    """Bytes that packing, unpacking and own copies write."""
    total = 0
    for memory in memories:
        total += sum(0 if side.span is not None else side.num_bytes for side in (memory.sends, memory.receives))
        total += sum(math.prod(source.sizes) * itemsize for source, *_ in memory.own)
    return total
