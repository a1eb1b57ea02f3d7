"""`ExpertParallel` beside two raw all-to-alls with local experts, and beside transformers' own expert parallelism.

    python packages/tp-styles/benchmarks/bench_experts.py [--ranks N] [--rounds N] [--json FILE]

One run, rounds interleaved: forward and backward of one layer of experts (Qwen3-MoE's class, eager) with tokens of each
rank's own. The raw form knows all splits ahead: no counts to exchange, no order to restore, no router's gradient.
Median CPU and wall time of rank 0 and bytes that it sends, on gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from ranktest import intercept
from ranktest.recording import Log
from torch.distributed.device_mesh import DeviceMesh

WIDTH, HIDDEN, EXPERTS, K = 256, 512, 8, 2
SIZES = (64, 1024)


def experts_module() -> Any:
    """Return experts of Qwen3-MoE in float32."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = SimpleNamespace(num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=HIDDEN, hidden_act="silu")
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module


class RawExchange(torch.autograd.Function):
    """One all-to-all with known splits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.splits = received, sent
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return RawExchange.apply(gradient.contiguous(), *ctx.splits), None, None


def run(mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    """Return medians for each number of tokens and each form."""
    intercept.install()
    return {str(tokens): measure(mesh, tokens, rounds) for tokens in SIZES}


def measure(mesh: DeviceMesh, tokens: int, rounds: int) -> dict[str, Any]:
    """Time all forms on the same tokens, in turn."""
    rank, size = mesh.get_local_rank(), mesh.size()
    random = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, WIDTH, generator=random)
    weights, indices = torch.rand(tokens, EXPERTS, generator=random).topk(K, dim=-1)
    forms = {"raw": raw(hidden, indices, size, rank), "tp-styles": ours(mesh)}
    forms["transformers"] = theirs(mesh)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for index in range(rounds + 2):
        for name, form in forms.items():
            x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            form(x, indices, w).sum().backward()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            if index >= 2:
                times[name].append(spent)
    rows = int((indices // (EXPERTS // size) != rank).sum())
    return {
        "ms": {
            name: [1e3 * statistics.median(values) for values in zip(*each, strict=True)]
            for name, each in times.items()
        },
        "bytes": {name: sent_bytes(form, hidden, indices, weights) for name, form in forms.items()},
        "formula": rows * WIDTH * 4 * 4,
    }


def raw(hidden: torch.Tensor, indices: torch.Tensor, size: int, rank: int) -> Any:
    """Return two all-to-alls around the local experts; everything about the routing is prepared."""
    module, flat = experts_module(), indices.reshape(-1)
    local = EXPERTS // size
    shard(module, rank, size)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS).view(size, local)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
    here = torch.arange(local).repeat(size).repeat_interleave(theirs.reshape(-1))[:, None]
    ones = torch.ones(len(here), 1)

    def form(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = RawExchange.apply(x[order // K], sent, received)
        return RawExchange.apply(module(rows, here, ones), received, sent)

    return form


def shard(module: Any, rank: int, size: int) -> None:
    """Keep this rank's experts."""
    module.num_experts = EXPERTS // size
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(parameter.detach().chunk(size)[rank].clone()))


def ours(mesh: DeviceMesh) -> Any:
    """Return the style's module."""
    import tp_styles as tp

    module = experts_module()
    tp.apply_plan(module, mesh, tp.ExpertParallel("sharded"), check="never")
    return module


def theirs(mesh: DeviceMesh) -> Any:
    """Return transformers' `AllToAllEP` around local experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    module = experts_module()
    shard(module, mesh.get_local_rank(), mesh.size())
    alone = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "tp"))["tp"]
    return AllToAllEP(module, mesh, alone)


def sent_bytes(form: Any, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> int:
    """Return the bytes that this rank sends to others in one forward and backward, as ranktest records them."""
    log = Log()
    intercept.add(log)
    try:
        form(hidden.clone().requires_grad_(), indices, weights.clone().requires_grad_()).sum().backward()
    finally:
        intercept.remove(log)
    return log.bytes_sent()


def rows(size: int, rounds: int) -> list[dict[str, str]]:
    """Return the rows of the benchmark page."""
    table = []
    for tokens, result in on_ranks(run, size, rounds).items():
        of_raw = {
            name: [ms / raw for ms, raw in zip(each, result["ms"]["raw"], strict=True)]
            for name, each in result["ms"].items()
        }
        texts = {
            name: f"{cpu:.2f} ms CPU, {wall:.2f} ms ({of_raw[name][0]:.2f}x, {of_raw[name][1]:.2f}x)"
            for name, (cpu, wall) in result["ms"].items()
        }
        sent = result["bytes"]
        table += [
            {
                "what": f"a layer of {EXPERTS} experts, {tokens} tokens a rank of {size}, forward and backward",
                "target": "<= 1.25x of two raw all-to-alls around local experts",
                "measured": texts["tp-styles"],
                "peer": f"raw {texts['raw']}; transformers' `AllToAllEP` {texts['transformers']}",
            },
            {
                "what": f"bytes that rank 0 sends there, {tokens} tokens a rank",
                "target": "the rows, one routing weight a row both ways, the counts",
                "measured": f"{sent['tp-styles']:,}",
                "peer": f"rows alone {result['formula']:,}; transformers' `AllToAllEP` {sent['transformers']:,}",
            },
        ]
    return table


def main() -> None:
    """Print the rows, or write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write the results; default: print them")
    options = parser.parse_args()
    command = "python packages/tp-styles/benchmarks/bench_experts.py --json experts.json"
    result = {"title": "Expert parallelism", "command": command, "rows": rows(options.ranks, options.rounds)}
    text = json.dumps(result, indent=1)
    print(text) if options.json is None else options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
