"""The whole grids that the tests sample, written as pages.

    python packages/tp-styles/benchmarks/grids.py attention docs/benchmarks/tp-styles-mha.md
    python packages/tp-styles/benchmarks/grids.py families docs/benchmarks/tp-styles-families.md [tp sizes ...]
    python packages/tp-styles/benchmarks/grids.py types PAGE 2
    python packages/tp-styles/benchmarks/grids.py experts docs/benchmarks/tp-styles-experts.md 2

Minutes each; `--kept FILE` keeps what families gave, and a run that was cut off goes on after them. Every cell runs on
ranks of its own (gloo, CPU) against the module alone, in float64.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
from ranks import TESTS, on_ranks
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, TESTS)

# ---------------------------------------------------------------------------------------------- attention


def attention(mesh: DeviceMesh) -> dict[str, Any]:
    """Outcome of all 288 cells of `nn.MultiheadAttention`."""
    import mha_grid

    outcomes: Counter[str] = Counter()
    numbers = 0
    for cell in mha_grid.cells():
        kind = f"{cell.inputs}, {cell.mask}"
        try:
            numbers += mha_grid.check(cell, mesh)
            outcomes[f"{kind}|right"] += 1
        except AssertionError:
            outcomes[f"{kind}|wrong"] += 1
    return {"outcomes": outcomes, "numbers": numbers}


def attention_page(sizes: list[int], kept: Path | None) -> str:
    """The page of the attention grid, which is run whole."""
    results = {size: on_ranks(attention, size) for size in sizes}
    kinds = sorted({key.split("|")[0] for result in results.values() for key in result["outcomes"]})
    lines = [
        "288 cells: `batch_first` x self, cross, or own sizes of keys and values x four masks x key padding x weights"
        " (none, mean, of each head) x bias. 4 heads; output, attention weights,"
        " gradients of all inputs and parameters within 1e-10 of the module alone. Torch's styles: 0 cells.",
        "",
        "| inputs, mask | " + " | ".join(f"tp {size}: right of all" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for kind in kinds:
        cells = []
        for result in results.values():
            right, wrong = (result["outcomes"].get(f"{kind}|{word}", 0) for word in ("right", "wrong"))
            cells.append(f"{right} of {right + wrong}")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    total = ", ".join(f"{result['numbers']} at tp {size}" for size, result in results.items())
    lines += ["", f"Numbers compared: {total}."]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- families


WHY = (
    "Below 95 %: the own plans of hunyuan_v1_dense (its head alone), qwen2_moe (no shared expert), granitemoe "
    "(no attention) and glm4_moe_lite leave blocks replicated, which `auto_plan` shards; stablelm has no plan, "
    "which is a "
    "`PlanError`. At tp 4 the 2 key-value heads are held by two ranks each, and their gradients summed."
)
"""What was found when a family was below; rows that say otherwise come first."""


def families(mesh: DeviceMesh, names: list[str], kept: str | None) -> dict[str, Any]:
    """Outcome for each family: shares divided by the model's own plan and by `auto_plan`, or what went wrong.

    Args:
        mesh: 1-D mesh.
        names: Model types.
        kept: File to which rank 0 adds each family's outcome, or None.
    """
    import hf_models

    outcomes: dict[str, Any] = {}
    for family in names:
        outcomes[family] = {}
        for way in ("auto_plan", "module"):
            try:
                outcomes[family][way] = hf_models.check_by(family, mesh, way)
            except Exception as error:  # a family that fails is a row that says so
                outcomes[family][way] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if mesh.get_local_rank() == 0:
            print(f"tp {mesh.size()}: {family}: {outcomes[family]}", flush=True)
            if kept is not None:
                with Path(kept).open("a") as file:
                    file.write(json.dumps([mesh.size(), family, outcomes[family]]) + "\n")
    return outcomes


def families_found(size: int, names: list[str], kept: Path | None) -> dict[str, Any]:
    """Outcomes of all families at one tp size: those that are kept already, and the others, which run now."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    outcomes = {family: outcome for at, family, outcome in map(json.loads, lines) if at == size}
    missing = [name for name in names if name not in outcomes]
    if missing:
        outcomes |= on_ranks(families, size, missing, None if kept is None else str(kept.absolute()))
    return outcomes


def families_page(sizes: list[int], kept: Path | None) -> str:
    """The page of the families of transformers."""
    import hf_models

    names = list(hf_models.FAMILIES)
    outcomes = {size: families_found(size, names, kept) for size in sizes}
    columns = [(size, way) for size in sizes for way in ("module", "auto_plan")]
    full = [n for n in names if all(_enough(outcomes[size][n]["auto_plan"]) for size in sizes)]
    experts = [n for n in full if "num_experts" in hf_models.FAMILIES[n]]
    latent = [n for n in full if "kv_lora_rank" in hf_models.FAMILIES[n]]
    lines = [
        "Tiny random models (2 layers, width 32, 4 query heads, 2 key-value heads): logits within 1e-9 and all"
        " gradients within 1e-7 of the model alone (routers and some norms compute in float32), the same 5 tokens"
        " from `generate()`, and all parameters within 1e-6 after 5 steps of SGD. The number is the"
        " share of matmul-weight bytes that is sharded.",
        "",
        f"By `auto_plan`, {len(full)} families are equal with at least 95 % sharded, {len(experts)} of them mixtures of"
        f" experts ({', '.join(experts)}), {len(latent)} with latent attention ({', '.join(latent)}).",
        "",
        WHY,
        "",
        "| model type | "
        + " | ".join(f"tp {size}, {'its own plan' if way == 'module' else '`auto_plan`'}" for size, way in columns)
        + " | left replicated by `auto_plan` |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for name in names:
        cells = [_cell(outcomes[size][name][way]) for size, way in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_left(outcomes[sizes[0]][name]['auto_plan'])} |")
    return "\n".join(lines)


def _enough(result: Any) -> bool:
    return isinstance(result, dict) and result["share"] >= 0.95


def _cell(result: Any) -> str:
    return f"{result['share']:.1%}" if isinstance(result, dict) else str(result).replace("|", "/")


def _left(result: Any) -> str:
    return ", ".join(f"`{name}`" for name in result["left"]) if isinstance(result, dict) else ""


# ---------------------------------------------------------------------------------------------- all types


def types(mesh: DeviceMesh, names: list[str], kept: str | None) -> dict[str, Any]:
    """Share and outcome of each causal type of transformers by `auto_plan`; arguments as of `families`."""
    import hf_models

    outcomes: dict[str, Any] = {}
    for name in names:
        outcomes[name] = hf_models.check_type(name, mesh)
        if mesh.get_local_rank() == 0:
            print(f"{name}: {outcomes[name]}", flush=True)
            if kept is not None:
                with Path(kept).open("a") as file:
                    file.write(json.dumps([name, outcomes[name]]) + "\n")
    return outcomes


def types_page(sizes: list[int], kept: Path | None, count: int | None = None) -> str:
    """The table of all causal types; with a count only so many more are run, for a later call to go on."""
    import hf_models

    names = hf_models.causal_types()
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    outcomes: dict[str, Any] = dict(map(json.loads, lines))
    missing = [name for name in names if name not in outcomes][:count]
    if missing:
        outcomes |= on_ranks(types, sizes[0], missing, None if kept is None else str(kept.absolute()))
    built = {name: row for name, row in outcomes.items() if not row["outcome"].startswith("no model")}
    words = Counter(row["outcome"].partition(":")[0] for row in built.values())
    enough = sum((row["share"] or 0) >= 0.7 for row in built.values())
    text = ", ".join(f"{words[word]} {word}" for word in ("right", "refused", "failed", "wrong"))
    rows = [
        f"Of {len(names)} types {len(built)} build and run small, on {sizes[0]} ranks: {text}. At least 70 % of the"
        f" parameters are sharded in {enough}, {enough / max(1, len(built)):.0%}.",
        "",
        "| model type | parameters sharded | outcome |",
        "|---|---|---|",
    ]
    for name in sorted(built):
        share = built[name]["share"]
        rows.append(f"| {name} | {'' if share is None else f'{share:.1%}'} | {_cell(built[name]['outcome'])} |")
    return "\n".join(rows)


# ---------------------------------------------------------------------------------------------- experts


def experts(mesh: DeviceMesh, names: list[str], kept: str | None) -> dict[str, Any]:
    """Outcome of each causal type, or class of experts alone ("folder class"); other arguments as of `families`."""
    import expert_models

    outcomes: dict[str, Any] = {}
    for name in names:
        folder, _, kind = name.partition(" ")
        if kind:
            both = {way: expert_models.check_expert_class(folder, kind, mesh, way) for way in ("replicated", "sharded")}
        outcomes[name] = both if kind else expert_models.check_expert_type(name, mesh)
        if mesh.get_local_rank() == 0:
            print(f"{name}: {outcomes[name]}", flush=True)
            if kept is not None:
                with Path(kept).open("a") as file:
                    file.write(json.dumps([name, outcomes[name]]) + "\n")
    return outcomes


def experts_page(sizes: list[int], kept: Path | None) -> str:
    """Two tables: whole models of every type with experts, and every class of experts alone."""
    import expert_models

    names = expert_models.expert_types()
    kinds = [" ".join(pair) for pair in expert_models.expert_classes()]
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    outcomes: dict[str, Any] = dict(map(json.loads, lines))
    missing = [name for name in (*names, *kinds) if name not in outcomes]
    if missing:
        outcomes |= on_ranks(experts, sizes[0], missing, None if kept is None else str(kept.absolute()))
    models, classes = {name: outcomes[name] for name in names}, {name: outcomes[name] for name in kinds}
    built = {name: row for name, row in models.items() if row["experts"] is not None}
    texts = [
        ", ".join(f"{words[word]} {word}" for word in ("right", "refused", "failed", "wrong"))
        for words in (
            Counter(row["outcome"].partition(":")[0] for row in built.values()),
            Counter(word.partition(":")[0] for row in classes.values() for word in row.values()),
        )
    ]
    rows = [
        f"`ExpertParallel` on {sizes[0]} ranks beside one process, in float64. Of {len(names)} causal types with"
        f" classes of experts {len(built)} build small and have experts then; two steps of SGD with experts spread:"
        f" {texts[0]}. The {len(classes)} classes of experts of transformers alone, output and all gradients, with"
        f" tokens replicated and sharded: {texts[1]}; the others are made by no configuration of their"
        " folder so small.",
        "",
        "| model type | parameters in spread experts | outcome |",
        "|---|---|---|",
        *(f"| {name} | {row['experts']:.1%} | {_cell(row['outcome'])} |" for name, row in sorted(built.items())),
        "",
        "| class | tokens replicated | tokens sharded |",
        "|---|---|---|",
        *(
            f"| {name} | {_cell(row['replicated'])} | {_cell(row['sharded'])} |"
            for name, row in sorted(classes.items())
        ),
    ]
    return "\n".join(rows)


PAGES = {
    "experts": ("all mixtures of experts of transformers", experts_page),
    "types": ("all causal types of transformers", types_page),
    "attention": ("nn.MultiheadAttention", attention_page),
    "families": ("families of transformers", families_page),
}


def main(argv: list[str] | None = None) -> int:
    """Run one grid and write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=PAGES)
    parser.add_argument("page", type=Path)
    parser.add_argument("sizes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--kept", type=Path, help="file with outcomes of families, which are not run again")
    options = parser.parse_args(argv)
    title, make = PAGES[options.grid]
    body = make(options.sizes, options.kept)
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    repeat = f"python packages/tp-styles/benchmarks/grids.py {options.grid} {options.page}"
    if options.sizes != [2, 4]:
        repeat += " " + " ".join(map(str, options.sizes))
    options.page.write_text(
        f"# tp-styles: {title}\n\n{versions}; {date.today().isoformat()}. Repeat: `{repeat}`.\n\n{body}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
