"""The rows of the target table, side by side with torch's styles and with hand-written collectives.

Run it as a program; it starts its own ranks (gloo, CPU):

    python benchmarks/bench_styles.py --json styles.json [--only overhead,attention,grouped,undo,families]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import tp_styles as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel as torch_tp

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

WIDTH, HIDDEN, TOKENS = 256, 256, 8

# ---------------------------------------------------------------------------------------------- overhead


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class HandWritten(nn.Module):
    """Megatron's MLP on local weights: what nobody can be faster than with the same collectives."""

    def __init__(self, whole: MLP, mesh: DeviceMesh) -> None:
        super().__init__()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(size)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, 1)[rank].clone())
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Copied.apply(x, self.group)  # type: ignore[no-untyped-call]
        x = F.gelu(F.linear(x, self.up, self.up_bias))
        summed: torch.Tensor = _Summed.apply(F.linear(x, self.down), self.group)  # type: ignore[no-untyped-call]
        return summed + self.down_bias


class MLP(nn.Module):
    """The unsharded module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.up(x)))
        return result


def overhead(mesh: DeviceMesh) -> dict[str, Any]:
    """CPU time of one forward, and of one forward and backward, in microseconds; median over interleaved rounds."""
    torch.manual_seed(0)
    whole = MLP()
    ours = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    theirs = {"up": torch_tp.ColwiseParallel(), "down": torch_tp.RowwiseParallel()}
    kinds: dict[str, nn.Module] = {"hand-written": HandWritten(whole, mesh)}
    for mode in ("local", "dtensor"):
        kinds[f"tp-styles, {mode}"] = copy.deepcopy(whole)
        tp.apply_plan(kinds[f"tp-styles, {mode}"], mesh, ours, params=mode)  # type: ignore[arg-type]
    kinds["torch"] = torch_tp.parallelize_module(copy.deepcopy(whole), mesh, theirs)
    x = torch.randn(TOKENS, WIDTH)
    wanted = whole(x)
    for name, module in kinds.items():
        torch.testing.assert_close(module(x), wanted, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    result: dict[str, Any] = {}
    for what in ("forward", "forward and backward"):
        times = _interleaved({name: _step(module, x, what) for name, module in kinds.items()}, mesh)
        base = times["hand-written"]
        result[what] = {name: {"us": round(t * 1e6, 1), "ratio": round(t / base, 3)} for name, t in times.items()}
    return result


def _step(module: nn.Module, x: torch.Tensor, what: str) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            module(x)

    def both() -> None:
        module.zero_grad(set_to_none=True)
        inputs = x.detach().requires_grad_()
        module(inputs).sum().backward()

    return forward if what == "forward" else both


ROUNDS, CALLS = 15, 20


def _interleaved(steps: dict[str, Callable[[], None]], mesh: DeviceMesh) -> dict[str, float]:
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(CALLS):
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier(mesh.get_group())
            start = time.thread_time()
            for _ in range(CALLS):
                step()
            seen[name].append((time.thread_time() - start) / CALLS)
    return {name: statistics.median(values) for name, values in seen.items()}


# ---------------------------------------------------------------------------------------------- grids


def attention(mesh: DeviceMesh) -> dict[str, Any]:
    """All 288 cells of nn.MultiheadAttention, and 64 more with the `add_` options."""
    import mha_grid

    cells = list(mha_grid.cells())
    numbers = sum(mha_grid.check(cell, mesh) for cell in cells)
    more = 0
    for cell, (bias_kv, zero) in itertools.product(
        cells[:: len(cells) // 16][:16], itertools.product((False, True), repeat=2)
    ):
        extra = mha_grid.Cell(**{**vars(cell), "add_bias_kv": bias_kv, "add_zero_attn": zero})
        numbers += mha_grid.check(extra, mesh)
        more += 1
    return {"cells": len(cells), "with add_ options": more, "numbers compared": numbers, "wrong": 0}


def grouped(mesh: DeviceMesh) -> dict[str, Any]:
    """Every number of heads up to 32, every number of key-value heads that divides it."""
    from test_attention import Grouped

    exact = refused = 0
    for heads in range(1, 33):
        for keys in (k for k in range(1, heads + 1) if heads % k == 0):
            torch.manual_seed(0)
            model = Grouped(heads, keys).double()
            alone = copy.deepcopy(model)
            try:
                style = tp.GQAParallel(kv_replicate=True, norms=("q_norm", "k_norm"))
                tp.apply_plan(model, mesh, style, check="never")
            except tp.PlanError:
                refused += 1
                continue
            x = torch.randn(1, 3, 6, dtype=torch.float64)
            torch.testing.assert_close(model(x), alone(x), atol=1e-10, rtol=0)
            exact += 1
    return {"exact": exact, "plan error": refused}


def undo(mesh: DeviceMesh) -> dict[str, Any]:
    """100 random plans, taken back; the test of the same name says what is compared."""
    import random

    import tp_models as models
    from test_apply import fingerprint, random_plan

    rng = random.Random(5)
    model = models.seeded(lambda: models.GPT(tied=True))
    before, state = fingerprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(100):
        handle = tp.apply_plan(model, mesh, random_plan(rng), params=rng.choice(["dtensor", "local"]))
        handle.undo()
        assert fingerprint(model) == before
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return {"plans": 100, "bit-equal": 100}


def families(mesh: DeviceMesh) -> dict[str, Any]:
    """Tiny random models: logits, gradients, generation; the share of matmul-weight bytes that are divided."""
    import hf_models

    found: dict[str, Any] = {}
    for family in hf_models.FAMILIES:
        try:
            found[family] = round(hf_models.check(family, mesh), 3)
        except Exception as error:
            found[family] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    good = [family for family, share in found.items() if isinstance(share, float)]
    enough = [family for family in good if found[family] >= 0.95]
    return {"equal": len(good), "at least 95 % divided": len(enough), "families": found}


ROWS: dict[str, tuple[Callable[[DeviceMesh], dict[str, Any]], tuple[int, ...]]] = {
    "overhead": (overhead, (2,)),
    "attention": (attention, (2, 4)),
    "grouped": (grouped, (2, 4, 8)),
    "undo": (undo, (2,)),
    "families": (families, (2,)),
}


# ---------------------------------------------------------------------------------------------- running


def _rank(rank: int, size: int, names: list[str], folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    results = {name: ROWS[name][0](mesh) for name in names}
    if rank == 0:
        Path(folder, f"{size}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Run the rows and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", help="where to write the results; default: print them")
    parser.add_argument("--only", default=",".join(ROWS), help="rows to run, with commas between")
    options = parser.parse_args(argv)
    wanted = options.only.split(",")
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__},
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 4, 8):
            names = [name for name in wanted if size in ROWS[name][1]]
            if names:
                mp.spawn(_rank, (size, names, folder), nprocs=size)  # type: ignore[no-untyped-call]
                for name, row in json.loads(Path(folder, f"{size}.json").read_text()).items():
                    results["rows"].setdefault(name, {})[f"tp={size}"] = row
    text = json.dumps(results, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
