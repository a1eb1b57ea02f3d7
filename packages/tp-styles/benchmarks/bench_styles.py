"""The rows of the target table, side by side with torch's styles and with hand-written collectives.

Run it as a program; it starts its own ranks (gloo, CPU):

    python benchmarks/bench_styles.py --json styles.json
        [--only overhead,transformers,attention,grouped,explain,undo,families,graph]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_styles as tp
from ranks import TESTS, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_tp
from torch.utils._python_dispatch import TorchDispatchMode
from tp_styles.runtime.parameters import _Local

sys.path.insert(0, TESTS)

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

    def __init__(self, mlp: MLP, mesh: DeviceMesh) -> None:
        super().__init__()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()
        self.up = nn.Parameter(mlp.up.weight.detach().chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(mlp.up.bias.detach().chunk(size)[rank].clone())
        self.down = nn.Parameter(mlp.down.weight.detach().chunk(size, 1)[rank].clone())
        self.down_bias = nn.Parameter(mlp.down.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, self.up, self.up_bias, self.down, self.down_bias)

    def compute(
        self, x: torch.Tensor, up: torch.Tensor, up_bias: torch.Tensor, down: torch.Tensor, down_bias: torch.Tensor
    ) -> torch.Tensor:
        x = _Copied.apply(x, self.group)  # type: ignore[no-untyped-call]
        x = F.gelu(F.linear(x, up, up_bias))
        summed: torch.Tensor = _Summed.apply(F.linear(x, down), self.group)  # type: ignore[no-untyped-call]
        return summed + down_bias


class HandWrittenOnDTensors(HandWritten):
    """The same with DTensors as parameters, read by `to_local`: what their gradients alone cost."""

    def __init__(self, mlp: MLP, mesh: DeviceMesh) -> None:
        super().__init__(mlp, mesh)
        for (name, parameter), layout in zip(self.named_parameters(), (0, 0, 1, None), strict=True):
            placement = Replicate() if layout is None else Shard(layout)
            wrapped = DTensor.from_local(parameter.detach(), mesh, (placement,), run_check=False)
            setattr(self, name, nn.Parameter(wrapped))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: Any = [parameter.to_local() for parameter in self._parameters.values()]  # type: ignore[union-attr, operator]
        return self.compute(x, *weights)


class HandWrittenBehindOneNode(HandWrittenOnDTensors):
    """The same, read behind one node of autograd, as the styles read them: the least that their gradients cost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, *_Local.apply(*self._parameters.values()))  # type: ignore[no-untyped-call]


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
    """CPU time of one forward, and of one forward and backward, in microseconds; interleaved rounds."""
    torch.manual_seed(0)
    mlp = MLP()
    ours = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    theirs = {"up": torch_tp.ColwiseParallel(), "down": torch_tp.RowwiseParallel()}
    kinds: dict[str, nn.Module] = {"hand-written": HandWritten(mlp, mesh)}
    kinds["tp-styles"] = copy.deepcopy(mlp)
    tp.apply_plan(kinds["tp-styles"], mesh, ours)
    kinds["on DTensors"] = HandWrittenOnDTensors(mlp, mesh)
    kinds["behind one node"] = HandWrittenBehindOneNode(mlp, mesh)
    kinds["torch"] = torch_tp.parallelize_module(copy.deepcopy(mlp), mesh, theirs)
    x = torch.randn(TOKENS, WIDTH)
    expected = mlp(x)
    for name, module in kinds.items():
        torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    result: dict[str, Any] = {}
    for what in ("forward", "forward and backward"):
        times = _interleaved({name: _step(module, x, what) for name, module in kinds.items()}, mesh)
        result[what] = times
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


ROUNDS, CALLS, FIRSTS = 15, 20, 5


def _interleaved(steps: dict[str, Callable[[], None]], mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(CALLS):
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier(mesh.get_group())
            start = time.thread_time()
            for _ in range(CALLS):
                step()
            times[name].append((time.thread_time() - start) / CALLS * 1e6)
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in times.items()
    }


def against_transformers(mesh: DeviceMesh) -> dict[str, Any]:
    """CPU time of a Llama's forward by its own plan: ours, without and with the check behind it, and transformers'.

    Also the time of the first step with the check, and without: the median of five.
    """
    import hf_models
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    alone = hf_models.build("llama").float()
    ids = torch.randint(3, 48, (2, 8), generator=torch.Generator().manual_seed(1))
    kinds: dict[str, Any] = {}
    # A round of Python's garbage collector takes as long as a first step: the median of five, in turns.
    seconds: dict[str, list[float]] = {"unchecked": [], "checked": []}
    for name, check in (("unchecked", "never"), ("checked", "first")) * FIRSTS:
        kinds[name] = copy.deepcopy(alone)
        tp.apply_plan(kinds[name], mesh, tp.from_hf_tp_plan(alone), check=check)  # type: ignore[arg-type]
        gc.collect()
        start = time.perf_counter()
        kinds[name](input_ids=ids, labels=ids).loss.backward()
        seconds[name].append(time.perf_counter() - start)
    first = {name: statistics.median(values) for name, values in seconds.items()}
    theirs: Any = copy.deepcopy(alone)
    kinds["transformers"] = apply_tensor_parallelism(theirs, mesh, theirs._expand_parallel_plan(theirs.tp_plan))
    with torch.no_grad():
        logits = alone(input_ids=ids).logits
        for module in kinds.values():
            torch.testing.assert_close(module(input_ids=ids).logits, logits, atol=1e-4, rtol=0)

    def forward(module: Any) -> None:
        with torch.no_grad():
            module(input_ids=ids)

    return {"first": first, **_interleaved({name: partial(forward, module) for name, module in kinds.items()}, mesh)}


# ---------------------------------------------------------------------------------------------- grids


def attention(mesh: DeviceMesh) -> dict[str, Any]:
    """Every seventh of the 288 cells of nn.MultiheadAttention; `grids.py` runs all of them."""
    import mha_grid

    cells = list(mha_grid.cells())[::7]
    return {"cells": len(cells), "numbers": sum(mha_grid.check(cell, mesh) for cell in cells)}


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
    return {"exact": exact, "refused": refused}


def undo(mesh: DeviceMesh) -> dict[str, Any]:
    """100 random plans, taken back; the test of the same name says what is compared."""
    import tp_models as models
    from test_apply import fingerprint, random_plan

    rng = random.Random(5)
    model = models.seeded(lambda: models.GPT(tied=True))
    before, state = fingerprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(100):
        handle = tp.apply_plan(model, mesh, random_plan(rng))
        handle.undo()
        assert fingerprint(model) == before
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return {"plans": 100, "bit-equal": 100}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives. `CommDebugMode` hooks modules' backward, so that siblings no longer read one tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func)
        self.count += is_collective
        return func(*args, **(kwargs or {}))


def explained(mesh: DeviceMesh) -> dict[str, Any]:
    """Plans whose predicted collectives are those that are dispatched in a forward and a backward."""
    import tp_models as models
    from tp_styles.plan.model import collectives

    equal = 0
    plans = [models.gpt_plan(fused) for fused in (False, True)]
    for plan in plans:
        model = models.seeded(lambda fused="layers.*.attn.qkv" in plan: models.GPT(vocab=18, fused=fused))
        handle = tp.apply_plan(model, mesh, plan)
        ids = torch.randint(0, 17, (2, 6))
        model(ids)  # the ranks compare sizes in the first call
        with CollectiveCounter() as counter:
            model(ids).sum().backward()
        equal += counter.count == len(list(collectives(handle.plan)))
    return {"plans": len(plans), "equal": equal}


def families(mesh: DeviceMesh) -> dict[str, Any]:
    """Four families of transformers; `grids.py` runs all of them."""
    import hf_models

    names = "llama", "mixtral", "deepseek_v2", "phi3"
    return {name: round(hf_models.check_by(name, mesh, "auto_plan")["share"], 3) for name in names}


def graph(mesh: DeviceMesh) -> dict[str, Any]:
    """Graph breaks of a Llama-like attention, an attention of torch and the vocabulary-parallel loss."""
    import tp_models as models

    model = nn.Sequential(models.GroupedAttention(16, 4, 2), nn.Linear(16, 18, bias=False))
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    grouped = tp.GQAParallel(q="q", k="k", v="v", o="o", norms=("q_norm", "k_norm"))
    tp.apply_plan(model, mesh, {"0": grouped, "1": tp.ColwiseParallel(use_local_output=True)})
    tp.apply_plan(attention, mesh, tp.MultiheadAttentionParallel())
    x, target = torch.randn(2, 6, 16), torch.randint(0, 18, (2, 6))
    model(x), attention(x, x, x)

    def loss(x: torch.Tensor) -> torch.Tensor:
        h = attention(x, x, x, need_weights=False)[0]
        return tp.vocab_parallel_cross_entropy(model(h), target, mesh=mesh, num_classes=18)

    report = torch._dynamo.explain(loss)(x)
    return {"breaks": report.graph_break_count, "graphs": report.graph_count}


# ---------------------------------------------------------------------------------------------- rows

Row = dict[str, str]


def _row(what: str, target: str, measured: str, peer: str) -> Row:
    return {"what": what, "target": target, "measured": measured, "peer": peer}


def overhead_rows() -> list[Row]:
    """Rows of a forward, of a forward and backward, and of what DTensor alone adds to the latter."""
    result = on_ranks(overhead, 2)
    targets = {"forward": "<= 1.10x", "forward and backward": "<= 1.25x"}
    rows = []
    for what, target in targets.items():
        times = result[what]
        own, hand, torchs = (times[name] for name in ("tp-styles", "hand-written", "torch"))
        rows.append(
            {
                "what": f"host time, MLP d={WIDTH}, {TOKENS} tokens, tp=2, {what}",
                "target": f"{target} of hand-written collectives",
                "measured": f"{own['median'] / hand['median']:.2f}x (min {own['min'] / hand['min']:.2f}x); "
                f"{own['median']:.0f} us, min {own['min']:.0f} us",
                "peer": f"hand-written {hand['median']:.0f} us, min {hand['min']:.0f} us; torch's styles "
                f"{torchs['median']:.0f} us ({torchs['median'] / hand['median']:.2f}x), min {torchs['min']:.0f} us",
            }
        )
    own, hand = times["tp-styles"], times["hand-written"]
    limits = [
        f"{times[name]['median'] / hand['median']:.2f}x (min {times[name]['min'] / hand['min']:.2f}x)"
        for name in ("on DTensors", "behind one node")
    ]
    ours = f"tp-styles in this run {own['median'] / hand['median']:.2f}x (min {own['min'] / hand['min']:.2f}x)"
    what = (
        "what limits it: the hand-written step on DTensor parameters, without styles, read by `to_local` each, "
        "and all behind one node of autograd"
    )
    rows.append(_row(what, "no target", f"{' and '.join(limits)} of hand-written collectives", ours))
    return rows


def transformers_rows() -> list[Row]:
    """Two rows: a forward beside transformers' own tensor parallelism, and the check."""
    result = on_ranks(against_transformers, 2)
    own, unchecked, theirs = (result[name]["median"] for name in ("checked", "unchecked", "transformers"))
    first = result["first"]
    return [
        _row(
            "host time of a forward of a Llama with 2 layers by its own plan, tp=2, no gradients",
            "below transformers' own tensor parallelism",
            f"{own / theirs:.2f}x ({own:.0f} us)",
            f"transformers' styles {theirs:.0f} us",
        ),
        _row(
            "the check by execution: the first step, and a later forward",
            "no cost after the first call",
            f"first step {first['checked']:.2f} s with it, {first['unchecked']:.2f} s without; a later forward "
            f"{own / unchecked:.2f}x",
            f'`check="never"` {unchecked:.0f} us',
        ),
    ]


def attention_rows() -> list[Row]:
    """One row."""
    results = {size: on_ranks(attention, size) for size in (2, 4)}
    cells = ", ".join(f"{result['cells']} cells at tp {size}" for size, result in results.items())
    return [
        _row(
            "`nn.MultiheadAttention` (all 288 cells: [tp-styles-mha](tp-styles-mha.md))",
            "forward 1e-5, gradients 1e-4 of the unsharded module",
            f"{cells}: within 1e-10 in float64, {sum(r['numbers'] for r in results.values())} numbers",
            "torch's styles: 0 cells",
        )
    ]


def grouped_rows() -> list[Row]:
    """One row."""
    results = {size: on_ranks(grouped, size) for size in (2, 4, 8)}
    text = "; ".join(f"tp {size}: {r['exact']} exact, {r['refused']} refused" for size, r in results.items())
    return [
        _row(
            "every grouped-query shape (heads <= 32, key-value heads divide heads)",
            "exact, or PlanError",
            f"{text}; 0 wrong",
            "torch's styles: an error inside view",
        )
    ]


def explain_rows() -> list[Row]:
    """One row."""
    counts = on_ranks(explained, 2)
    return [
        _row(
            "`explain` predicts collectives",
            "counts equal those dispatched in 100 % of plans (bytes: tests, with the recording group)",
            f"{counts['equal']} of {counts['plans']} full models equal",
            "torch: no prediction",
        )
    ]


def undo_rows() -> list[Row]:
    """One row."""
    counts = on_ranks(undo, 2)
    return [
        _row(
            "undo of random plans",
            "state_dict bit-equal, hooks back, 100 plans",
            f"{counts['bit-equal']} of {counts['plans']}",
            "torch: no undo",
        )
    ]


def families_rows() -> list[Row]:
    """One row."""
    shares = on_ranks(families, 2)
    return [
        _row(
            "Hugging Face (all families: [tp-styles-families](tp-styles-families.md))",
            "forward, backward, generate, 5 steps equal; >= 95 % of matmul-weight bytes divided",
            ", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
            "the unsharded model",
        )
    ]


def graph_rows() -> list[Row]:
    """One row."""
    counts = on_ranks(graph, 2)
    return [
        _row(
            "graph breaks: Llama-like block, attention block, vocabulary-parallel loss",
            "0",
            f"{counts['breaks']} in {counts['graphs']} graph",
            "0 is the floor",
        )
    ]


ROWS: dict[str, Callable[[], list[Row]]] = {
    "overhead": overhead_rows,
    "transformers": transformers_rows,
    "attention": attention_rows,
    "grouped": grouped_rows,
    "explain": explain_rows,
    "undo": undo_rows,
    "families": families_rows,
    "graph": graph_rows,
}


def main(argv: list[str] | None = None) -> int:
    """Run the rows and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", help="where to write the results; default: print them")
    parser.add_argument("--only", default=",".join(ROWS), help="rows to run, with commas between")
    options = parser.parse_args(argv)
    result = {
        "title": "Tensor-parallel styles",
        "command": "python packages/tp-styles/benchmarks/bench_styles.py --json styles.json",
        "rows": [row for name in options.only.split(",") for row in ROWS[name]()],
    }
    text = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
