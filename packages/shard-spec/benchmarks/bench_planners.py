"""Planners against their targets and against HiGHS: `python bench_planners.py [--json FILE] [--peer-seconds 20]`."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from shard_spec.optimal import OptimalPlanner, Workload
from shard_spec.optimal.problem import Eliminator, PairwiseProblem
from shard_spec.planners import MegatronPlanner
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from highs_referee import solve_highs
from recipes import price

T = TypeVar("T")
Row = dict[str, str]


def timed(action: Callable[[], T], repeat: int = 3) -> tuple[T, str]:
    """The result, and the median and the least of `repeat` wall times as text."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
    least = f" (least of {repeat}: {min(times):.2f})" if repeat > 1 else ""
    return result, f"{statistics.median(times):.2f} s{least}"


def untied_layers(num_layers: int, num_strategies: int) -> PairwiseProblem:
    """13 operations a layer, two residual connections, random costs: no two layers alike."""
    generator = torch.Generator().manual_seed(0)
    problem = PairwiseProblem()

    def node(name: str, *sources: int) -> int:
        memory = torch.randint(0, 10**9, (num_strategies,), generator=generator)
        index = problem.add_node(torch.rand(num_strategies, generator=generator, dtype=torch.float64), memory)
        for source in sources:
            shape = (num_strategies, num_strategies)
            problem.add_edge(source, index, torch.rand(shape, generator=generator, dtype=torch.float64))
        return index

    stream = node("embed")
    for layer in range(num_layers):
        norm = node(f"{layer}.norm1", stream)
        attention = node(f"{layer}.sdpa", *(node(f"{layer}.{name}", norm) for name in "qkv"))
        stream = node(f"{layer}.add1", node(f"{layer}.o", attention), stream)
        norm = node(f"{layer}.norm2", stream)
        product = node(f"{layer}.mul", node(f"{layer}.gate", norm), node(f"{layer}.up", norm))
        stream = node(f"{layer}.add2", node(f"{layer}.down", product), stream)
    return problem


def exact_rows(peer_seconds: float) -> list[Row]:
    rows = []
    for axes, num_strategies, target in (("2-D", 16, 1), ("3-D", 64, 5)):
        problem = untied_layers(126, num_strategies)
        solution, seconds = timed(lambda problem=problem: Eliminator(problem).best)  # type: ignore[misc]  # bound per loop
        if num_strategies == 16:
            start = time.perf_counter()
            peer = solve_highs(problem, time_limit=peer_seconds)
            off = "no answer" if not peer.assignment else f"{peer.objective / solution.objective - 1:.1%} off"
            took = time.perf_counter() - start
            comparison = f"HiGHS: {off} after {took:.0f} s (limit {peer_seconds:.0f} s, building included)"
        else:
            variables = sum(matrix.numel() for matrix in problem.matrices.values())
            comparison = f"HiGHS not run: {variables / 1e6:.0f} million variables"
        rows.append(
            {
                "what": f"exact plan, 126 untied layers ({len(problem.costs):,} operations), {axes} mesh, "
                f"{num_strategies} strategies each",
                "target": f"<= {target} s",
                "measured": seconds,
                "peer": comparison,
            }
        )
    return rows


def brute_force_row(num_graphs: int = 1200) -> Row:
    equal = 0
    for seed in range(num_graphs):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        problem = PairwiseProblem()
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 7))]
        everything = torch.zeros(sizes, dtype=torch.float64)  # the cost of each assignment; sums of 2^-10 are exact
        for size in sizes:
            costs = torch.randint(0, 50, (size,), generator=generator).double() * 2.0**-10
            at = problem.add_node(costs)
            everything += costs.view([size if dim == at else 1 for dim in range(len(sizes))])
        for i, j in itertools.combinations(range(len(sizes)), 2):
            if rng.random() < 0.6:
                costs = torch.randint(0, 50, (sizes[i], sizes[j]), generator=generator).double() * 2.0**-10
                problem.add_edge(i, j, costs)
                everything += costs.view([sizes[dim] if dim in (i, j) else 1 for dim in range(len(sizes))])
        equal += Eliminator(problem).best.objective == everything.min().item()
    return {
        "what": "random graphs with up to 7 operations, objective bit for bit",
        "target": ">= 1,000, all equal",
        "measured": f"{equal:,} of {num_graphs:,} equal",
        "peer": "brute force over all assignments",
    }


def capped_rows(peer_seconds: float) -> list[Row]:
    problem = untied_layers(126, 16)
    most = problem.memory_of(Eliminator(problem).best.assignment)
    least = int(Eliminator(problem).fewest.objective)
    rows = []
    for share in (0.5, 0.05):
        limit = least + int((most - least) * share)
        start = time.perf_counter()
        solution = Eliminator(problem).within(limit)
        seconds = time.perf_counter() - start
        peer = solve_highs(problem, limit, time_limit=peer_seconds)
        off = "no answer" if not peer.assignment else f"{peer.objective / solution.objective - 1:+.1%} to ours"
        rows.append(
            {
                "what": f"the same under a memory cap, {share:.0%} of the way from the least to the free memory",
                "target": "0.07-1.5 % above the best, with a certified bound",
                "measured": f"gap {solution.gap:.2%} in {seconds:.2f} s",
                "peer": f"HiGHS: {off} after its limit of {peer_seconds:.0f} s",
            }
        )
    return rows


def llama(hidden: int, inner: int, num_layers: int, num_heads: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def model_rows() -> list[Row]:
    sizes = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}
    models = {name: llama(*size) for name, size in sizes.items()}
    planner = MegatronPlanner({"dp": 128, "tp": 8})
    plan, seconds = timed(lambda: planner.build_plan(models["405B"]))
    share = planner.analyse(models["405B"]).sharded_share
    rows = [
        {
            "what": "MegatronPlanner on Llama-3-405B (meta device)",
            "target": "-",
            "measured": f"{seconds}, {len(plan.plan)} rules, {share:.1%} of the matmul bytes sharded",
            "peer": "rules written by hand",
        }
    ]
    cases: list[tuple[str, dict[str, int], Workload, dict[str, str]]] = [
        ("8B", {"dp": 8, "tp": 8}, Workload(64, 8192), {"dp": "data", "tp": "megatron"}),
        ("70B", {"dp": 8, "tp": 8}, Workload(64, 8192), {"dp": "fsdp", "tp": "megatron+sequence"}),
    ]
    for name, mesh, workload, recipe in cases:
        optimal = OptimalPlanner(mesh=mesh, workload=workload)
        best, seconds = timed(lambda optimal=optimal, name=name: optimal.build_plan(models[name]), 1)  # type: ignore[misc]  # bound per loop
        by_hand = price(optimal, models[name], recipe)
        assert best.certificate is not None
        rows.append(
            {
                "what": f"OptimalPlanner on Llama-3-{name}, 64 H100, {mesh}, "
                f"{workload.batch} x {workload.sequence} tokens",
                "target": "no slower than by hand, same cost model",
                "measured": f"{best.certificate.objective:.3f} s a step (gap {best.certificate.gap:.2%}), "
                f"planned in {seconds}",
                "peer": f"{recipe['tp']} by hand: {by_hand.seconds:.3f} s, {by_hand.memory_bytes / 1e9:.0f} GB a rank",
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer-seconds", type=float, default=20.0, help="time that HiGHS gets for each problem")
    arguments = parser.parse_args()
    limit = arguments.peer_seconds
    rows: list[Row] = []
    for part in (lambda: exact_rows(limit), lambda: [brute_force_row()], lambda: capped_rows(limit), model_rows):
        part_rows = part()
        for row in part_rows:
            print(" | ".join(row.values()), flush=True)
        rows += part_rows
    result: dict[str, Any] = {
        "title": "Planners",
        "command": "python packages/shard-spec/benchmarks/bench_planners.py",
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
