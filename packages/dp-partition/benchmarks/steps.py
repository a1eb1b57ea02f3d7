"""Train steps as people write them: right or refused through each door, and what stays full.

    python packages/dp-partition/benchmarks/steps.py [--only TEXT] [--again] [--late] [--page]

Each step runs seven calls on two ranks, in float64 unless it asks for another dtype, and is compared with the same step
whose gradients are averaged by hand behind each backward pass, as DDP does; where its loss is a mean over rows, also
with one process on all rows. Every row has two processes of its own. Results are kept in
docs/benchmarks/dp-partition-steps.json as they come; the page beside it is written from them.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dp_partition as dp
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from dp_partition.api import runner_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

from train_steps.row import ROWS, Draw, Script  # noqa: E402

# What a first call imports is imported once, before ranks are forked.
for library in (
    "torch.distributed.fsdp", "torch._dynamo", "torch._functorch.partitioners", "torch.fx.experimental.symbolic_shapes",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "peft",
):  # fmt: skip
    importlib.import_module(library)
for module in sorted((HERE.parent / "train_steps").glob("*.py")):
    importlib.import_module(f"train_steps.{module.stem}")

DOCS = HERE.parents[3] / "docs" / "benchmarks"
KEPT, PAGE = DOCS / "dp-partition-steps.json", DOCS / "dp-partition-steps.md"
# each door with each style
COLUMNS = ("distribute replicate", "distribute fully_shard", "compile replicate", "compile fully_shard")
CALLS, WORLD, LIMIT_S = 7, 2, 150


# ---- one row on one rank --------------------------------------------------------------------------------------------


def measure(name: str, column: str, rank: int) -> dict[str, Any]:
    """Train one row through one door in one style on this rank, and compare."""
    row, (door, style) = ROWS[name], column.split()
    by_hand, metrics, start = train(row.build, lambda script: averaged_by_hand(script), rank)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    _seed(rank)
    script = row.build()
    step = getattr(dp, door)(script.step, mesh=mesh, style=style)
    results: list[Any] = []
    result: dict[str, Any] = {"way": "ran"}
    for call in range(CALLS):
        results.append(plain(step(*script.fixed, *script.batch(Draw(call, rank)))))
    runner = runner_of(step)
    if door == "distribute":
        units = runner.eager.units
        result |= {"full": len(units.full), "why": next(iter(units.full.values()), "")}
        result |= {"params": len(runner.eager.parameters), "unchecked": "; ".join(runner.schedule.unchecked)}
    result["checked"] = runner.schedule.num_checked
    step.release()
    values = watched(script)
    result["error"] = max(distance(values, by_hand), distance(results, metrics))
    result["bitwise"] = result["error"] == 0.0
    result["changed"] = sum(not torch.equal(a, b) for a, b in zip(by_hand, start, strict=True))
    result["compared"] = sum(v.numel() for v in values)
    if row.independent:
        alone, _, _ = train(row.build, None, None)
        result["alone"] = distance(values, alone)
    return result


def train(build: Any, around: Any, rank: int | None) -> tuple[list[torch.Tensor], list[Any], list[torch.Tensor]]:
    """Return values after, metrics of, and values before seven calls; on all ranks' rows where ``rank`` is None."""
    _seed(rank or 0)
    script = build()
    start, metrics = watched(script), []
    with around(script) if around else warnings.catch_warnings():
        for call in range(CALLS):
            if rank is None:
                batches = [script.batch(Draw(call, one)) for one in range(WORLD)]
                batch = pytree.tree_map(joined, *batches)
            else:
                batch = script.batch(Draw(call, rank))
            metrics.append(plain(script.step(*script.fixed, *batch)))
    return watched(script), metrics, start


def joined(*parts: Any) -> Any:
    """Return the ranks' rows as one batch."""
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]


@contextmanager
def averaged_by_hand(script: Script) -> Iterator[None]:
    """Average the gradients of all watched parameters behind each outermost backward pass: the plainest reference."""
    trained = dict.fromkeys(p for w in leaves(script) for p in _parameters(w))
    real, depth = torch.autograd.backward, [0]

    def backward(*args: Any, **kwargs: Any) -> None:
        depth[0] += 1
        try:
            real(*args, **kwargs)
        finally:
            depth[0] -= 1
        if depth[0]:
            return
        for p in trained:
            has = torch.tensor(float(p.grad is not None))
            dist.all_reduce(has)
            if has:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                flat = p.grad.detach()
                flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous() / WORLD
                dist.all_reduce(flat)
                with torch.no_grad():
                    p.grad.copy_(torch.view_as_complex(flat) if p.grad.is_complex() else flat)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = real


def _parameters(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [value] if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad else []


def leaves(script: Script) -> list[Any]:
    """Return modules, tensors and numbers that a script names."""
    called = [w() if callable(w) and not isinstance(w, nn.Module) else w for w in script.watched]
    return pytree.tree_leaves(called)


def watched(script: Script) -> list[torch.Tensor]:
    """Return copies of all watched parameters, buffers, tensors and numbers."""
    values: list[torch.Tensor] = []
    for one in leaves(script):
        if isinstance(one, nn.Module):
            values += [*one.parameters(), *one.buffers()]
        elif isinstance(one, torch.Tensor):
            values.append(one)
        elif isinstance(one, int | float):
            values.append(torch.tensor(float(one)))
    return [copy.deepcopy(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def plain(result: Any) -> list[torch.Tensor]:
    """Return the numbers of a step's result."""
    numbers = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor | int | float)]
    return [torch.as_tensor(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in numbers]


def distance(got: Any, want: Any) -> float:
    """Return the greatest difference, relative to the largest value of a tensor where that is above 1."""
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(got) != len(want):
        return float("inf")
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if torch.equal(a, b) or not a.numel():
            continue
        a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
        error = ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _seed(rank: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)  # a model starts alike on all ranks; draws in the step are then each rank's stream of the same seed


def _rank(rank: int, name: str, column: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            result = measure(name, column, rank)
        except dp.PlanError as error:
            codes = sorted({problem.code for problem in error.problems})
            result = {"way": "refused", "codes": codes, "text": str(error)[:500]}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:500]
            result = {"way": "raised", "text": text, "trace": traceback.format_exc()[-3000:]}
    Path(folder, f"{rank}.tmp").write_text(json.dumps(result))
    Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.json"))
    os._exit(0)


# ---- all rows -------------------------------------------------------------------------------------------------------


def run(name: str, column: str) -> dict[str, Any]:
    """Run one row in two processes of its own; ranks that do not end in time are a row that hangs."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, name, column, folder)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S)
        for process in ranks:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
        files = [Path(folder, f"{rank}.json") for rank in range(WORLD)]
        results = [json.loads(f.read_text()) if f.exists() else {"way": "hung"} for f in files]
    order = ("hung", "raised", "refused", "ran")
    worst = min(results, key=lambda r: order.index(r["way"]))
    if worst["way"] in order[:3]:
        # A refusal by one rank alone still stops the others: the rank's own reason stands in the table.
        return next((r for r in results if r["way"] == "refused" and r["codes"] != ["rank-failed"]), worst)
    assert results[0]["way"] == results[1]["way"], name
    return worst | {
        "error": max(r["error"] for r in results),
        "bitwise": all(r["bitwise"] for r in results),
        "alone": max((r["alone"] for r in results if "alone" in r), default=None),
    }


def verdict(name: str, result: dict[str, Any]) -> str:
    """``right``, ``WRONG``, ``unchanged``, ``refused``, ``raised`` or ``hung``."""
    if result["way"] != "ran":
        return str(result["way"])
    errors = [result["error"], result.get("alone") or 0.0]
    if not result["changed"]:
        return "unchanged"
    return "right" if max(errors) <= ROWS[name].limit else "WRONG"


def main() -> int:
    """Run what is missing, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    parser.add_argument("--most", type=int, default=1000, help="end after as many results; the next run goes on")
    parser.add_argument("--door", default="", help="distribute or compile alone")
    parser.add_argument("--late", action="store_true", help="only rows chosen after the code was done")
    parser.add_argument("--again", action="store_true", help="run rows that have a result, too")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    results = {n: {c: one for c, one in r.items() if c in COLUMNS} for n, r in results.items() if n in ROWS}
    chosen = [n for n, row in ROWS.items() if options.only in n and (row.is_late or not options.late)]
    for name in [] if options.page else chosen:
        for column in COLUMNS:
            wanted = options.door in column
            if options.most <= 0 or not wanted or (not options.again and column in results.get(name, {})):
                continue
            result = results.setdefault(name, {})[column] = run(name, column)
            options.most -= 1
            print(f"{name} | {column}: {verdict(name, result)}, {result}", flush=True)
            text = json.dumps(results, indent=0, sort_keys=True).replace(f"{HERE.parents[3]}{os.sep}", "")
            KEPT.write_text(text + "\n")  # no path of this machine
    write_page(results)
    wrong = [n for n, r in results.items() if any(verdict(n, one) in ("WRONG", "hung") for one in r.values())]
    print("\n".join([f"{len(results)} of {len(ROWS)} rows, {len(wrong)} wrong or hung", *wrong]))
    return 1 if wrong else 0


# ---- the page -------------------------------------------------------------------------------------------------------


def write_page(results: dict[str, Any]) -> None:
    """All results as one table, shares above it."""
    rows = {n: r for n, r in results.items() if all(c in r for c in COLUMNS)}
    counts = {c: Counter(verdict(n, r[c]) for n, r in rows.items()) for c in COLUMNS}
    full = sum(bool(r["distribute fully_shard"].get("full")) for r in rows.values())
    doors = {
        door: sum(all(verdict(n, r[c]) == "right" for c in COLUMNS if door in c) for n, r in rows.items())
        for door in ("distribute", "compile")
    }
    total = max(len(rows), 1)
    late = [n for n in rows if ROWS[n].is_late]
    late_right = sum(all(verdict(n, rows[n][c]) == "right" for c in COLUMNS[:2]) for n in late)
    shares = [
        ("right through `distribute` in both styles", doors["distribute"], "100 %"),
        ("something left full under `fully_shard`", full, "at most 15 %"),
        ("right through `compile` in both styles", doors["compile"], "at least 55 %"),
    ]
    written = [r[c] for r in rows.values() for c in COLUMNS[:2] if r[c]["way"] == "ran"]
    compared = sum((r.get("checked") or 0) > 1 for r in written)
    lines = [
        "# dp-partition: train steps as people write them",
        "",
        f"{len(rows)} steps, each through two doors in two styles. "
        + "; ".join(
            f"`{column}`: " + ", ".join(f"{count} {kind}" for kind, count in counts[column].most_common())
            for column in COLUMNS
        )
        + ".",
        "",
        "| share | steps | of all | target |",
        "|---|---|---|---|",
        *(f"| {label} | {count} | {count / total:.0%} | {target} |" for label, count, target in shares),
        "",
        f"A step runs {CALLS} calls with `dp.distribute` and with `dp.compile` on {WORLD} ranks, in float64 "
        "unless its error limit is above 1e-8. Parameters, buffers, averages, and the numbers that the step returns "
        "are compared on each rank with the same step whose gradients are averaged by hand behind each backward pass, "
        "as DDP does: `=` is equal bit for bit, a number is the greatest difference relative to the largest value of "
        "a tensor. Where the loss is a mean over rows and nothing is drawn, one process on all rows is compared, too. "
        "The steps are our own, with small models, after the pattern that the source names. "
        + (
            f"Rows marked * were written last, after the code and the other rows: {late_right} of {len(late)} right."
            if late
            else ""
        ),
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, gloo on CPU; {date.today().isoformat()}. "
        "Each row is of the run that last reached it, which may be older than the sources. "
        "Repeat: `python packages/dp-partition/benchmarks/steps.py --again`.",
        "",
        f"Of {len(written)} runs of `distribute` {compared} were compared by the library in the first calls with the "
        "step on a full copy; a second run of the others would be seen, or is not possible. `compile` refuses what is "
        "no graph, with the line of the step's code.",
        "",
        f"| step | pattern of | {' | '.join(COLUMNS)} | left full, or why it fails |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in rows.items():
        row = ROWS[name]
        cells = " | ".join(_cell(name, result[c]) for c in COLUMNS)
        lines.append(f"| {name}{' *' * row.is_late} | {row.source} | {cells} | {_note(result)} |")
    PAGE.write_text("\n".join(lines) + "\n")


def _cell(name: str, result: dict[str, Any]) -> str:
    kind = verdict(name, result)
    if kind == "refused":
        return f"refused: {', '.join(f'`{c}`' for c in result['codes'])}"
    if kind in ("raised", "hung"):
        return f"**{kind}**"
    error = "=" if result["bitwise"] else f"{result['error']:.0e}"
    alone = result.get("alone")
    against = f", alone {alone:.0e}" if alone is not None and kind != "right" else ""
    return f"{'' if kind == 'right' else f'**{kind}** '}{error}{against}"


def _note(result: dict[str, Any]) -> str:
    sharded = result["distribute fully_shard"]
    if sharded.get("full"):
        return f"{sharded['full']} of {sharded['params']}: {sharded['why']}"
    text = next((result[c]["text"] for c in COLUMNS if result[c].get("text")), "")
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")[:140].replace("[", "\\[")


if __name__ == "__main__":
    sys.exit(main())
