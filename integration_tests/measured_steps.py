"""Training steps of 21 causal models are measured beside shard-spec's predictions of them.

`nox -s measured` runs this file on 1, 2 and 4 ranks and writes a page. A row is one step: family, dtype, way of
sharding, with or without checkpointing. The bytes of parameters, gradients and AdamW's state are those of their
storages; the peak comes from torch's profiler, and the collectives are those that pass the process groups.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tp_styles
import transformers
from ranktest import Ranks, intercept
from shard_spec import FullyShardPlanner, MegatronPlanner, MeshSpec, PlanError, ShardingPlan, compose
from torch import nn
from torch.distributed.tensor import DTensor

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "glm4", "olmo", "olmo2", "granite", "cohere"),
    *("stablelm", "starcoder2", "gpt2", "gpt_neox", "falcon", "opt", "mixtral", "olmoe", "qwen3_moe"),
)
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 160),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout"), 0.0),
    "head_dim": 16,
    "moe_intermediate_size": 64,  # torch's grouped products take strides of whole 16 bytes, on 4 ranks too
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "use_cache": False,
}
DTYPES = [getattr(torch, name) for name in os.environ.get("MEASURED_DTYPES", "float32,bfloat16").split(",")]
BATCH = (4, 48)  # rows and tokens of each data-parallel rank
STATE = ("parameters", "gradients", "optimizer")
WAYS: dict[str, dict[str, int]] = {  # way -> mesh
    "one process": {"dp": 1},
    "FSDP2, 2 ranks": {"fsdp": 2},
    "FSDP2, 4 ranks": {"fsdp": 4},
    "tp-styles, 2 ranks": {"tp": 2},
    "tp-styles, 4 ranks": {"tp": 4},
    "both, 2 x 2 ranks": {"fsdp": 2, "tp": 2},
}


def new_model(family: str, dtype: torch.dtype, checkpointing: bool) -> Any:
    """Return a small model in training mode, equal on all ranks."""
    defaults = transformers.AutoConfig.for_model(family)  # a property such as head_dim follows from other options
    properties = {key for key in SMALL if isinstance(getattr(type(defaults), key, None), property)}
    options = {key: value for key, value in SMALL.items() if hasattr(defaults, key) and key not in properties}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **options))
    model = model.to(dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def new_plan(model: nn.Module, axes: dict[str, int]) -> ShardingPlan:
    """Return MegatronPlanner's plan along `tp` composed with FullyShardPlanner's along `fsdp`."""
    mesh = MeshSpec(axes)
    planners: list[Any] = [MegatronPlanner(mesh)] if "tp" in axes else []
    planners += [FullyShardPlanner(mesh, "fsdp")] if "fsdp" in axes else []
    return compose(*planners).build_plan(model) if planners else ShardingPlan({}, mesh=mesh)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on this rank."""
    parameters: list[torch.Tensor] = list(model.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values()]
    kinds: tuple[list[torch.Tensor], ...] = (parameters, gradients, state)
    return {part: sum(local_of(each).nbytes for each in held) for part, held in zip(STATE, kinds, strict=True)}


class Settled:
    """Finishes each collective at once: torch's profiler misses a tensor that a thread of gloo frees."""

    def around(self, call: intercept.Call, execute: intercept.Execute) -> Any:
        """Run the collective, and wait until gloo's thread holds none of its tensors: the last to let go frees them."""
        tensors = [*intercept.tensors_in(list(call.arguments.values()))]
        before = holders(tensors)
        outputs = outputs_of(execute(call.arguments))
        until = time.monotonic() + 30
        while any(now > then for now, then in zip(holders(tensors), before, strict=True)):
            assert time.monotonic() < until, f"a thread of gloo keeps the tensors of {call.op}"
            time.sleep(0.0005)
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([])
        # gloo's own handle would hold the tensors until it is freed
        handle = torch._C._distributed_c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]
        return handle if outputs is None else (outputs, handle)


def holders(tensors: list[Any]) -> list[int]:
    """Return how many references of C++ each tensor has; its Python object counts as one."""
    return [each._use_count() for each in tensors]


def outputs_of(result: Any) -> Any:
    """Wait for a collective, and return its outputs, or None; its handle ends with this function."""
    outputs, work = result if isinstance(result, tuple) else (None, result)
    (work if isinstance(work, dist.Work) else dist.Work.unbox(work)).wait()
    return outputs


def peak_of(step: Callable[[], None], model: nn.Module) -> int:
    """Return the most bytes allocated at one time in `step`, without its gradients: the plan counts them apart."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    events: list[tuple[int, int, int, bool]] = []  # (time, address, bytes allocated or freed, in a collective)
    nodes = [(node, False) for node in profile.profiler.kineto_results.experimental_event_tree()]
    while nodes:
        node, inside = nodes.pop()
        inside |= node.name.startswith("c10d::")
        nodes += [(child, inside) for child in node.children]
        if hasattr(node.extra_fields, "alloc_size"):
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, inside))
    events.sort()
    lasting = {local_of(p.grad).untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    last = {
        at: number for number, (_, at, _, _) in enumerate(events) if at in lasting
    }  # address -> the allocation that became a gradient
    sizes, of_backend = [], set()  # copies that gloo alone makes for a reduction
    for number, (_, at, size, inside) in enumerate(events):
        if size > 0 and inside:
            of_backend.add(at)
        sizes.append(0 if last.get(at) == number or at in of_backend else size)
        if size < 0:
            of_backend.discard(at)
    assert len(sizes) > 50
    return int(torch.tensor(sizes).cumsum(0).max())


def measured(ranks: Ranks, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return bytes of state, peak and collectives of the third step; the first one also runs tp-styles' check."""
    optimizer = torch.optim.AdamW(model.parameters())

    def forward_and_backward() -> None:
        output = model(**batch)  # as in most training loops, the output with its logits lives until the end of the step
        output.loss.backward()

    for _ in range(2):
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()
    settled = Settled()
    intercept.add(settled)
    gc.collect()  # an earlier model that is freed in the measured step would lower its peak
    with ranks.record(allow_empty=True) as log:
        peak = peak_of(forward_and_backward, model)
    intercept.remove(settled)
    optimizer.step()
    collectives: Counter[str] = Counter()
    for event in log.events:
        collectives[f"{event.op} count"] += 1
        collectives[f"{event.op} bytes"] += sum(event.bytes_sent)
    return {**state_bytes(model, optimizer), "peak": peak, "collectives": collectives}


def predicted(plan: ShardingPlan, model: nn.Module, batch: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """Return shard-spec's figures of the step, computed from shapes alone."""
    memory = plan.memory(model, batch, optimizer="adamw").on(rank)
    collectives: Counter[str] = Counter()
    for transfer in plan.communication(model, batch).transfers:
        if transfer.group_size > 1:
            # Bytes as ranktest counts them: an all-reduce sends its buffer once, whatever the algorithm moves.
            share = 1.0 if transfer.op == "all_reduce" else 1 - 1 / transfer.group_size
            collectives[f"{transfer.op} count"] += transfer.count
            collectives[f"{transfer.op} bytes"] += round(transfer.count * transfer.full_bytes * share)
    peak = sum(memory.get(part, 0) for part in ("activations", "gathered", "logits and loss"))
    return {**{part: memory[part] for part in STATE}, "peak": peak, "collectives": collectives}


def step_of(ranks: Ranks, family: str, way: str, dtype: torch.dtype, checkpointing: bool) -> dict[str, Any]:
    """Return the row of one step: what was measured, what was predicted, or the refusal of both."""
    axes = WAYS[way]
    about = {"family": family, "way": way, "dtype": str(dtype)[6:], "checkpointing": checkpointing}
    model = new_model(family, dtype, checkpointing)
    ids = torch.randint(1, 511, BATCH, generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "labels": ids}
    try:
        plan = new_plan(model, axes)
        figures = predicted(plan, model, batch, ranks.rank)
        if way != "one process":
            tp_styles.apply_sharding_plan(model, ranks.mesh(tuple(axes.values()), tuple(axes)), plan)
        # On a CPU oneDNN copies the operands of a bfloat16 product; the kernels of an accelerator do not.
        with torch.backends.mkldnn.flags(enabled=False):
            real = measured(ranks, model, batch)
    except (
        PlanError,
        tp_styles.PlanError,
    ) as error:  # the check of a first call refuses here, too; all ranks raise alike
        return {**about, "refused": str(error.problems[0])}
    return {**about, "measured": real, "predicted": figures}


PEAK_BOUND, COLLECTIVES_BOUND = 0.03, 0.01


def peak_error(step: dict[str, Any]) -> float:
    """Return the relative error of the predicted peak, 0.02 for 2 %."""
    return float(step["predicted"]["peak"] / step["measured"]["peak"] - 1)


def collectives_error(step: dict[str, Any]) -> float:
    """Return the largest relative error of a count or of bytes, by operation; infinite if one side alone has it."""
    expected, real = step["predicted"]["collectives"], step["measured"]["collectives"]
    errors = [
        abs(expected.get(key, 0) / real[key] - 1) if real.get(key) else float("inf") for key in {**expected, **real}
    ]
    return max(errors, default=0.0)


def is_exact(step: dict[str, Any]) -> bool:
    """Tell whether parameters, gradients and optimizer state have the predicted bytes, to the byte."""
    return all(step["predicted"][part] == step["measured"][part] for part in STATE)


def write_steps(ranks: Ranks, families: Iterable[str], ways: list[str]) -> None:
    """Measure each family in both dtypes, with and without checkpointing; add a line for each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torch warn of their own use
        for family in families:
            each = itertools.product(ways, DTYPES, (False, True))
            steps = [step_of(ranks, family, way, dtype, checkpointing) for way, dtype, checkpointing in each]
            if ranks.rank == 0:
                with ROWS.open("a") as file:
                    file.writelines(json.dumps(step) + "\n" for step in steps)


@pytest.fixture
def families() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get("MEASURED", "").split(","))) or FAMILIES


ROWS = Path(os.environ.get("MEASURED_ROWS", "measured.jsonl"))


@pytest.mark.ranks(1)
def test_one_process(ranks: Ranks, families: tuple[str, ...]) -> None:
    write_steps(ranks, families, ["one process"])


@pytest.mark.ranks(2)
def test_two_ranks(ranks: Ranks, families: tuple[str, ...]) -> None:
    write_steps(ranks, families, [way for way in WAYS if "2 ranks" in way and " x " not in way])


@pytest.mark.ranks(4)
def test_four_ranks(ranks: Ranks, families: tuple[str, ...]) -> None:
    write_steps(ranks, families, [way for way in WAYS if "4 ranks" in way or " x " in way])


def test_the_page() -> None:
    """Write the page of all steps; parameters, gradients and state have to be exact."""
    steps = [json.loads(line) for line in ROWS.read_text().splitlines()]
    Path(os.environ.get("MEASURED_PAGE", "measured.md")).write_text(page(steps))
    run = [step for step in steps if "refused" not in step]
    assert run
    assert [step for step in run if not is_exact(step)] == []


def page(steps: list[dict[str, Any]]) -> str:
    """Return the page with two tables: errors by way of sharding, then by family."""
    families = dict.fromkeys(step["family"] for step in steps)
    lines = [
        "# shard-spec: predicted and measured steps",
        "",
        f"Made by `nox -s measured` on {date.today()}, torch {torch.__version__}, {os.cpu_count()} CPUs, transformers "
        f"{transformers.__version__}. {len(families)} causal models with two layers, {BATCH[0]} x {BATCH[1]} tokens on "
        "each data rank, float32 and bfloat16, each without and with `gradient_checkpointing_enable()`: a real step of "
        "AdamW beside `plan.memory` and `plan.communication`, which run on shapes alone. FSDP2 and tp-styles are "
        "`tp_styles.apply_sharding_plan`. The peak is torch's own record of allocations in forward and backward, "
        "without the parameters' gradients; collectives are those that pass the process groups, by operation, their "
        "counts and bytes.",
        "",
        "What is refused, the page of [tp-styles](tp-styles-families.md) names: a shard of several sections cannot be "
        "sharded again by FSDP2.",
        "",
        "| way | steps | refused | state exact | peak within 3 % | collectives within 1 % |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        chosen = [step for step in steps if step["way"] == way]
        run = [step for step in chosen if "refused" not in step]
        counts = [sum(map(is_exact, run)), sum(abs(peak_error(step)) <= PEAK_BOUND for step in run)]
        counts.append(sum(collectives_error(step) <= COLLECTIVES_BOUND for step in run))
        cells = [way, len(run), len(chosen) - len(run), *(f"{count} of {len(run)}" for count in counts)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "Errors of the peak by family, least and most of its steps. *Italic* is outside of the bound: an estimate.",
        "",
    ]
    lines += [f"| family | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    for family in families:
        texts = [_cell([step for step in steps if (step["family"], step["way"]) == (family, way)]) for way in WAYS]
        lines.append(f"| {family} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _cell(steps: list[dict[str, Any]]) -> str:
    run = [step for step in steps if "refused" not in step]
    if not run:
        return "refused" if steps else "-"
    errors = sorted(map(peak_error, run))
    text = f"{errors[0] * 100:+.1f} to {errors[-1] * 100:+.1f} %"
    text = text if max(map(abs, errors)) <= PEAK_BOUND else f"*{text}*"
    worst = max(map(collectives_error, run))
    return text if worst <= COLLECTIVES_BOUND else f"{text}; *collectives {worst * 100:.0f} % off*"
