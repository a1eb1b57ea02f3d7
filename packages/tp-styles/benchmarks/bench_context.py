"""Ulysses beside all-to-alls by hand, in one run, and the activations that a rank keeps for backward.

    python packages/tp-styles/benchmarks/bench_context.py [--tokens N ...] [--json FILE]

Attention runs forward and backward on 2 ranks. Both ways take turns, and the rows have medians of 30 turns. Torch's
`context_parallel` runs beside them where its attention has a kernel for the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh

HEADS, SIZE, ROWS, TURNS = 8, 32, 2, 30
ACTIVATION_TOKENS = 512


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


def activations(mesh: DeviceMesh, tokens: int) -> dict[str, float]:
    """Return the share of one process's saved tensors that this rank keeps, for each kind."""
    import context_models
    import tp_styles as tp
    from torch.distributed.tensor import Shard

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    alone = context_models.saved_bytes(context_models.Deep(), ids)
    styles = (tp.ContextParallel(kind, output_layouts=Shard(1)) for kind in ("ulysses", "gather"))
    shares = {}
    for style in styles:
        model = context_models.Deep()
        tp.apply_plan(model, mesh, style, check="never")
        shares[style.kind] = context_models.saved_bytes(model, ids) / alone
    return shares


def rows(sizes: list[int]) -> list[dict[str, str]]:
    """Return the rows of the benchmark page."""
    table = []
    for tokens in sizes:
        result = on_ranks(measured, 2, tokens)
        seconds, failed = result["seconds"], result["failed"]
        base = seconds["by hand"]
        theirs = f"{1e3 * seconds['torch']:.2f} ms" if "torch" in seconds else f"does not run here ({failed['torch']})"
        table.append(
            {
                "what": f"Ulysses attention of {HEADS} heads, {tokens} tokens on 2 ranks, forward and backward",
                "target": "<= 1.25x of all-to-alls by hand",
                "measured": f"{seconds['ours'] / base:.2f}x ({1e3 * seconds['ours']:.2f} ms)",
                "peer": f"by hand {1e3 * base:.2f} ms; torch's `context_parallel` {theirs}",
            }
        )
    for size in (2, 4):
        shares = on_ranks(activations, size, ACTIVATION_TOKENS)
        table.append(
            {
                "what": f"activations that a rank keeps for backward, {ACTIVATION_TOKENS} tokens on {size} ranks",
                "target": f"<= {1 / size:.0%} + 5 % of one process",
                "measured": ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()),
                "peer": f"an equal share: {1 / size:.0%}",
            }
        )
    return table


def main() -> None:
    """Print the rows, or write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--json", type=Path, help="where to write the results; default: print them")
    options = parser.parse_args()
    command = "python packages/tp-styles/benchmarks/bench_context.py --json context.json"
    result = {"title": "Context parallelism", "command": command, "rows": rows(options.tokens)}
    text = json.dumps(result, indent=1)
    print(text) if options.json is None else options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
