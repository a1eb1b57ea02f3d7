"""Bytes and time of syncs that send changes alone, by the share of elements that changed.

    python packages/shard-reshard/benchmarks/changes.py [--markdown FILE]

Two gloo ranks, rows to columns, 32 MiB of each dtype. Bytes are those on the wire, headers included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIDES = {torch.bfloat16: (4096, 4096), torch.float32: (4096, 2048)}
PERCENT = (0, 1, 3, 10, 30, 100)
RANKS = 2


def _part(repeats: int) -> list[dict[str, Any]]:
    from shard_reshard import StateDictResharder

    rank, rows = dist.get_rank(), []
    sent = [0]
    exchange = dist.all_to_all_single

    def counted(output: Any, source: Any, output_splits: Any = None, splits: Any = None, **options: Any) -> Any:
        splits = splits or [source.shape[0] // RANKS] * RANKS
        each = source[0].numel() * source.element_size() if len(source) else 0
        sent[0] += sum(size for peer, size in enumerate(splits) if peer != rank) * each
        return exchange(output, source, output_splits, splits if output_splits else None, **options)

    dist.all_to_all_single = counted
    for dtype, shape in SIDES.items():
        generator = torch.Generator().manual_seed(1)
        full = torch.randn(shape, generator=generator).to(dtype)
        layouts: dict[str, Any] = {"src_layouts": {"w": f"{RANKS}: S(0)"}, "shapes": {"w": shape}}
        state = {"w": full.chunk(RANKS)[rank].clone()}
        out = {"w": torch.empty_like(full.chunk(RANKS, 1)[rank]).contiguous()}
        plain = StateDictResharder(state, f"{RANKS}: S(1)", **layouts)
        sync = StateDictResharder(state, f"{RANKS}: S(1)", changed_only=True, **layouts)
        sync(state, out=out, atomic=False)
        for percent in PERCENT:
            times: dict[str, list[float]] = {"full": [], "changed": []}
            for _ in range(repeats):
                mask = torch.rand(shape, generator=generator) < percent / 100
                full[mask] = (full[mask].float() * 1.01 + 1).to(dtype)
                state["w"].copy_(full.chunk(RANKS)[rank])
                for name, call in (("full", plain), ("changed", sync)):
                    sent[0] = 0
                    dist.barrier()
                    begin = time.perf_counter()
                    call(state, out=out, atomic=False)
                    times[name].append(time.perf_counter() - begin)
                    assert torch.equal(out["w"], full.chunk(RANKS, 1)[rank])
            crossing = int(mask.chunk(RANKS)[rank].chunk(RANKS, 1)[1 - rank].sum())
            dense = full.numel() // RANKS**2 * dtype.itemsize
            full_ms, changed_ms = (1e3 * statistics.median(times[name]) for name in ("full", "changed"))
            name = str(dtype).removeprefix("torch.")
            counts = crossing * dtype.itemsize, crossing, sent[0], dense
            rows.append({"dtype": name, "percent": percent, "counts": counts, "ms": (full_ms, changed_ms)})
    return rows


def main() -> None:
    """Print the table, and write it where asked."""
    from bench_scaling import on_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", metavar="FILE")
    arguments = parser.parse_args()
    lines = [
        "# shard-reshard: syncs that send only changes",
        "",
        "`python packages/shard-reshard/benchmarks/changes.py --markdown FILE`: rows to columns on two gloo",
        "ranks, 32 MiB of each dtype, elements drawn at random. Bytes are what one rank sends, index and headers",
        "included; every sync is compared with the full state bit for bit. An index of",
        "full rows costs one byte an element too. Over loopback a full sync is faster: the times show the cost of the",
        "index.",
        "",
        "| dtype | changed | changed bytes | sent | sent / changed | index, bytes per element | of a full sync "
        "| full sync | this sync |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in on_ranks(_part, RANKS, arguments.repeats):
        changed, elements, sent, dense = row["counts"]
        ratio = f"{sent / changed:.2f}" if changed else "-"
        index = f"{max(0, sent - changed) / elements:.2f}" if changed else "-"
        full_ms, ms = row["ms"]
        lines.append(
            f"| {row['dtype']} | {row['percent']} % | {changed:,} | {sent:,} | {ratio} | {index} "
            f"| {sent / dense:.3f} | {full_ms:.0f} ms | {ms:.0f} ms |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(text)


if __name__ == "__main__":
    main()
