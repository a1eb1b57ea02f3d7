"""The coverage matrix: what trains, how close to its reference, and what is refused.

    python packages/dp-partition/benchmarks/coverage.py [--only TEXT] [--world 2 3 4] [--again]

Every cell trains a model for five steps and compares with DistributedDataParallel (local semantics) or one device
(global semantics); it asserts what ranks hold and what was sent. One pool of ranks for each world size runs all its
cells. Results are kept in docs/benchmarks/dp-partition-coverage.json as they come, so that a run can be continued, and
the page docs/benchmarks/dp-partition-coverage.md is written from all of them. Exit status 1 when a cell is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import traceback
import warnings
from datetime import date
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import dp_cells  # noqa: E402 - beside the tests, which run a sample of the cells
from dp_cells import OPTIMIZERS, STYLES, Cell  # noqa: E402
from dp_matrix_models import MODELS, UNDER_GLOBAL  # noqa: E402

DOCS = HERE.parents[3] / "docs" / "benchmarks"
KEPT, PAGE = DOCS / "dp-partition-coverage.json", DOCS / "dp-partition-coverage.md"


def main() -> int:
    """Run what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cells whose name contains this text")
    parser.add_argument("--world", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--again", action="store_true", help="run cells that have a result, too")
    options = parser.parse_args()
    results: dict[str, str] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    known = {name(cell) for cell in dp_cells.cells()}
    results = {cell: result for cell, result in results.items() if cell in known}
    for world in options.world:
        todo = [c for c in dp_cells.cells() if c.world == world and options.only in name(c)]
        todo = [c for c in todo if options.again or name(c) not in results]
        if todo:
            run_pool(world, todo, results)
    write_page(results)
    wrong = [f"{cell}: {result}" for cell, result in results.items() if result.startswith("WRONG")]
    print("\n".join([f"{len(results)} of {len(known)} cells, {len(wrong)} wrong", *wrong]))
    return 1 if wrong else 0


def name(cell: Cell) -> str:
    """A cell in one line."""
    return f"{cell.model} | {cell.style} | {cell.optimizer} | {cell.world} ranks"


def run_pool(world: int, todo: list[Cell], results: dict[str, str]) -> None:
    """Let one pool of ranks work through the cells; every result is kept at once."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [context.Process(target=_rank, args=(rank, world, folder, todo, queue)) for rank in range(world)]
        for process in ranks:
            process.start()
        for _ in todo:
            while True:
                try:
                    cell, result = queue.get(timeout=5)
                    break
                except Empty:
                    if not all(process.is_alive() for process in ranks):
                        raise SystemExit("a rank ended before its cells were done") from None
            results[cell] = result
            print(f"{cell}: {result}", flush=True)
            KEPT.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
        for process in ranks:
            process.join()


def _rank(rank: int, world: int, folder: str, todo: list[Cell], queue: Any) -> None:
    from ranktest import Ranks, intercept

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    intercept.install()
    ranks = Ranks(rank, world, torch.device("cpu"), "gloo")
    for cell in todo:
        result = _result(ranks, cell)
        results = ranks.gather(result)
        wrong = next((one for one in results if one.startswith("WRONG")), result)
        if rank == 0:
            queue.put((name(cell), wrong))
    queue.close()
    queue.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def _result(ranks: Any, cell: Cell) -> str:
    try:
        return dp_cells.run_cell(ranks, cell)
    except Exception as error:
        if os.environ.get("COVERAGE_TRACEBACKS"):
            traceback.print_exc()
        return f"WRONG: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


# ---- the page -------------------------------------------------------------------------------------------------------


def write_page(results: dict[str, str]) -> None:
    """All results as tables."""
    kinds = [result.split(":")[0] for result in results.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("bitwise", "close", "refused", "WRONG"))
    two = [result for cell, result in results.items() if cell.endswith("| 2 ranks") and "(global)" not in cell]
    share = sum(result == "bitwise" for result in two) / len(two) if two else 0
    lines = [
        "# dp-partition: training compared with DDP",
        "",
        f"{len(results)} cells: {counts}. At two ranks and local semantics {share:.0%} of {len(two)} are bitwise.",
        "",
        "A cell trains for five steps and compares every loss, parameter and buffer with DistributedDataParallel, or, "
        "where a model is marked global, with one device on all ranks' rows. `=` is equal bit for bit, `~` close, with "
        "the greatest difference relative to the largest value of a tensor, `refused` names the error. Every cell also "
        "asserts the bytes of parameters and state that a rank holds and what the recorder saw it send: gradients "
        "once, by the collective of the style.",
        "",
        "Two ranks under local semantics run in float32; where sums have several orders (more ranks, one device), in "
        "float64. In float32 a gradient that is 0 except for rounding (a key's bias, a bias before a batch norm) is "
        "noise "
        "that an optimizer scales up to a full update, in torch's own wrappers as well.",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, gloo on CPU; "
        f"{date.today().isoformat()}. Repeat: `python packages/dp-partition/benchmarks/coverage.py --again`.",
        "",
        "## Models by styles: AdamW, two ranks",
        "",
        *_table("model", [(m, [Cell(m, s, "AdamW", 2) for s in STYLES]) for m in MODELS], results),
        "",
        "## Models by styles under global semantics: AdamW, two ranks",
        "",
        *_table("model", [(m, [Cell(m, s, "AdamW", 2) for s in STYLES]) for m in UNDER_GLOBAL], results),
        "",
        "## Optimizers by styles: GPT with SDPA, two ranks",
        "",
        *_table("optimizer", [(o, [Cell("GPT, SDPA", s, o, 2) for s in STYLES]) for o in OPTIMIZERS], results),
        "",
        "## Pairs at three and four ranks",
        "",
        "The optimizer and the number of ranks stand below the result; every pair of (model, style), (model, ranks), "
        "(style, ranks), (optimizer, style) and (optimizer, ranks) occurs.",
        "",
        *_pairs(results),
    ]
    PAGE.write_text("\n".join(lines) + "\n")


def _table(what: str, rows: list[tuple[str, list[Cell]]], results: dict[str, str]) -> list[str]:
    lines = [f"| {what} | {' | '.join(STYLES)} |", f"|---|{'---|' * len(STYLES)}"]
    return lines + [f"| {label} | {' | '.join(_short(results.get(name(c))) for c in row)} |" for label, row in rows]


def _pairs(results: dict[str, str]) -> list[str]:
    chosen = {(cell.model, cell.style): cell for cell in dp_cells.pairs()}
    lines = [f"| model | {' | '.join(STYLES)} |", f"|---|{'---|' * len(STYLES)}"]
    for model in MODELS:
        row = [chosen[model, style] for style in STYLES]
        cells = [f"{_short(results.get(name(c)))}<br>{c.optimizer}, {c.world}" for c in row]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines


def _short(result: str | None) -> str:
    if result is None:
        return "not run"
    kind, _, rest = result.partition(": ")
    return {"bitwise": "=", "close": f"~ {rest}", "refused": f"refused: `{rest}`"}.get(kind, f"**{result}**")


if __name__ == "__main__":
    sys.exit(main())
