"""One traced and partitioned step, ready to run: the pipeline from a Python function to a rank's graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dp_partition._torch_compat import is_gloo
from dp_partition.accumulate import repeat_for_microbatches
from dp_partition.axes import num_replicas, replica_group_name, shard_group, shard_rank
from dp_partition.bindings import use_bindings
from dp_partition.bucket import Traffic
from dp_partition.canonicalise import canonicalise
from dp_partition.capture.fakes import Input
from dp_partition.capture.hypers import Hyper
from dp_partition.capture.subject import Subject
from dp_partition.capture.trace import Capture, trace_step
from dp_partition.collectives import local_shape
from dp_partition.decompose import decompose, remove_tags
from dp_partition.imagined import imagined_mesh
from dp_partition.insert import partition_for_rank
from dp_partition.localise import record_local_values
from dp_partition.lower.lowered import Lowered
from dp_partition.mark import mark_graph
from dp_partition.on_gloo import halve_scatters
from dp_partition.placements import PerRank
from dp_partition.plan import PartitionPlan
from dp_partition.problems import PlanError, Problem
from dp_partition.propagate import Homes, NodePlan, propagate
from dp_partition.reshard import MARK, reshard_after_forward
from dp_partition.styles import NodeType
from dp_partition.zero import update_own_rows

_TYPES = {"param": NodeType.PARAM, "buffer": NodeType.PARAM, "state": NodeType.STATE, "arg": NodeType.ACT}


@dataclass
class Program:
    """A step partitioned for one rank.

    Attributes:
        capture: What was traced; its module is the partitioned graph.
        inputs: What each placeholder wants.
        output_placements: Where each returned value lies.
        mesh: The ranks.
        lowered: The partitioned graph with its compute compiled; None where it runs as it is.
        bound: The partitioned graph as it runs otherwise; made when it first does.
        labelled: Inputs by their kinds, as `labels` found them.
    """

    capture: Capture
    inputs: list[Input]
    output_placements: list[Placement | None]
    mesh: DeviceMesh
    local_fakes: list[Any] | None = None
    checked: tuple[float, ...] = ()
    lowered: Lowered | None = None
    bound: fx.GraphModule | None = None
    labelled: dict[tuple[str, ...], list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def module(self) -> fx.GraphModule:
        """The partitioned graph."""
        return self.capture.module

    def run(self, inputs: list[Any]) -> Any:
        """The graph's values for this rank's inputs."""
        if self.lowered is not None:
            return self.lowered(*inputs)
        if self.bound is None:
            graph = self.for_backend()
            use_bindings(graph)
            self.bound = fx.GraphModule(self.module, graph)
        return self.bound(*inputs)

    def for_backend(self) -> fx.Graph:
        """A copy of the partitioned graph with its collectives as the backend carries them best."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        if is_gloo(shard_group(self.mesh), self.mesh.device_type):
            halve_scatters(graph)
        return graph

    def labels(self, kinds: tuple[str, ...]) -> list[tuple[str, int]]:
        """Name and position of the inputs of these kinds; worked out once."""
        if kinds not in self.labelled:
            self.labelled[kinds] = [(e.label, index) for index, e in enumerate(self.inputs) if e.kind in kinds]
        return self.labelled[kinds]

    def with_local_values(self, tell: Callable[[int, int], None] | None = None) -> fx.GraphModule:
        """The partitioned graph, with this rank's shapes in ``meta["val"]``; worked out when first asked for.

        Args:
            tell: Is told how many of how many nodes are done.
        """
        if self.local_fakes is not None:
            record_local_values(self.module, self.local_fakes, self.capture.mode, tell)
            self.local_fakes = None
        return self.module

    def gathered_again(self) -> frozenset[str]:
        """The parameters that are let go of after forward and gathered once more for backward."""
        return frozenset(n.meta["input"].name for n in self.module.graph.nodes if MARK in n.meta)

    def holds_for(self, values: dict[Hyper, float]) -> bool:
        """Whether the decisions taken while tracing hold for these hyperparameters."""
        now = tuple(values.values())
        if now == self.checked:
            return True
        substitution = {
            self.capture.symbols[h]: v for h, v in values.items() if self.capture.symbols.get(h) is not None
        }
        for guard in self.capture.guards:
            if not bool(guard.xreplace(substitution)):
                return False
        self.checked = now
        return True


def build_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    subject: Subject,
    plan: PartitionPlan,
    mesh: DeviceMesh,
    batch_dim: int = 0,
    traffic: Traffic = Traffic(),  # noqa: B008 - a frozen value
    accumulate: int = 1,
    reshard: str | bool | frozenset[str] = False,
) -> Program:
    """Trace a step and partition it for this rank. Communicates nothing and changes no object of the caller."""
    capture = capture_single_device(function, args, kwargs, subject, plan, batch_dim, accumulate)
    homes, plans = plan_nodes(capture, plan, batch_dim, traffic, reshard)
    output = next(node for node in plans if node.op == "output")
    returned = returned_placements(list(output.args[0]), plans[output])  # type: ignore[arg-type]
    rank = shard_rank(mesh)
    mark_graph(plans, mesh if mesh.ndim == 1 else imagined_mesh(plan.world, rank, mesh.device_type))
    placements = [homes.placements[node] for node in capture.module.graph.nodes if node.op == "placeholder"]
    fakes = local_inputs(capture, placements, plan.world, rank)
    groups = shard_group(mesh).group_name, replica_group_name(mesh)
    partition_for_rank(capture.module, plan.world, rank, groups[0], traffic, groups[1], num_replicas(mesh))
    return Program(capture, capture.inputs, returned, mesh, fakes)


def capture_single_device(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    subject: Subject,
    plan: PartitionPlan,
    batch_dim: int,
    accumulate: int,
) -> Capture:
    """The step as one canonical graph of one device, ready to be planned.

    Under local semantics its batch is one rank's, under global semantics that of all ranks together.
    """
    local = plan.semantics == "local"
    scale = None if local and accumulate == 1 else traced_batch(1 if local else plan.world, accumulate, batch_dim)
    capture = trace_step(function, args, kwargs, subject, scale)
    canonicalise(capture)
    if accumulate > 1:
        repeat_for_microbatches(capture, accumulate, batch_dim)
    if not local:
        remove_tags(capture.module.graph)
        decompose(capture.module, capture.mode)
    update_own_rows(capture.module.graph, {p.info.name for p in plan.params if p.state != p.param})
    return capture


def plan_nodes(
    capture: Capture,
    plan: PartitionPlan,
    batch_dim: int,
    traffic: Traffic = Traffic(),  # noqa: B008 - a frozen value
    reshard: str | bool | frozenset[str] = False,
) -> tuple[Homes, dict[fx.Node, NodePlan]]:
    """Where every value of a single-device graph lies when it runs on ``plan.world`` ranks."""
    local = plan.semantics == "local"
    homes = home_placements(capture, plan, PerRank() if local else Shard(batch_dim))
    reshard_after_forward(capture.module.graph, homes.placements, reshard, traffic, plan.world, local=local)
    plans = propagate(capture.module.graph, homes, plan.world, local=local)
    place_new_states(capture, plan, plans)
    return homes, plans


def traced_batch(times: int, parts: int, dim: int) -> Callable[[torch.Tensor], tuple[int, ...]]:
    """Shape at which a batch tensor is traced: ``times`` ranks' batches together, or one of ``parts`` micro-batches."""

    def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
        if tensor.ndim <= dim:
            return tuple(tensor.shape)
        size = tensor.shape[dim]
        if size % parts:
            hint = "pass as many rows as accumulate divides"
            raise PlanError(Problem("uneven-batch", "batch", dim=dim, found=f"{size} rows in {parts} parts", hint=hint))
        return (*tensor.shape[:dim], size * times // parts, *tensor.shape[dim + 1 :])

    return shape_of


def home_placements(capture: Capture, plan: PartitionPlan, batch: Placement) -> Homes:
    """Where every placeholder lies between steps."""
    homes = Homes({}, {})
    for node in capture.module.graph.nodes:
        if node.op != "placeholder":
            continue
        entry: Input = node.meta["input"]
        homes.placements[node] = _home(node, entry, plan, batch)
        if entry.kind in _TYPES:
            homes.types[node] = _TYPES[entry.kind]
        if entry.kind == "hyper":
            node.meta["val"] = None
    grads = {param.info.name: param.grad for param in plan.params}
    homes.grad_home = lambda name, shape: grads[name]
    return homes


def _home(node: fx.Node, entry: Input, plan: PartitionPlan, batch: Placement) -> Placement:
    if entry.kind == "param":
        return plan[entry.name].param
    if entry.kind == "state":
        like = plan[entry.name]
        return like.state if tuple(node.meta["val"].shape) == like.info.shape else Replicate()
    if entry.kind == "arg" and (isinstance(batch, PerRank) or node.meta["val"].ndim > 0):
        return batch
    return Replicate()


def place_new_states(capture: Capture, plan: PartitionPlan, plans: dict[fx.Node, NodePlan]) -> None:
    """State that the step makes itself is returned where the plan wants it."""
    output = next(node for node in capture.module.graph.nodes if node.op == "output")
    values = output.args[0]
    assert isinstance(values, list | tuple)
    for value, entry in zip(values, capture.outputs, strict=True):
        if entry.kind == "state" and isinstance(value, fx.Node):
            like = plan[entry.name]
            same = tuple(value.meta["val"].shape) == like.info.shape
            plans[output].inputs[value] = like.state if same else Replicate()


def returned_placements(order: list[Any], plan: NodePlan) -> list[Placement | None]:
    """Where each returned value lies."""
    return [plan.inputs.get(value) if isinstance(value, fx.Node) else None for value in order]


def local_inputs(capture: Capture, placements: list[Placement], world: int, rank: int) -> list[Any]:
    """Fake local tensors for every placeholder."""
    fakes: list[Any] = []
    nodes = [node for node in capture.module.graph.nodes if node.op == "placeholder"]
    with capture.mode:
        for node, placement in zip(nodes, placements, strict=True):
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor):
                fakes.append(0.5)
                continue
            shape = local_shape(tuple(value.shape), placement, world, rank)
            whole = shape == tuple(value.shape)
            fake = (
                torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=value.device)
                if whole
                else (torch.empty(shape, dtype=value.dtype, device=value.device))
            )
            fakes.append(fake)
    return fakes
