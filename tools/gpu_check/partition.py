"""A train step of dp-partition, and its graph through inductor and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpu_check.common import Result, Settings, claim, one_rank, timed

if TYPE_CHECKING:
    import torch


def data_parallel_step(settings: Settings, style: str, backend: Any = "eager") -> tuple[Any, tuple[Any, ...]]:
    """A train step made data-parallel, and its arguments."""
    import dp_partition
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    width, layers, rows = (32, 2, 8) if settings.dry else (2048, 8, 4096)
    torch.manual_seed(0)  # the same weights and rows for every backend
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(settings.device)
    optimizer: torch.optim.Optimizer
    if settings.dry:  # on the CPU, AdamW's step count is a number in the graph, and every step compiles anew
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=True)
    x = torch.randn(rows, width, device=settings.device)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    mesh = init_device_mesh(torch.device(settings.device).type, (1,), mesh_dim_names=("dp",))
    kind = dp_partition.DataParallelStyle[style.upper()]
    return dp_partition.compile(train, mesh=mesh, style=kind, backend=backend), (model, optimizer, x)


def graph_inputs(step: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """What the graph of a step that has run takes for its next call."""
    from dp_partition.capture.arguments import read_arguments
    from dp_partition.runtime.io import bind_inputs, reconcile

    runner = step._runner  # the graph's inputs are nobody's business but a CUDA graph's
    binding = runner.bound()
    return bind_inputs(binding, runner.latest, read_arguments(step.name, arguments, {}).leaves, reconcile(binding))


def lowering(settings: Settings) -> Result:
    """dp-partition's graph as it is, through inductor, and as a CUDA graph: equal results, and the times."""
    rows: list[Result] = []
    claims: list[Result] = []
    for style in ("replicate", "fully_shard"):
        try:
            with one_rank(settings):
                row, held = lower_style(settings, style)
        except Exception as problem:
            row = {"style": style, "error": f"{type(problem).__name__}: {problem}"[:2000]}
            held = [claim(style, 0.0, "runs", False)]
        rows.append(row)
        claims += held
    return {"rows": rows, "claims": claims}


def lower_style(settings: Settings, style: str) -> tuple[Result, list[Result]]:
    """The same for one style: five steps and the parameters after them, then the graph of one step."""

    def trained(backend: str) -> tuple[Any, tuple[Any, ...], list[torch.Tensor]]:
        step, arguments = data_parallel_step(settings, style, backend)
        values = [step(*arguments).clone() for _ in range(5)]
        with step.unsharded():
            values += [parameter.detach().clone() for parameter in arguments[0].parameters()]
        return step, arguments, values

    step, arguments, expected = trained("eager")
    row: Result = {"style": style, "compared": len(expected)}
    row["eager_ms"] = round(1e3 * timed(lambda: step(*arguments), settings), 3)
    claims = []

    def lowered(name: str, run: Callable[[], tuple[float, float]]) -> None:
        try:
            error, seconds = run()
            row[f"{name}_ms"] = round(1e3 * seconds, 3)
            claims.append(claim(f"{style}, {name}: largest difference", error, "<= 1e-4", error <= 1e-4))
        except Exception as problem:
            row[f"{name}_error"] = f"{type(problem).__name__}: {problem}"[:2000]
            claims.append(claim(f"{style}, {name}", 0.0, "runs", False))

    def inductor() -> tuple[float, float]:
        compiled, given, found = trained("inductor")
        return largest_difference(found, expected), timed(lambda: compiled(*given), settings)

    def cuda_graph() -> tuple[float, float]:
        inputs = graph_inputs(step, arguments)
        replay = captured(step.graph, fresh(inputs))
        values = fresh(inputs)
        return largest_difference(results(replay, inputs), results(step.graph, inputs)), timed(
            lambda: replay(*values), settings
        )

    lowered("inductor", inductor)
    if not settings.dry:
        lowered("cuda_graph", cuda_graph)
    return row, claims


def fresh(values: list[Any]) -> list[Any]:
    """Copies of the tensors among values."""
    import torch

    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def results(function: Callable[..., Any], inputs: list[Any]) -> list[torch.Tensor]:
    """What a function returns for copies of its inputs, and what it leaves in them."""
    import torch

    values = fresh(inputs)
    with torch.no_grad():
        returned = function(*values)
    return [value.clone() for value in [*flat_tensors(returned), *flat_tensors(values)]]


def captured(module: Callable[..., Any], values: list[Any]) -> Callable[..., Any]:
    """A CUDA graph of a function, replayed on copies of its arguments, which get its in-place changes back."""
    import torch

    static = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            module(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        results = module(*static)

    def replay(*arguments: Any) -> Any:
        for own, given in zip(static, arguments, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        graph.replay()
        for own, given in zip(static, arguments, strict=True):
            if isinstance(own, torch.Tensor):
                given.copy_(own)
        return results

    return replay


def flat_tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    import torch

    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in flat_tensors(value)]
    return []


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest absolute difference of two lists of tensors, which must not be empty."""
    pairs = list(zip(found, expected, strict=True))
    if not pairs:
        raise ValueError("nothing to compare")
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
