"""transformers' own tensor and expert parallelism beside one process, by `tp_styles.compare`.

    python packages/tp-styles/benchmarks/host_models.py docs/benchmarks/tp-styles-hosts.md

Small random models of 40 families are saved, loaded by `from_pretrained` with the `DistributedConfig` of transformers
on two ranks, and compared with the same folder on one process: loss, logits, every gradient and their norm. Nothing
of this package shards them. Three minutes.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import TESTS, on_ranks
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, TESTS)


def load(folder: str, **options: Any) -> Any:
    """Load a folder in float32; torch's grouped product of experts takes no float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **options
    )


def save(name: str, folder: str) -> None:
    """Save a small model of a family with weights that no constant hides."""
    import hf_models
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**hf_models.SMALL, **hf_models.FAMILIES[name], "use_cache": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)


def outcome(name: str, way: str, folder: str) -> str:
    """Return `right: counts`, `differs: what and where`, or `raises: the host's error` for one family."""
    import tp_styles
    from transformers.distributed import DistributedConfig

    ids = torch.arange(1, 25).view(2, 12)
    config = DistributedConfig(tp_size=2, ep_size=2) if way == "experts" else DistributedConfig(tp_size=2)
    try:
        model = load(folder, distributed_config=config).eval()
        compared = tp_styles.compare(model, lambda: load(folder).eval(), {"input_ids": ids, "labels": ids}).compared
    except tp_styles.PlanError as error:
        return f"differs: {str(error).splitlines()[1]}"
    except Exception as error:
        return f"raises: {type(error).__name__}: {str(error).splitlines()[0]}"
    return f"right: {compared.tensors} outputs, {compared.gradients} gradients"


def outcomes(mesh: DeviceMesh, names: list[str]) -> dict[str, dict[str, str]]:
    """Outcome of each family and way, the same on both ranks or the worse of them."""
    import hf_models

    results: dict[str, dict[str, str]] = {}
    for name in names:
        holder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(holder)
        if dist.get_rank() == 0:
            save(name, holder[0])
        dist.barrier()
        ways = ("layers", "experts") if "num_experts" in hf_models.FAMILIES[name] else ("layers",)
        results[name] = {}
        for way in ways:
            words: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(words, outcome(name, way, holder[0]))
            results[name][way] = max(words, key=lambda word: not word.startswith("right"))
        if dist.get_rank() == 0:
            print(name, results[name], flush=True)
    return results


def page(results: dict[str, dict[str, str]]) -> str:
    """Return the page: a summary, and what is not right with its first difference."""
    words = Counter(word.partition(":")[0] for ways in results.values() for word in ways.values())
    rows = [
        f"| {name} | {way} | {text.replace('|', '/')[:400]} |"
        for name, ways in results.items()
        for way, text in ways.items()
    ]
    version = importlib.metadata.version("transformers")
    summary = ", ".join(f"{words[word]} {word}" for word in ("right", "differs", "raises"))
    text = f"""# tp-styles: transformers' own parallelism by `compare`

torch {torch.__version__}, transformers {version}; {date.today().isoformat()}. Repeat:
`python packages/tp-styles/benchmarks/host_models.py docs/benchmarks/tp-styles-hosts.md`.

transformers alone shards small models of {len(results)} families (`DistributedConfig(tp_size=2)`, for mixtures also
`ep_size=2`), on two ranks with gloo. Compared with one process in float32: {summary}. *Differs* names the first
difference, *raises* the host's own error.

| family | what is sharded | outcome |
|---|---|---|
"""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "FOLDER", text + "\n".join(rows) + "\n")


def main(argv: list[str]) -> None:
    """Run all families, or those named behind the page, and write the page."""
    import hf_models

    names = argv[2:] or list(hf_models.FAMILIES)
    written = Path(argv[1])
    # What a person wrote below the table, on what is wrong in the host, stays.
    below = written.read_text().partition("\n## ")[1:] if written.exists() else ()
    written.write_text(page(on_ranks(outcomes, 2, names)) + "".join(below))


if __name__ == "__main__":
    main(sys.argv)
