"""Plans at the size of Llama-3-405B on 1,024 ranks: `python bench_plan.py [--json FILE]`.

Times are the median and the least of 7, interleaved with torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from shard_spec import Layout, MeshSpec, ShardingPlan
from torch import nn

CONFIG = {"vocab": 128256, "dim": 16384, "hidden": 53248, "heads": 128, "kv_heads": 8, "layers": 126}
MESH = MeshSpec({"dp": 128, "tp": 8})
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


Times = dict[str, list[float]]


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> Times:
    """Seconds of each call; the calls of a repeat follow each other, so that a busy machine slows all of them alike."""
    times: Times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return times


def torch_metadata(shapes: list[tuple[int, ...]], world_size: int) -> Callable[[], object]:
    """Torch's own ``build_metadata`` for each of ``shapes``: it lists the shards of all ranks."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(world_size)])
    return lambda: [spec.build_metadata(torch.Size(shape), TensorProperties()) for shape in shapes]


def rows() -> list[dict[str, str]]:
    """Measured values beside their targets and peers."""
    begin = time.perf_counter()
    with torch.device("meta"):
        model = Llama(**CONFIG)
    build = time.perf_counter() - begin
    num_tensors = len(list(model.parameters()))
    assert num_tensors == 1137

    def everything() -> None:
        plan = ShardingPlan(RULES, mesh=MESH, strict=True)
        assert len(plan.resolve(model)) == num_tensors
        assert plan.validate(model) == ()
        assert len(plan.memory(model).totals) == MESH.world_size

    first = interleaved({"all": everything}, 1)["all"][0]
    resolved = ShardingPlan(RULES, mesh=MESH, strict=True).resolve(model)
    shapes = {tensor.name: tensor.shape for tensor in resolved.metadata.tensors}

    def one_rank() -> None:
        num_boxes = sum(len(layout.boxes(777, shapes[name])) for name, layout in resolved.items())
        assert num_boxes == num_tensors

    sample = list(shapes.values())[:: num_tensors // 20]
    scale = num_tensors / len(sample)
    calls = {"all": everything, "boxes": one_rank, "torch": torch_metadata(sample, MESH.world_size)}
    times = interleaved(calls, 7)
    peer = _seconds([each * scale for each in times["torch"]])
    metadata = f"torch `build_metadata` of the same tensors (of {len(sample)}, scaled): {peer}"
    shape, layout, times_of_one = (53248, 16384), Layout(MESH, "dp:S(0), tp:S(1)"), 1000

    def one_tensor() -> None:
        for rank in range(times_of_one):
            layout.local_shape(rank, shape), layout.offsets(rank, shape)

    one = interleaved({"ours": one_tensor, "torch": torch_metadata([shape], MESH.world_size)}, 7)
    of_one = [each / times_of_one for each in one["ours"]]
    flat = ShardingPlan.from_layouts(resolved).to_json()
    text = ShardingPlan.from_json(flat).compact(model).to_json()
    return [
        _row(
            f"Llama-3-405B ({num_tensors:,} tensors) x {MESH.world_size:,} ranks: resolve, validate, memory of each",
            "<= 1 s after the meta build",
            f"{_seconds(times['all'])}; first time {first:.2f} s; the meta build before it {build:.1f} s",
            metadata,
        ),
        _row("boxes of one rank of all its tensors", "<= 50 ms", _seconds(times["boxes"]), metadata),
        _row(
            "local shape and offsets of one tensor on one rank",
            "O(ndim)",
            _seconds(of_one),
            f"torch `build_metadata` of that tensor: {_seconds(one['torch'])}",
        ),
        _row(
            "plan file with globs",
            "< 20 KB",
            f"{len(text) / 1e3:.2f} KB",
            f"one rule a tensor: {len(flat) / 1e3:.1f} KB",
        ),
    ]


def _seconds(times: list[float]) -> str:
    """Median and least."""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if min(times) * f >= 0.1 or u == "us")
    return f"{statistics.median(times) * factor:.3g} {unit} (least {min(times) * factor:.3g})"


def _row(what: str, target: str, measured: str, peer: str) -> dict[str, str]:
    return {"what": what, "target": target, "measured": measured, "peer": peer}


def main() -> int:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    results = rows()
    for row in results:
        print(" | ".join(row.values()))
    command = "python packages/shard-spec/benchmarks/bench_plan.py"
    if arguments.json:
        document = {"title": "Plans", "command": command, "rows": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
