"""The pipeline from a train step to one rank's graph: every pass, in order.

Each pass changes the graph in place, keeps the contract beside its call, and can run alone on a graph in that form.
Nothing here communicates, and no object of the caller is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.fx import GraphModule

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._shared.progress import phases
from dp_partition.capture.inputs import CallArguments
from dp_partition.capture.state import StepState
from dp_partition.capture.tracer import Capture, trace_step
from dp_partition.nodes import kind_of, meta_of
from dp_partition.passes.bucketing import bucket_and_schedule
from dp_partition.passes.insert_collectives import Inserter, Mover, erase_tags, local_inputs
from dp_partition.passes.normalize import decompose, make_contiguous_for_fused, normalize
from dp_partition.passes.save_memory import repeat_for_microbatches, reshard_after_forward, update_own_rows
from dp_partition.plan.placements import NodeType, RankLocal, num_replicas, shard_group, shard_rank
from dp_partition.plan.plan import CommConfig, PartitionPlan, Settings
from dp_partition.runtime.program import Program
from dp_partition.sharding.propagate import NodePlan, StoragePlacements, gradient_name, is_gradient, propagate

_TYPES = {"param": NodeType.PARAM, "buffer": NodeType.PARAM, "state": NodeType.STATE, "arg": NodeType.ACT}


def build_program(
    function: Callable[..., Any],
    call: CallArguments,
    step_state: StepState,
    plan: PartitionPlan,
    mesh: DeviceMesh,
    settings: Settings,
    device: str | None = None,
) -> Program:
    """Trace a step and partition it for this rank; a terminal shows the phase of these seconds."""
    with phases("dp_partition.compile", 3) as show:
        show("trace of the step on fake tensors")
        capture = capture_single_device(function, call, step_state, plan, settings, device)
        show("placements of each value")
        storage, plans = plan_nodes(capture, plan, settings)
        output = next(node for node in plans if node.op == "output")
        values: Any = output.args[0]
        returned = [plans[output].inputs.get(value) if isinstance(value, fx.Node) else None for value in values]
        rank = shard_rank(mesh)
        for node, planned in plans.items():
            meta_of(node)["node_type"] = planned.node_type
        placements = [storage.placements[node] for node in capture.module.graph.nodes if node.op == "placeholder"]
        fakes = local_inputs(capture.module.graph, placements, capture.mode, plan.world, rank)
        graph = capture.module.graph
        # The graph names groups: that of the shards, and that of this rank's counterparts in all replicas.
        groups = shard_group(mesh).group_name, "" if mesh.ndim == 1 else str(mesh.get_group(0).group_name)
        mover = Mover(graph, plan.world, rank, groups[0], groups[1], num_replicas(mesh))
        show("collectives, buckets and schedule")
        partition_for_rank(capture.module, plans, mover, settings.comm)
        return Program(capture, capture.inputs, returned, mesh, fakes)


# ---- one device -----------------------------------------------------------------------------------------------------


def capture_single_device(
    function: Callable[..., Any],
    call: CallArguments,
    step_state: StepState,
    plan: PartitionPlan,
    settings: Settings,
    device: str | None = None,
) -> Capture:
    """Return the step as a graph of one device, ready for planning.

    Under local semantics its batch is one rank's, under global semantics that of all ranks together.
    """
    local, accumulate, batch_dim = plan.semantics == "local", settings.accumulate, settings.batch_dim
    scale = batch_scale(plan, batch_dim, accumulate)
    # Gives one graph of forward, backward and optimizer; gradients are tagged, phases are marked.
    capture = trace_step(function, call, step_state, scale, device)
    if accumulate > 1:  # micro-batches are the graph's own tensors: arguments get no gradients, modules no attributes
        (output,) = [node for node in capture.module.graph.nodes if node.op == "output"]
        num_outputs = sum(entry.kind not in ("attribute", "argument") for entry in capture.returned.outputs)
        output.args = (list(output.args[0])[:num_outputs],)
        del capture.returned.outputs[num_outputs:]
    # Gives one node per tensor, hyperparameters as inputs, no dead node.
    normalize(capture)
    capture.gradients.update(gradient_name(node) for node in capture.module.graph.nodes if is_gradient(node))
    if accumulate > 1:
        # Needs tags. Repeats forward and backward, and averages gradients before the optimizer.
        repeat_for_microbatches(capture, accumulate, batch_dim)
    if not local:
        # Gradients are noted on their nodes: a tag would hide their operators from the rules.
        erase_tags(capture.module.graph)
        # Every remaining operator has a rule, or runs on replicated inputs.
        decompose(capture.module, capture.mode)
    # ZeRO-1 and 2: all nodes after the last gradient work on this rank's rows of each replicated parameter.
    update_own_rows(capture.module.graph, {p.info.name for p in plan.params if p.state != p.param})
    return capture


# ---- placements -----------------------------------------------------------------------------------------------------


def plan_nodes(
    capture: Capture, plan: PartitionPlan, settings: Settings
) -> tuple[StoragePlacements, dict[fx.Node, NodePlan]]:
    """Place every value of a single-device graph on ``plan.world`` ranks."""
    local = plan.semantics == "local"
    batch: Placement = RankLocal() if local else Shard(settings.batch_dim)
    # Every placeholder has a placement between steps.
    storage = StoragePlacements({}, {})
    for node in capture.module.graph.nodes:
        if node.op != "placeholder":
            continue
        entry = meta_of(node)["input"]
        placement: Placement = Replicate()
        if entry.kind == "param":
            placement = plan[entry.name].param
        elif entry.kind == "state" and tuple(node.meta["val"].shape) == plan[entry.name].info.shape:
            placement = plan[entry.name].state
        elif entry.kind == "arg" and (isinstance(batch, RankLocal) or node.meta["val"].ndim > 0):
            placement = batch
        storage.placements[node] = placement
        if entry.kind in _TYPES:
            storage.types[node] = _TYPES[entry.kind]
        if entry.kind in ("hyper", "number") and isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = 2 if node.meta["val"].dtype is torch.int64 else None  # a number at run time
    grads = {param.info.name: param.grad for param in plan.params}
    storage.gradient_placement = lambda name, shape: grads[name]
    # Needs phases. Marks parameters to gather again for backward, and gives backward its own views of them.
    reshard_after_forward(capture.module.graph, storage.placements, settings.reshard)
    # Gives a placement of each output, and of each input at its node.
    plans = propagate(capture.module.graph, storage, plan.world, local=local)
    # New state and gradients of arguments are returned in their own placements.
    output = next(node for node in capture.module.graph.nodes if node.op == "output")
    arguments = {meta_of(node)["input"].name: node for node in storage.placements if kind_of(node) == "arg"}
    values = output.args[0]
    assert isinstance(values, list | tuple)
    for value, new in zip(values, capture.returned.outputs, strict=True):
        if new.kind == "state" and isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor):
            like = plan[new.name]
            same = tuple(value.meta["val"].shape) == like.info.shape
            plans[output].inputs[value] = like.state if same else Replicate()
        elif new.kind == "argument" and isinstance(value, fx.Node):
            plans[output].inputs[value] = storage.placements[arguments[new.name]]
    return storage, plans


# ---- one rank -------------------------------------------------------------------------------------------------------


def partition_for_rank(
    module: GraphModule, plans: dict[fx.Node, NodePlan], mover: Mover, comm: CommConfig
) -> GraphModule:
    """Turn a planned graph into the graph of the mover's rank, in place.

    The module's code stays unchanged: recompile it before it runs or is handed out.
    """
    graph = module.graph
    # Brings each input where its node wants it, one collective a tensor.
    inserter = Inserter(module, plans, mover)
    inserter.run()
    # Fused optimizer kernels get contiguous tensors.
    make_contiguous_for_fused(graph)
    # Replaces single collectives of parameters and gradients by buckets, sent early and awaited late.
    bucket_and_schedule(graph, inserter.moves, mover, comm)
    # Tags give way to notes: buckets needed them for the final values of gradients.
    erase_tags(graph)
    graph.lint()
    return module


# ---- placements of inputs and outputs -------------------------------------------------------------------------------


def batch_scale(
    plan: PartitionPlan, batch_dim: int, accumulate: int
) -> Callable[[torch.Tensor], tuple[int, ...]] | None:
    """Return the traced shape of a batch tensor, of all ranks or one micro-batch, or None."""
    times, parts, dim = 1 if plan.semantics == "local" else plan.world, accumulate, batch_dim
    if times == parts == 1:
        return None

    def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
        if tensor.ndim <= dim:
            return tuple(tensor.shape)
        size = tensor.shape[dim]
        if size % parts:
            raise PlanError(
                Problem(
                    "uneven-shards",
                    "batch",
                    dim=dim,
                    found=f"{size} rows, {parts} parts",
                    hint="pass as many rows as accumulate divides",
                )
            )
        return (*tensor.shape[:dim], size * times // parts, *tensor.shape[dim + 1 :])

    return shape_of
