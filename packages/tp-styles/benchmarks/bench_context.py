"""Ulysses beside all-to-alls by hand, in one run: seconds of attention, forward and backward, on 2 ranks.

    python packages/tp-styles/benchmarks/bench_context.py [TOKENS ...]

Both ways take turns, and the medians of 30 turns are printed. Torch's `context_parallel` runs beside them where its
attention has a kernel for the device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh

HEADS, SIZE, ROWS, TURNS = 8, 32, 2, 30


class Exchange(torch.autograd.Function):
    """Chunk p of dim 0 goes to rank p, and its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous())
        return out


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    n = dist.get_world_size()
    packed = torch.stack([x.unflatten(1, (n, -1)) for x in (q, k, v)]).permute(2, 0, 1, 3, 4, 5).contiguous()
    got = Exchange.apply(packed).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # type: ignore[no-untyped-call]
    out = F.scaled_dot_product_attention(*got.unbind(0), is_causal=True)
    back = out.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4).contiguous()
    result: torch.Tensor = Exchange.apply(back).transpose(0, 1).flatten(1, 2)  # type: ignore[no-untyped-call]
    return result


def measured(mesh: DeviceMesh, tokens: int) -> dict[str, Any]:
    from tp_styles.runtime.redistribute import TPGroup
    from tp_styles.runtime.sequence import Order, SequenceAttention, SequenceMoves

    axis = TPGroup(mesh)
    attention = SequenceAttention(SequenceMoves(axis, Order(axis.size)), "ulysses")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=True).transpose(1, 2)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention((q, k, v), None, attend, "attention", is_causal=True).transpose(1, 2)

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(mesh):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ways: dict[str, Callable[..., torch.Tensor]] = {"by hand": by_hand, "ours": ours, "torch": theirs}
    inputs = [torch.randn(ROWS, HEADS, tokens // axis.size, SIZE, requires_grad=True) for _ in range(3)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    outputs = {}
    for turn in range(TURNS + 2):
        for name, way in ways.items():
            if name in failed:
                continue
            dist.barrier()
            start = time.perf_counter()
            try:
                out = way(*inputs)
                out.sum().backward()
            except Exception as error:  # torch's, where it has no kernel
                failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
                continue
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
            outputs[name] = out.detach()
    torch.testing.assert_close(outputs["ours"], outputs["by hand"])
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items() if values},
        "failed": failed,
    }


def main() -> None:
    for tokens in [int(one) for one in sys.argv[1:]] or [128, 512, 2048]:
        found = on_ranks(measured, 2, tokens)
        base = found["seconds"]["by hand"]
        cells = [f"{name} {1e3 * value:.2f} ms ({value / base:.2f})" for name, value in found["seconds"].items()]
        print(f"{tokens} tokens: {', '.join(cells)}", *(f"{k}: {v}" for k, v in found["failed"].items()), flush=True)


if __name__ == "__main__":
    main()
