"""DDP's options and ways of training, by models, and the page of their results.

    python packages/tp-ddp-bridge/benchmarks/matrix.py [--only TEXT]

Every cell trains five steps on 2 x 2 ranks and compares every tensor of the state dict with one process that saw the
whole batch. The page docs/benchmarks/tp-ddp-bridge-matrix.md is written when all cells were run. Exit status 1 when a
cell is wrong. Needs transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import tempfile
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import bridge_cells  # noqa: E402 - beside the tests, which run a sample of the cells
from bridge_subjects import SUBJECTS  # noqa: E402

PAGE = HERE.parents[3] / "docs" / "benchmarks" / "tp-ddp-bridge-matrix.md"
WORLD = 4


def main() -> int:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cells whose names contain this text; writes no page")
    options = parser.parse_args()
    todo = [cell for cell in bridge_cells.cells() if options.only in " | ".join(cell)]
    results = run_pool(todo)
    if not options.only:
        write_page(results)
    wrong = [f"{' | '.join(cell)}: {result}" for cell, result in results.items() if isinstance(result, str)]
    print("\n".join([f"{len(results)} cells, {len(wrong)} wrong", *wrong]))
    return 1 if wrong or len(results) < len(todo) else 0


def run_pool(todo: list[tuple[str, str]]) -> dict[tuple[str, str], float | str]:
    """Let four ranks work through the cells. Returns the greatest difference of each, or its error."""
    context = multiprocessing.get_context("fork")
    results: dict[tuple[str, str], float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [context.Process(target=_rank, args=(rank, folder, todo, queue)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for cell in todo:
            results[cell] = queue.get(timeout=300)
            print(f"{' | '.join(cell)}: {_short(results[cell])}", flush=True)
            if isinstance(results[cell], str):  # ranks may have parted: what they do next means nothing
                for process in ranks:
                    process.terminate()
                break
        for process in ranks:
            process.join()
    return results


def _rank(rank: int, folder: str, todo: list[tuple[str, str]], queue: Any) -> None:
    from ranktest import Ranks

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", WORLD)  # type: ignore[attr-defined]  # public, though not declared so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    ranks = Ranks(rank, WORLD, torch.device("cpu"), "gloo")
    for situation, subject in todo:
        try:
            result: float | str = bridge_cells.run_cell(ranks, situation, subject).greatest
        except Exception as error:
            queue.put(f"{type(error).__name__} on rank {rank}: {error}"[:400])
            queue.close()
            queue.join_thread()
            raise
        results = ranks.gather(result)
        if rank == 0:
            queue.put(max(results))
    queue.close()
    queue.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def write_page(results: dict[tuple[str, str], float | str]) -> None:
    """All results as one table."""
    subjects = list(SUBJECTS)
    lines = [
        "# tp-ddp-bridge: DDP's options on three models",
        "",
        f"{len(results)} cells, each five steps on 2 x 2 ranks (data x tensor parallel) against one process on "
        "the full batch: every tensor of the state dict is compared. A cell shows the greatest difference. MLP: SGD "
        "with momentum; the others: Adam. Gradient compression and autocast use SGD, since Adam turns the error of a "
        "small gradient into a full step.",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, gloo on CPU, float32; "
        f"{date.today().isoformat()}. Repeat: `python packages/tp-ddp-bridge/benchmarks/matrix.py`.",
        "",
        f"| situation | {' | '.join(subjects)} |",
        f"|---|{'---|' * len(subjects)}",
    ]
    for situation in bridge_cells.SITUATIONS:
        lines.append(f"| {situation} | {' | '.join(_short(results.get((situation, one))) for one in subjects)} |")
    PAGE.write_text("\n".join(lines) + "\n")


def _short(result: float | str | None) -> str:
    if result is None:
        return "-"
    return f"**{result}**" if isinstance(result, str) else "equal bit for bit" if result == 0 else f"{result:.1e}"


if __name__ == "__main__":
    sys.exit(main())
