"""What a rank holds and what it sends, as the style says: bytes of tensors and of messages."""

from __future__ import annotations

from typing import Any

import dp_models as models
import dp_partition as dp
import torch
from dp_partition.analysis import messages_of
from dp_partition.plan.plan import ParamPlan
from ranktest import Ranks
from torch import nn


def check_held(step: dp.CompiledStep, ranks: Ranks, model: nn.Module, optim: torch.optim.Optimizer, kept: int) -> None:
    """Bytes of parameters and state that live on this rank are those of the style; ``kept`` tensors for a parameter."""
    from torch.distributed.tensor import DTensor

    sizes = {"param": 0, "state": 0}
    for param in dict.fromkeys(model.parameters()):
        assert isinstance(param, DTensor)
        sizes["param"] += param.to_local().numel() * param.element_size()
        for value in optim.state.get(param, {}).values():
            if isinstance(value, DTensor):
                sizes["state"] += value.to_local().numel() * value.element_size()
    plan, world = step.plan, step.plan.world
    expected = sum(p.local_numel(p.param, world, ranks.rank) * p.info.dtype.itemsize for p in plan.params)
    assert sizes["param"] == expected, f"{sizes['param']} bytes of parameters instead of {expected}"
    one = sum(
        p.local_numel(p.state, world, ranks.rank) * p.info.dtype.itemsize
        for p in plan.params
        if p.info.requires_grad and p.info.shape
    )
    assert sizes["state"] == kept * one, f"{sizes['state']} bytes of state, {kept} times {one} expected"


def check_sent(step: dp.CompiledStep, log: Any, semantics: str) -> None:
    """Gradients travel once and the way the style says; parameters are gathered at most twice."""
    needed = gradient_bytes(step.plan)
    gathered = gathered_bytes(step.plan)
    kinds = models.kinds_of(log)
    sent = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0)
    for kind, event in zip(kinds, log.events, strict=True):
        sent[kind] += sum(event.bytes_sent)
    if semantics == "global":
        check_sent_globally(step, log, needed)
    else:
        assert {op: sent[op] for op in needed} == needed, f"sent {sent}, gradients are {needed}"
        assert sent["all_gather"] <= 2 * gathered, f"gathered {sent['all_gather']}, parameters are {gathered}"
        assert set(kinds) <= {op for op, size in {**needed, "all_gather": gathered}.items() if size}
    assert sent["all_gather"] >= gathered, f"gathered {sent['all_gather']}, parameters are {gathered}"


def check_sent_globally(step: dp.CompiledStep, log: Any, needed: dict[str, int]) -> None:
    """Under global semantics activations travel as well: what travels as a gradient does so once and in one way.

    A gradient of what was reduced or gathered before does not travel at all: it is whole on every rank already.
    """
    messages = messages_of(step.graph.graph, step.plan.world)
    assert tuple(m.kind for m in messages) == models.kinds_of(log)
    assert [m.sent_bytes for m in messages] == [sum(event.bytes_sent) for event in log.events]
    reductions = [m for m in messages if m.kind in needed and m.carries]
    carried = [name for m in reductions for name in m.carries]
    assert len(set(carried)) == len(carried) > 0, "a gradient is reduced once"
    sent = {kind: sum(m.sent_bytes for m in reductions if m.kind == kind) for kind in needed}
    # What two parameters' gradients are cut from (a class token among positions) is reduced whole, in any style.
    assert sent["all_reduce"] <= (needed["all_reduce"] or sum(needed.values()) // 4), f"{sent}, gradients are {needed}"
    assert sent["reduce_scatter"] <= needed["reduce_scatter"], f"{sent}, gradients are {needed}"


def gradient_bytes(plan: dp.PartitionPlan) -> dict[str, int]:
    """Bytes that a rank sends to reduce all gradients, by kind of collective; shards travel padded."""
    sent = {"all_reduce": 0, "reduce_scatter": 0}
    for param in plan.params:
        if param.info.requires_grad:
            replicated = param.grad.is_replicate()
            size = param.info.num_bytes if replicated else others_bytes(param, plan.world)
            sent["all_reduce" if replicated else "reduce_scatter"] += size
    return sent


def gathered_bytes(plan: dp.PartitionPlan) -> int:
    """Bytes that a rank sends to gather all parameters once: for compute, or after the update."""
    return sum(
        others_bytes(param, plan.world)
        for param in plan.params
        if not param.param.is_replicate() or (param.info.requires_grad and not param.state.is_replicate())
    )


def others_bytes(param: ParamPlan, world: int) -> int:
    """Bytes of a padded chunk, once for each other rank."""
    rows = param.info.shape[0]
    return -(-rows // world) * (param.info.num_bytes // rows) * (world - 1)
