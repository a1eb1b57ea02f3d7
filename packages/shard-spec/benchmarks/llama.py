"""Llama 3 on H100s: the optimal plan beside the plans that people write by hand, under one cost model.

    python packages/shard-spec/benchmarks/llama.py

Writes ``docs/benchmarks/shard-spec-llama.md``; every number in it is computed here. Needs transformers, no GPU.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from bench_planners import llama  # puts tests/ on the path
from recipes import price
from shard_spec import topology_preset
from shard_spec.estimate.communication import AlphaBetaCostModel
from shard_spec.optimal import OptimalPlanner, Workload
from torch import nn

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "shard-spec-llama.md"
SIZES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}
SEQUENCE = 8192
HAND = {
    "Megatron (tp) x data (dp)": {"dp": "data", "tp": "megatron"},
    "Megatron + sequence x data": {"dp": "data", "tp": "megatron+sequence"},
    "Megatron + sequence x FSDP": {"dp": "fsdp", "tp": "megatron+sequence"},
    "FSDP in the host x data (hybrid)": {"dp": "data", "tp": "fsdp"},
    "FSDP x FSDP": {"dp": "fsdp", "tp": "fsdp"},
}


@dataclass(frozen=True)
class Case:
    """One model on one number of hosts of 8 ranks, and why the plan looks as it does."""

    model: str
    hosts: int
    batch: int
    why: str
    overlap: float = 0.0


CASES = (
    Case(
        "8B",
        1,
        8,
        "One sequence a rank: sharding the batch and gathering weights sends less than Megatron's all-reduces of "
        "activations. Free memory goes to replicated weights, where each byte saves most time. Table and "
        "head are tensor-parallel: their weights move more bytes than their activations.",
    ),
    Case(
        "8B",
        8,
        64,
        "Hybrid sharding: FSDP inside the host, where links are fast, plain data parallelism across hosts, so that "
        "only gradients cross the network. Memory suffices, so all layers are alike.",
    ),
    Case(
        "8B",
        8,
        16,
        "Two sequences a host of 8 ranks: the batch cannot be sharded further, which leaves tensor parallelism. The "
        "residual stream stays replicated, because recomputed blocks would gather a sharded one once more.",
    ),
    Case(
        "70B",
        8,
        64,
        "As for 8B, but memory is the limit: all weights are sharded inside the host, and as many as memory allows "
        "stay replicated across hosts (hybrid); the rest are sharded over all ranks.",
    ),
    Case(
        "70B",
        32,
        128,
        "Half a sequence a rank: tensor parallelism, or sequence to heads and back (Ulysses). The smaller side "
        "moves: attention gathers its weights, the feed-forward sends activations (column and row).",
    ),
    Case(
        "8B",
        8,
        64,
        "The second case where 70 % of the weights' collectives hide behind matmuls: hybrid sharding for every "
        "weight, table and head included.",
        overlap=0.7,
    ),
)


def section(case: Case, model: nn.Module) -> list[str]:
    """One case: times and memory of all plans, and the optimal one's choices."""
    mesh = {"dp": case.hosts, "tp": 8}
    workload = Workload(batch=case.batch, sequence=SEQUENCE, overlap=case.overlap)
    planner = OptimalPlanner(mesh=mesh, workload=workload)
    certificate = planner.build_plan(model).certificate
    assert certificate is not None
    assert certificate.memory_bytes is not None
    proven = "proven optimal" if certificate.gap == 0 else f"at most {certificate.gap:.2%} above the best"
    best = f"**{certificate.objective:.3f} s** | {certificate.memory_bytes / 1e9:.1f} GB | {proven}"
    hidden = f", {case.overlap:.0%} of the weights' collectives hidden" if case.overlap else ""
    lines = [
        f"## Llama-3-{case.model}, {case.hosts} x 8 H100, {case.batch} sequences{hidden}",
        "",
        "| plan | a step | memory of a rank | |",
        "|---|---|---|---|",
        f"| optimal | {best} |",
    ]
    for name, recipe in HAND.items():
        try:
            cost = price(planner, model, recipe)
        except ValueError:
            lines.append(f"| {name} | - | - | the batch does not divide |")
            continue
        memory = cost.memory_bytes
        more = f"{cost.seconds / certificate.objective - 1:+.1%}"
        remark = f"{more}, does not fit" if memory > planner.memory_limit else more
        lines.append(f"| {name} | {cost.seconds:.3f} s | {memory / 1e9:.1f} GB | {remark} |")
    return [*lines, "", "What it chose:", "", *chosen(certificate.choices), "", f"Why: {case.why}", ""]


def chosen(choices: tuple[tuple[str, str], ...]) -> list[str]:
    """One line for each kind of operation: its ways, and how many layers take each."""
    kinds: dict[str, dict[str, int]] = {}
    for name, ways in choices:
        if name.endswith("-> stream"):
            continue
        kind = re.sub(r"\.\d+\.", ".*.", name)
        counts = kinds.setdefault(kind, {})
        counts[ways] = counts.get(ways, 0) + 1
    lines = []
    for kind, counts in kinds.items():
        many = len(counts) > 1
        summary = "; ".join(f"`{ways}`" + (f" in {number}" if many else "") for ways, number in counts.items())
        lines.append(f"- `{kind}`: {summary}")
    return lines


def main() -> int:
    """Write the page."""
    models = {name: llama(*size) for name, size in SIZES.items()}
    topology, cost = topology_preset("h100-sxm"), AlphaBetaCostModel()
    lines = [
        "# Llama 3: the optimal plan and hand-written ones",
        "",
        "Made by `python packages/shard-spec/benchmarks/llama.py`. All times are **modelled**, none is measured on a "
        "GPU; all plans are priced by the same model, so their order is what counts.",
        "",
        f"Topology `{topology.name}`: {topology.ranks_per_host} ranks a host, {topology.intra_bw / 1e9:.0f} GB/s a "
        f"rank inside a host and {topology.inter_bw / 1e9:.0f} GB/s between hosts, "
        f"{topology.flops / 1e12:.0f} TFLOP/s, "
        f"{topology.hbm_bytes / 1e9:.0f} GB. `{cost}`. {SEQUENCE:,} tokens a sequence, bfloat16, Adam "
        f"({Workload(1, 1).state_bytes} bytes a weight with its gradient and master copy), blocks recompute. Axis "
        "`tp` is the 8 ranks of a host, `dp` the hosts; the names do not bind the planner. Strategies are explained "
        "in [the designs](../design/shard-spec.md).",
        "",
    ]
    for case in CASES:
        lines += section(case, models[case.model])
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
