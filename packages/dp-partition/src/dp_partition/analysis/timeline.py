"""When a rank computes and when its messages travel: a simulation of one step on two queues.

Compute runs node after node. A collective starts when its node is reached and the link is free; compute goes on, and
stops at the node that waits until the message is there. What compute stands still for is *exposed*, the rest of the
messages' time is overlapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import storage_key
from dp_partition.analysis.comms import Message, num_bytes, tensors_of
from dp_partition.capture.node_meta import phases_of
from dp_partition.ops import aten, is_collective, is_op, is_wait, mutated_inputs, viewed_input

_SAME_WORK = {
    "_scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True)
class Span:
    """A stretch of time.

    Attributes:
        label: A phase of the step, ``wait``, or the kind of a message.
        start: Seconds from the beginning of the step.
        end: Likewise.
        first: Position of its first node in the graph.
        last: Position of its last node; for a message the node that waits for it.
    """

    label: str
    start: float
    end: float
    first: int
    last: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """One step of one rank.

    Attributes:
        compute: What the device does, one after the other; ``wait`` where it stands still.
        messages: What the link does, one span for each message, in the order of issue.
        node_starts: When each node of the graph starts.
    """

    compute: tuple[Span, ...]
    messages: tuple[Span, ...]
    node_starts: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return max((span.end for span in (*self.compute, *self.messages)), default=0.0)

    @property
    def compute_seconds(self) -> float:
        """Time in which the device works."""
        return sum(span.seconds for span in self.compute if span.label != "wait")

    @property
    def message_seconds(self) -> float:
        """Time in which messages travel."""
        return sum(span.seconds for span in self.messages)

    @property
    def exposed_seconds(self) -> float:
        """Time in which the device stands still for messages."""
        return self.seconds - self.compute_seconds

    @property
    def overlap(self) -> float:
        """Share of the messages' time that is hidden behind compute; 1.0 without messages."""
        return 1.0 - self.exposed_seconds / self.message_seconds if self.message_seconds else 1.0


def timeline_of(graph: fx.Graph, messages: tuple[Message, ...], world: int, link: Link, machine: Machine) -> Timeline:
    """Simulate one step.

    Args:
        graph: A rank's graph with local values in ``meta["val"]``.
        messages: Its collectives.
        world: Number of ranks.
        link: Their network.
        machine: Their device.
    """
    by_node = {message.node: message for message in messages}
    arrives: dict[int, list[float]] = {}
    compute: list[Span] = []
    travel: list[Span] = []
    starts: list[float] = []
    now = free = 0.0
    for position, (node, phase) in enumerate(zip(graph.nodes, phases_of(graph), strict=True)):
        starts.append(now)
        if is_collective(node):
            message = by_node[node.name]
            start = max(now, free)
            free = start + link.seconds(message.kind, message.whole_bytes, message.ranks)
            travel.append(Span(message.kind, start, free, position, message.awaited))
            arrives.setdefault(message.awaited, []).append(free)
        arrival = max(arrives.get(position, ()), default=now)
        if arrival > now:
            _extend(compute, "wait", now, arrival, position)
            now = arrival
        seconds = node_seconds(node, machine)
        if seconds:
            _extend(compute, phase, now, now + seconds, position)
            now += seconds
    return Timeline(tuple(compute), tuple(travel), tuple(starts))


def _extend(spans: list[Span], label: str, start: float, end: float, position: int) -> None:
    """Add a stretch, to the last span if that is of the same kind."""
    if spans and spans[-1].label == label:
        start, first = spans[-1].start, spans[-1].first
        spans[-1] = Span(label, start, end, first, position)
    else:
        spans.append(Span(label, start, end, position, position))


def node_seconds(node: fx.Node, machine: Machine) -> float:
    """Time of one node by the roofline; views, waits and what is not computed take none."""
    if not is_op(node) or is_wait(node) or is_collective(node):
        return 0.0
    if viewed_input(node) is not None and not mutated_inputs(node):
        return 0.0
    return machine.seconds(flops_of(node), touched_bytes(node))


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of matrix products, convolutions and attention; 0 for everything else."""
    target: Any = node.target
    name = target._schema.name.split("::")[-1]
    count = flop_registry.get(_SAME_WORK.get(name, target.overloadpacket))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    return int(count(*args, **kwargs, out_val=node.meta.get("val")))


def touched_bytes(node: fx.Node) -> int:
    """Bytes that an operator reads and writes: each piece of memory among inputs and outputs once."""
    seen: dict[int, int] = {}
    for one in (*node.all_input_nodes, node):
        for tensor in tensors_of(one):
            key = storage_key(tensor)
            seen[key] = max(seen.get(key, 0), num_bytes(tensor))
    kept = [source for source in mutated_inputs(node) if source is not node.kwargs.get("out")]  # that is not read
    written = sum(num_bytes(t) for source in kept for t in tensors_of(source))
    return sum(seen.values()) + written


@dataclass(frozen=True)
class Link:
    """The network as one rank sees it.

    Attributes:
        bytes_per_second: Bandwidth in which a rank sends; 50e9 is 400 Gbit/s.
        latency_seconds: Latency of one round of messages.
    """

    bytes_per_second: float = 50e9
    latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.latency_seconds >= 0):
            hint = "bytes_per_second is above 0, latency_seconds not below"
            raise PlanError(Problem("invalid-argument", "Link", found=repr(self), hint=hint))

    def __str__(self) -> str:
        return f"{self.bytes_per_second * 8e-9:g} Gbit/s and {self.latency_seconds * 1e6:g} us a round of messages"

    def seconds(self, kind: str, whole_bytes: int, world: int) -> float:
        """Time of one collective.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or another with the same amount of traffic.
            whole_bytes: Bytes of the full tensor: of the sum, of what is gathered, of what is scattered.
            world: Number of ranks.
        """
        passes = 2 if kind == "all_reduce" else 1
        sent = whole_bytes * (world - 1) / world
        rounds = (world - 1).bit_length()
        return passes * (sent / self.bytes_per_second + rounds * self.latency_seconds)


@dataclass(frozen=True)
class Machine:
    """A rank's device: a roofline of two lines.

    Attributes:
        tflops: Floating-point operations that matrix products really reach, in 10^12 per second.
        memory_gbs: Bandwidth of the device's memory, in gigabytes per second.
        launch_us: Time that every operator takes at the least, in microseconds.
    """

    tflops: float = 150.0
    memory_gbs: float = 1500.0
    launch_us: float = 2.0

    def __post_init__(self) -> None:
        if not (self.tflops > 0 and self.memory_gbs > 0 and self.launch_us >= 0):
            hint = "tflops and memory_gbs are above 0, launch_us not below"
            raise PlanError(Problem("invalid-argument", "Machine", found=repr(self), hint=hint))

    def seconds(self, flops: int, touched_bytes: int) -> float:
        """Time of one operator."""
        return self.launch_us * 1e-6 + max(flops / (self.tflops * 1e12), touched_bytes / (self.memory_gbs * 1e9))
