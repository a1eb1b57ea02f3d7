"""How plans and planners grow with ranks, tensors and layers, beside torch and HiGHS.

    python packages/shard-spec/benchmarks/bench_scaling.py [--json FILE]

Points are medians of `REPEATS` interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_plan import CONFIG, RULES, Llama, interleaved, torch_metadata
from bench_planners import solve_highs, untied_layers
from shard_spec import MeshSpec, ShardingPlan
from shard_spec.optimal.problem import Eliminator

REPEATS = 5
TORCH_SAMPLE = 12  # of the tensors; torch's time is scaled to all
TORCH_RANKS = 1024  # beyond, one of torch's points takes minutes
HIGHS_LAYERS, HIGHS_SECONDS = (1, 2, 4), 20.0
Times = list[float]
Series = dict[str, list[tuple[float, Times]]]  # each x with the seconds of its runs


def llama(layers: int) -> Llama:
    with torch.device("meta"):
        return Llama(**(CONFIG | {"layers": layers}))


def plan_everything(model: Llama, mesh: MeshSpec) -> None:
    plan = ShardingPlan(RULES, mesh=mesh, strict=True)
    assert plan.validate(model) == ()
    assert len(plan.memory(model).totals) == mesh.world_size


def _torch_calls(model: Llama, ranks: int) -> tuple[Any, float]:
    shapes = [tuple(p.shape) for p in model.parameters()]
    sample = shapes[:: max(1, len(shapes) // TORCH_SAMPLE)]
    return torch_metadata(sample, ranks), len(shapes) / len(sample)


def ranks_curve() -> dict[str, Any]:
    """All of Llama-3-405B, 8 to 65,536 ranks."""
    model = llama(CONFIG["layers"])
    series: Series = {"shard-spec: resolve, validate, memory of each rank": [], "shard-spec: boxes of one rank": []}
    series["torch: build_metadata (12 tensors, scaled)"] = []
    everything, one, peer = series
    for ranks in (8, 64, 512, 1024, 4096, 16384, 65536):
        mesh = MeshSpec({"dp": ranks // 8, "tp": 8})
        resolved = ShardingPlan(RULES, mesh=mesh, strict=True).resolve(model)
        shapes = {tensor.name: tensor.shape for tensor in resolved.metadata.tensors}
        calls: dict[str, Any] = {
            everything: lambda mesh=mesh: plan_everything(model, mesh),
            one: lambda resolved=resolved, shapes=shapes: [la.boxes(3, shapes[name]) for name, la in resolved.items()],
        }
        scale = 1.0
        if ranks <= TORCH_RANKS:
            calls[peer], scale = _torch_calls(model, ranks)
        for name, times in interleaved(calls, 3).items():
            series[name].append((ranks, [each * (scale if name == peer else 1.0) for each in times]))
    return _curve(
        "ranks",
        "Llama-3-405B (1,137 tensors): a plan for more ranks",
        "ranks",
        series,
        "A plan looks at rules and axes, not at ranks; torch builds one entry a rank.",
    )


def tensors_curve() -> dict[str, Any]:
    """On 1,024 ranks, 2 to 504 layers."""
    mesh = MeshSpec({"dp": 128, "tp": 8})
    series: Series = {"shard-spec: resolve, validate, memory of each rank": []}
    series["torch: build_metadata (12 tensors, scaled)"] = []
    everything, peer = series
    for layers in (2, 8, 32, 126, 504):
        model = llama(layers)
        call, scale = _torch_calls(model, mesh.world_size)
        times = interleaved({everything: lambda model=model: plan_everything(model, mesh), peer: call}, 3)  # type: ignore[misc]  # bound per loop
        number = len(list(model.parameters()))
        series[everything].append((number, times[everything]))
        series[peer].append((number, [each * scale for each in times[peer]]))
    return _curve(
        "tensors",
        "1,024 ranks: a plan for more tensors",
        "tensors",
        series,
        "Both grow with the tensors; the distance stays.",
    )


def layers_curve() -> dict[str, Any]:
    """The exact planner, beside HiGHS where that finds an optimum."""
    series: Series = {"exact, 16 strategies each": [], "exact, 64 strategies each": [], "HiGHS, 16 strategies each": []}
    exact, wide, peer = series
    for layers in (1, 2, 4, 8, 16, 32, 63, 126, 252):
        problem = untied_layers(layers, 16)
        times = interleaved({exact: lambda problem=problem: Eliminator(problem).best}, REPEATS)  # type: ignore[misc]  # bound per loop
        series[exact].append((layers, times[exact]))
        if layers <= 126:
            large = untied_layers(layers, 64)
            times = interleaved({wide: lambda large=large: Eliminator(large).best}, 3)  # type: ignore[misc]  # as above
            series[wide].append((layers, times[wide]))
        if layers in HIGHS_LAYERS:
            begin = time.perf_counter()
            solution = solve_highs(problem, time_limit=HIGHS_SECONDS)
            if solution.assignment and solution.objective <= Eliminator(problem).best.objective * (1 + 1e-6):
                series[peer].append((layers, [time.perf_counter() - begin]))
    return _curve(
        "layers",
        "Optimal plan of untied layers, 13 operations each",
        "layers",
        series,
        "The exact planner grows with the layers; HiGHS has points where it proved an optimum in time.",
    )


def _curve(name: str, title: str, x: str, series: Series, see: str) -> dict[str, Any]:
    points = {label: each for label, each in series.items() if each}
    return {"name": name, "title": title, "x": x, "y": "time", "series": points, "see": see}


def main() -> int:
    """Print the points, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    curves = []
    for curve in (ranks_curve, tensors_curve, layers_curve):
        curves.append(curve())
        for label, points in curves[-1]["series"].items():
            print(
                f"{curves[-1]['name']}: {label}: {', '.join(f'{x:g} {statistics.median(y):.3g}' for x, y in points)}",
                flush=True,
            )
    command = "python packages/shard-spec/benchmarks/bench_scaling.py"
    if arguments.json:
        document = {"title": "Scaling", "command": command, "rows": [], "curves": curves}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
