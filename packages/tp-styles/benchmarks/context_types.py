"""Context parallelism of all causal types of transformers on ranks of its own, written as a page.

    python packages/tp-styles/benchmarks/context_types.py PAGE [--kept FILE]

Each type is built small, in float64, and trains two steps on 2 ranks beside one process, by both ways. Half an hour;
`--kept` keeps outcomes, and a run that was cut off goes on after them.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ranks import TESTS, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, TESTS)

KINDS = ("ulysses", "gather")
EXACT = 1e-5
"""Softmax and norms of most types compute in float32, whatever the type of their weights; a step amplifies that."""


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def outcome(name: str, mesh: DeviceMesh, kind: str) -> str:
    """Return `"right"`, `"refused: code: reason"`, `"wrong: ..."`, `"failed: ..."` or `"no model: ..."`."""
    import hf_models
    import tp_styles as tp

    try:
        model = hf_models.small(name)
        alone = copy.deepcopy(model)
        words = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids = torch.randint(1, min(127, words), (2, 12), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            loss_of(alone, ids)
    except Exception as error:
        return f"no model: {type(error).__name__}"
    try:
        handle = tp.apply_plan(model, mesh, tp.ContextParallel(kind))  # type: ignore[arg-type]
        for _ in range(2):
            for one in (model, alone):
                one.zero_grad()
                loss_of(one, ids).backward()
            worst = _difference(model, alone)
            if worst > EXACT:
                return f"wrong: {worst:.1g}"
            with torch.no_grad():
                for one in (model, alone):
                    for parameter in one.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=0.05)
    except tp.PlanError as error:
        first = error.problems[0]
        return f"refused: {first.code}: {first.found.split(' -> ')[0][:90]}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    unchecked = [line for line in handle.report().splitlines() if line.startswith("check of") and "unchecked:" in line]
    return "right" if not unchecked else f"right; {unchecked[0].split(': ', 1)[1][:90]}"


def _difference(model: nn.Module, alone: nn.Module) -> float:
    """Return the largest difference of gradients, relative to the largest element of all."""
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    both = [(p.grad, q.grad) for p, q in pairs if p.grad is not None or q.grad is not None]
    if any(a is None or b is None for a, b in both):
        return float("inf")
    size = max(float(b.abs().max()) for _, b in both if b is not None)
    return max(float((a - b).abs().max()) for a, b in both if a is not None and b is not None) / size


def outcomes(mesh: DeviceMesh, names: list[str], kept: str | None) -> dict[str, dict[str, str]]:
    """Return each type's outcome by way; the worse one of the ranks."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        found[name] = {}
        for kind in KINDS:
            everyone: list[Any] = [None] * mesh.size()
            torch.distributed.all_gather_object(everyone, outcome(name, mesh, kind))
            found[name][kind] = next((one for one in everyone if not one.startswith("right")), everyone[0])
        if mesh.get_local_rank() == 0 and kept is not None:
            with Path(kept).open("a") as file:
                file.write(json.dumps([name, found[name]]) + "\n")
    return found


def page(found: dict[str, dict[str, str]]) -> str:
    """Return the page."""
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    built = {name: row for name, row in found.items() if not row["ulysses"].startswith("no model")}
    counts = {kind: Counter(row[kind].partition(":")[0].partition(";")[0] for row in built.values()) for kind in KINDS}
    lines = [
        "# tp-styles: context parallelism of all causal types of transformers",
        "",
        f"{versions}; {date.today()}. Repeat: `python packages/tp-styles/benchmarks/context_types.py"
        " docs/benchmarks/tp-styles-context.md`.",
        "",
        f"Of {len(found)} types {len(built)} build and run small. Each trains two steps in float64 on 2 ranks, with 12"
        f" tokens, beside one process: all gradients within {EXACT:g} of the largest element, since softmax and norms"
        " of most types compute in float32. *right* is equal, and checked at the first call; a refusal names its object"
        " and the way on.",
        "",
    ]
    for kind in KINDS:
        count = counts[kind]
        lines.append(
            f"- `{kind}`: {count['right']} right, {count['refused']} refused, {count['failed']} failed,"
            f" {count['wrong']} wrong."
        )
    lines += ["", "| model type | ulysses | gather |", "|---|---|---|"]
    for name, row in built.items():
        cells = [row[kind].replace("|", "/") for kind in KINDS]
        lines.append(f"| {name} | {cells[0]} | {cells[1] if cells[1] != cells[0] else 'the same'} |")
    lines += ["", f"Not built so small: {', '.join(sorted(found.keys() - built.keys()))}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    import hf_models

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--kept", type=Path)
    options = parser.parse_args()
    before = options.kept.read_text().splitlines() if options.kept and options.kept.exists() else []
    found = dict(json.loads(line) for line in before)
    names = [name for name in hf_models.causal_types() if name not in found]
    if names:
        found |= on_ranks(outcomes, 2, names, str(options.kept) if options.kept else None)
    options.page.write_text(page({name: found[name] for name in hf_models.causal_types()}))


if __name__ == "__main__":
    main()
