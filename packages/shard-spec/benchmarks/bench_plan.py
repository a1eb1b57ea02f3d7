"""Plans at the size of Llama-3-405B on 1,024 ranks: `python bench_plan.py [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shard_spec import Layout, MeshSpec, ShardingPlan
from torch import nn

CONFIG = {"vocab": 128256, "dim": 16384, "hidden": 53248, "heads": 128, "kv_heads": 8, "layers": 126}
MESH = MeshSpec({"dp": 128, "tp": 8}, ranks_per_host=8)
RULES = {
    "embed.weight": "dp:S(1), tp:S(0)",
    "layers.*.attn.{wq,wk,wv}.weight": "dp:S(1), tp:S(0)",
    "layers.*.attn.wo.weight": "dp:S(0), tp:S(1)",
    "layers.*.mlp.{w1,w3}.weight": "dp:S(1), tp:S(0)",
    "layers.*.mlp.w2.weight": "dp:S(0), tp:S(1)",
    "**.*norm.weight": "dp:S(0), tp:R",
    "head.weight": "dp:S(1), tp:S(0)",
}


class Layer(nn.Module):
    """One layer: grouped-query attention and a gated feed-forward, each after a norm."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        kv = dim // heads * kv_heads
        sizes = {"wq": (dim, dim), "wk": (dim, kv), "wv": (dim, kv), "wo": (dim, dim)}
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        sizes = {"w1": (dim, hidden), "w3": (dim, hidden), "w2": (hidden, dim)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class Llama(nn.Module):
    """Embedding, layers, norm and an untied head, from a config."""

    def __init__(self, vocab: int, dim: int, hidden: int, heads: int, kv_heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, hidden, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)


def measure(run: Callable[[], object], repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds of ``run``."""
    times = []
    for _ in range(repeats):
        begin = clock()
        run()
        times.append(clock() - begin)
    return sorted(times)[len(times) // 2]


def torch_metadata_seconds(shapes: list[tuple[int, ...]], world_size: int) -> float:
    """What torch's own ``build_metadata`` takes for the same tensors, measured on 20 of them and scaled."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(world_size)])
    sample = shapes[:: max(1, len(shapes) // 20)]
    begin = time.perf_counter()
    for shape in sample:
        spec.build_metadata(torch.Size(shape), TensorProperties())
    return (time.perf_counter() - begin) / len(sample) * len(shapes)


def rows() -> list[dict[str, Any]]:
    """Measured values beside their targets."""
    begin = time.perf_counter()
    with torch.device("meta"):
        model = Llama(**CONFIG)
    build = time.perf_counter() - begin
    num_tensors = len(list(model.parameters()))

    def everything() -> None:
        plan = ShardingPlan(RULES, mesh=MESH, strict=True)
        assert len(plan.resolve(model)) == num_tensors
        assert plan.validate(model) == ()
        assert len(plan.memory(model).totals) == MESH.world_size

    begin = time.perf_counter()
    everything()
    cold = time.perf_counter() - begin
    plan = ShardingPlan(RULES, mesh=MESH, strict=True)
    found = plan.resolve(model)
    shapes = {tensor.name: tensor.shape for tensor in found.facts.tensors}

    def one_rank() -> None:
        held = sum(len(layout.boxes(777, shapes[name])) for name, layout in found.items())
        assert held == num_tensors

    flat = ShardingPlan.from_layouts(found)
    text = flat.compact(model).to_json()
    shape, layout = (53248, 16384), Layout(MESH, "dp:S(0), tp:S(1)")
    shapes_and_offsets = measure(lambda: (layout.local_shape(777, shape), layout.offsets(777, shape)), 101)
    peer = torch_metadata_seconds(list(shapes.values()), MESH.world_size)
    return [
        _row("tensors of Llama-3-405B, built on meta", num_tensors, 1137, "", exact=True),
        _row("building it on meta (no target)", build, None, "s"),
        _row("resolve + validate + memory on 1,024 ranks, first time", cold, 1.0, "s"),
        _row("the same again, median of 5", measure(everything), 1.0, "s"),
        _row("  in CPU time (for a machine that does other work)", measure(everything, 5, time.process_time), 1.0, "s"),
        _row("one rank's boxes of all tensors", measure(one_rank) * 1e3, 50.0, "ms"),
        _row("  in CPU time", measure(one_rank, 5, time.process_time) * 1e3, 50.0, "ms"),
        _row("local shape and offsets of one tensor", shapes_and_offsets * 1e6, None, "us"),
        _row("plan file with globs", len(text) / 1e3, 20.0, "KB"),
        _row("torch build_metadata of the same tensors (peer)", peer, None, "s"),
    ]


def _row(what: str, measured: float, target: float | None, unit: str, exact: bool = False) -> dict[str, Any]:
    met = None if target is None else (measured == target if exact else measured <= target)
    return {"what": what, "measured": round(measured, 4), "target": target, "unit": unit, "met": met}


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args(argv)
    found = rows()
    for row in found:
        target = "" if row["target"] is None else f"target {row['target']:g} {row['unit']}"
        mark = {True: "met", False: "MISSED", None: ""}[row["met"]]
        print(f"{row['what']:58} {row['measured']:>10.3f} {row['unit']:3} {target:18} {mark}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["met"] is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
