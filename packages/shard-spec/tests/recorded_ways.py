"""Ways of a step, recorded beside their prediction: FSDP2 on torch's fake process group, and autocast.

Run as a script it prints one JSON object a line: the way, and predicted and recorded bytes of the peak beside gradients
("beside") and with the state ("total"). FSDP2's buffers are allocated on the CPU as on an accelerator.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Event = tuple[int, int]  # address, bytes allocated or freed
_MARK = 1237  # bytes that nothing else allocates


def record(step: Callable[[], Any]) -> tuple[list[Event], Any]:
    """Return the allocations of a step in order, without those inside of a collective (gloo copies)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = step()
    assert profile.profiler is not None
    nodes = [(node, False) for node in profile.profiler.kineto_results.experimental_event_tree()]
    events: list[tuple[int, int, int, bool]] = []
    while nodes:
        node, inside = nodes.pop()
        inside |= node.name.startswith("c10d::")
        nodes += [(child, inside) for child in node.children]
        if hasattr(node.extra_fields, "alloc_size"):
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, inside))
    own: list[Event] = []
    of_backend: set[int] = set()
    for _, address, size, inside in sorted(events):
        if size > 0 and inside:
            of_backend.add(address)
        elif size < 0 and address in of_backend:
            of_backend.discard(address)
        else:
            own.append((address, size))
    assert len(own) > 10
    return own, result


def peak(events: list[Event], without: set[int] = frozenset()) -> int:  # type: ignore[assignment]  # an empty one
    """Return the most bytes at one time; the last allocation at each of the addresses ``without`` is left out."""
    last = {address: at for at, (address, size) in enumerate(events) if address in without and size > 0}
    skipped = set(last.values())
    now = most = 0
    for at, (_, size) in enumerate(events):
        now += 0 if at in skipped else size
        most = max(most, now)
    return most


def local_of(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def llama(dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(dtype).train()


class Reentrant(nn.Module):
    """Blocks in re-entrant checkpoints, whose forward runs without gradients first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(512, 96), nn.Linear(96, 512)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(12))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.table(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 32).view(2, 32) % 511
    return {"input_ids": ids, "labels": ids}


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = [value for values in optimizer.state.values() for value in values.values()]
    return sum(local_of(each).nbytes for each in (*model.parameters(), *model.buffers(), *state))


def measure(model: nn.Module, forward_and_backward: Callable[[], Any]) -> dict[str, int]:
    """Record the third step: the first two make state and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()

    def full_step() -> set[int]:
        forward_and_backward()
        gradients = {local_of(p.grad).untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        torch.empty(_MARK, dtype=torch.uint8)  # in the record: backward ends here
        optimizer.step()
        return gradients

    gc.collect()
    events, gradients = record(full_step)
    (end,) = (at for at, (_, size) in enumerate(events) if size == _MARK)
    return {"beside": peak(events[:end], gradients), "total": state_bytes(model, optimizer) + peak(events)}


def predicted(plan: Any, model: nn.Module, **options: Any) -> dict[str, int]:
    memory = plan.memory(model, batch(), **options)
    options.pop("optimizer", None)
    return {"beside": plan.activations(model, batch(), **options).peak_bytes, "total": memory.max_bytes}


def fsdp_ways() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Way -> arguments of the real run, options of the prediction."""
    from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

    bf16, full = torch.bfloat16, torch.float32
    both = Policy(bf16, full)
    last: dict[str, Any] = {"batches": 2, "sync_last": True}
    return {
        "plain": ({}, {}),
        "bfloat16": ({"dtype": bf16}, {}),
        "policy": ({"mp_policy": Policy(bf16)}, {"mp_policy": {"param_dtype": "bfloat16"}}),
        "policy with float32 reduction": ({"mp_policy": both}, {"mp_policy": both}),
        "bfloat16 reduction": ({"mp_policy": Policy(None, bf16)}, {"mp_policy": Policy(None, bf16)}),
        "two batches": ({"batches": 2}, {"accumulate": 2}),
        "two batches, sync at the last": (last, {"accumulate": 2, "sync": "last"}),
        "policy, sync at the last": ({**last, "mp_policy": both}, {"accumulate": 2, "sync": "last", "mp_policy": both}),
        "no reshard": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
        "root alone": ({"root_alone": True}, {"units": []}),
        "re-entrant checkpoints": ({"reentrant": True}, {}),
        "replicas": ({"replicas": 2}, {}),
        "replicas, two batches": ({"replicas": 2, "batches": 2}, {"accumulate": 2}),
        "replicas, bfloat16 reduction": (
            {"replicas": 2, "mp_policy": Policy(None, bf16)},
            {"mp_policy": Policy(None, bf16)},
        ),
    }


def real_fsdp(
    mesh: Any,
    dtype: torch.dtype = torch.float32,
    batches: int = 1,
    sync_last: bool = False,
    root_alone: bool = False,
    reentrant: bool = False,
    **how: Any,
) -> dict[str, int]:
    from torch.distributed.fsdp import fully_shard

    model: Any = Reentrant() if reentrant else llama(dtype)
    for layer in () if root_alone else getattr(model, "model", model).layers:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)

    def forward_and_backward() -> Any:
        for at in range(batches):
            if sync_last:
                model.set_requires_gradient_sync(at == batches - 1)
            output = model(**batch())
            output.loss.backward()
        return output

    return measure(model, forward_and_backward)


def main() -> None:
    import torch.distributed as dist
    from shard_spec import FullyShardPlanner, ShardingPlan
    from torch.distributed.device_mesh import init_device_mesh

    torch.backends.mkldnn.set_flags(False)  # its kernels copy operands
    dist.init_process_group("fake", rank=0, world_size=4)
    for way, (how, options) in fsdp_ways().items():
        model: Any = Reentrant() if "reentrant" in how else llama(how.get("dtype", torch.float32))
        replicas = how.pop("replicas", 1)
        axes = {"dp_replicate": replicas, "fsdp": 4 // replicas} if replicas > 1 else {"fsdp": 4}
        mesh = init_device_mesh("cpu", (*axes.values(),), mesh_dim_names=(*axes,))
        plan = FullyShardPlanner(axes, "fsdp").build_plan(model)
        row = {"predicted": predicted(plan, model, **options), "recorded": real_fsdp(mesh, **how)}
        print(json.dumps({"way": way, **row}), flush=True)
    dist.destroy_process_group()
    model, alone = llama(), ShardingPlan({}, mesh={"dp": 1})

    def step() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**batch())
        output.loss.backward()
        return output

    for way in ("autocast", "autocast, checkpointed"):
        row = {"predicted": predicted(alone, model, autocast="bfloat16"), "recorded": measure(model, step)}
        print(json.dumps({"way": way, **row}), flush=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})


if __name__ == "__main__":
    main()
