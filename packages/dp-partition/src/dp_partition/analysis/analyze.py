"""Analysis of a rank's graph without running it: bytes held, messages, live memory, time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from dp_partition.analysis.comms import Message, messages_of
from dp_partition.analysis.memory import Memory, bytes_by_kind, live_memory
from dp_partition.analysis.timeline import Link, Machine, Timeline, timeline_of
from dp_partition.capture.node_meta import phases_of
from dp_partition.plan.plan import PartitionPlan


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on one rank.

    Attributes:
        param_bytes: Parameters between steps.
        grad_bytes: Gradients once they are reduced.
        state_bytes: Optimizer state, its counters included.
        buffer_bytes: Buffers.
        batch_bytes: The step's tensor arguments.
    """

    param_bytes: int
    grad_bytes: int
    state_bytes: int
    buffer_bytes: int
    batch_bytes: int


@dataclass(frozen=True)
class StepAnalysis:
    """One rank's step.

    Attributes:
        held: Bytes of what persists, and of gradients.
        messages: Every collective, in the order of issue.
        memory: Live memory at every node.
        timeline: Compute and messages over time.
        phases: For every node of the graph the part of the step it belongs to.
    """

    held: StaticMemory
    messages: tuple[Message, ...]
    memory: Memory
    timeline: Timeline
    phases: tuple[str, ...]


def analyze(graph: fx.Graph, plan: PartitionPlan, rank: int, link: Link, machine: Machine) -> StepAnalysis:
    """Read everything off a rank's graph with local values in ``meta["val"]``."""
    messages = messages_of(graph, plan.world)
    sizes = bytes_by_kind(graph)
    trained = [param for param in plan.params if param.info.requires_grad]
    grads = sum(p.local_numel(p.grad, plan.world, rank) * p.info.dtype.itemsize for p in trained)
    held = StaticMemory(sizes["parameters"], grads, sizes["optimizer"], sizes["buffers"], sizes["batch"])
    timeline = timeline_of(graph, messages, plan.world, link, machine)
    return StepAnalysis(held, messages, live_memory(graph), timeline, tuple(phases_of(graph)))
