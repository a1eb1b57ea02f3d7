"""Cost of a step on ranks that do not exist: bytes, messages, live memory and time, from shapes alone."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch

from dp_partition._shared.page import human_bytes
from dp_partition._shared.problems import PlanError, Problem
from dp_partition.analysis.analyze import StaticMemory, StepAnalysis, analyze
from dp_partition.analysis.comms import Message, explain_messages
from dp_partition.analysis.formatting import human_seconds, table
from dp_partition.analysis.memory import Memory, bytes_by_kind
from dp_partition.analysis.page import write_page
from dp_partition.analysis.timeline import Link, Machine, Timeline
from dp_partition.api import compile as compile_step
from dp_partition.api import runner_of
from dp_partition.capture.arguments import read_arguments
from dp_partition.capture.state import check_traceable, find_step_state
from dp_partition.check.copying import check_bytes
from dp_partition.mesh import fake_mesh, shard_rank, shard_world
from dp_partition.plan.placements import DataParallelStyle
from dp_partition.plan.plan import PartitionPlan
from dp_partition.plan.settings import Style
from dp_partition.progress import Progress, counted

FORMAT = 1


@dataclass(frozen=True)
class Estimate:
    """Bytes, messages and times of one rank in a step.

    Attributes:
        name: Name of the train step.
        plan: Where parameters, gradients and state lie.
        rank: The rank that the numbers are of; under uneven shards the first ranks hold most.
        analysis: Bytes, messages, live memory and times.
        link: The network that times are of.
        machine: The device that times are of.
        check_bytes: Bytes that a checked call needs beside the step's: full copies, and a snapshot of the shards.
    """

    name: str
    plan: PartitionPlan
    rank: int
    analysis: StepAnalysis
    link: Link
    machine: Machine
    check_bytes: int

    @property
    def world(self) -> int:
        """Number of data-parallel ranks."""
        return self.plan.world * self.plan.replicas

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of the plan."""
        return self.plan.problems

    @property
    def held(self) -> StaticMemory:
        """Bytes of parameters, gradients, state, buffers and batch on the rank."""
        return self.analysis.held

    @property
    def messages(self) -> tuple[Message, ...]:
        """Every collective of a step, in the order of issue."""
        return self.analysis.messages

    @property
    def memory(self) -> Memory:
        """Live memory at every node of the graph."""
        return self.analysis.memory

    @property
    def timeline(self) -> Timeline:
        """Compute and messages over time."""
        return self.analysis.timeline

    @property
    def peak_bytes(self) -> int:
        """Greatest number of bytes that live on the rank during a step."""
        return self.memory.peak_bytes

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.timeline.seconds

    @property
    def check_seconds(self) -> float:
        """Time of a checked call beside the step's: an eager step, of all ranks' rows under global semantics."""
        if self.plan.semantics == "global":
            return self.timeline.compute_seconds * self.world
        gradients = sum(param.info.num_bytes for param in self.plan.params if param.info.requires_grad)
        return self.timeline.compute_seconds + self.link.seconds("all_reduce", gradients, self.world)

    def count(self, kind: str | None = None) -> int:
        """Number of collectives of a step, of one kind or of all."""
        return sum(kind is None or message.kind == kind for message in self.messages)

    def sent_bytes(self, kind: str | None = None) -> int:
        """Bytes that the rank sends in a step by the meaning of its collectives (see `Message`)."""
        return sum(message.sent_bytes for message in self.messages if kind is None or message.kind == kind)

    def explain(self, name: str | None = None) -> str:
        """Text about the step, or about one parameter by its full name."""
        if name is not None:
            return "\n".join([self.plan.explain(name), *explain_messages(self.messages, self.plan[name].info.name)])
        return "\n".join([*_head(self), "", _holdings(self), "", _traffic(self), "", *_times(self)])

    def to_json(self) -> str:
        """Everything but the memory of single nodes, as JSON."""
        times = self.timeline
        data: dict[str, Any] = {
            "format": FORMAT,
            "step": self.name,
            "rank": self.rank,
            "world": self.world,
            "held": asdict(self.held),
            "peak": {"bytes": self.peak_bytes, "node": self.memory.nodes[self.memory.peak], **self.memory.peak_kinds},
            "messages": [asdict(message) for message in self.messages],
            "num_messages": dict(Counter(message.kind for message in self.messages)),
            "sent_bytes": {kind: self.sent_bytes(kind) for kind in dict.fromkeys(m.kind for m in self.messages)},
            "seconds": {
                "step": times.seconds,
                "compute": times.compute_seconds,
                "messages": times.message_seconds,
                "exposed": times.exposed_seconds,
                "overlap": times.overlap,
            },
            "check": {"bytes": self.check_bytes, "seconds": self.check_seconds},
            "link": asdict(self.link),
            "machine": asdict(self.machine),
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(data, sort_keys=True)

    @property
    def digest(self) -> str:
        """Stands for the estimate."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the estimate as a page that loads nothing: timeline, memory, placement of every parameter."""
        write_page(path, f"{self.name}: estimate", self.plan, self.rank, self.analysis, self.link, self.machine)


def estimate(
    train_step: Callable[..., Any],
    *args: Any,
    world: int | tuple[int, int],
    style: Style | DataParallelStyle = "default",
    rank: int = 0,
    link: Link | None = None,
    machine: Machine | None = None,
    device: str | None = None,
    progress: TextIO | None = None,
    **settings: Any,
) -> Estimate:
    """Say what a step would cost on ``world`` ranks. Needs no process group, no device and no memory for weights.

    Tensors may be real or on the meta device; nothing is computed and no object of the caller is changed. Bytes of
    collectives are exact; live memory is that of the graph, without what allocators round up and kernels take and give
    back; times are a model (see `Link` and `Machine`).

    Args:
        train_step: The train step, as for `compile`.
        args: Its arguments: the model, its optimizer, one rank's batch.
        world: Number of data-parallel ranks; for ``"hybrid"`` of replicas, and of ranks in each.
        style: As for `compile`.
        rank: The rank to estimate for.
        link: The network; default ``Link()``.
        machine: The device; default ``Machine()``.
        device: Where tensors seem to be, for example ``"cuda"``; default: where they are, the CPU for meta tensors.
        progress: Where to show how far it is, for example ``sys.stderr``.
        settings: What else `compile` takes: ``semantics``, ``batch``, ``placements``, ``bucket_mb``, ``prefetch``,
            ``reshard_after_forward``, ``accumulate``, ...

    Raises:
        PlanError: Where `compile` or its first call would.
    """
    _check_request(world, rank, device, settings)
    shown = Progress(progress)
    call = read_arguments(getattr(train_step, "__name__", "train_step"), args, {})
    given = find_step_state(train_step, call.args, {})
    check_traceable(given)
    tensors = [*given.params.values(), *given.buffers.values()]
    seen_on = torch.device(device or (tensors[0].device.type if tensors else "cpu")).type
    # Meta tensors are estimated as the CPU's: every operator has rules for it.
    seen_on = "cpu" if seen_on == "meta" else seen_on
    mesh = fake_mesh(world, rank, seen_on)
    runner = runner_of(compile_step(counted(train_step, shown), mesh=mesh, style=style, **settings))
    shown.begin("tracing")
    plan = runner.plan_for(given, shard_world(mesh))
    program = runner.build(given, plan, call, device or ("cpu" if any(t.is_meta for t in tensors) else None))
    full = sum(bytes_by_kind(program.module.graph).values())
    shown.begin("local shapes")
    module = program.with_local_values(lambda done, total: shown.tell(done, total, "nodes"))
    chosen = (link or Link(), machine or Machine())
    found = analyze(module.graph, plan, shard_rank(mesh), *chosen)
    shown.end()
    check = check_bytes(full, found.memory.resident_bytes)
    return Estimate(getattr(train_step, "__name__", "train_step"), plan, rank, found, *chosen, check)


def _check_request(world: int | tuple[int, int], rank: int, device: str | None, settings: dict[str, Any]) -> None:
    problems = []
    if device is not None and not _is_built(device):
        hint = "this build of torch cannot trace for it; leave device out, or estimate where torch is built for it"
        problems.append(Problem("missing-dependency", "device", found=repr(device), hint=hint))
    sizes = (world,) if isinstance(world, int) else world
    if min(sizes) < 1 or not 0 <= rank < math.prod(sizes):
        hint = "world is at least 1, rank from 0 to world - 1"
        problems.append(Problem("invalid-argument", "world, rank", found=f"world={world}, rank={rank}", hint=hint))
    for name in ("mesh", "share", "equal", "backend"):
        if name in settings:
            hint = "an estimate places nothing; leave it out"
            problems.append(Problem("conflicting-arguments", name, found="passed to estimate", hint=hint))
    if problems:
        raise PlanError(problems, "dp_partition.estimate")


def _is_built(device: str) -> bool:
    """Return whether tensors on a device can be traced here; autograd ends the process where they cannot."""
    kind = device.split(":")[0]
    if kind == "cuda":
        return torch.version.cuda is not None or torch.version.hip is not None
    accelerator = torch.accelerator.current_accelerator()
    return kind == "cpu" or (accelerator is not None and accelerator.type == kind)


# ---- words ----------------------------------------------------------------------------------------------------------


def _head(found: Estimate) -> list[str]:
    numel = sum(param.info.num_bytes // param.info.dtype.itemsize for param in found.plan.params)
    return [
        f"{found.name}: {found.plan.style.name.lower()} over {found.world} ranks, {found.plan.semantics} semantics; "
        f"{len(found.plan.params)} parameters, {numel:,} elements",
        f"numbers are of rank {found.rank}",
    ]


def _holdings(found: Estimate) -> str:
    held, memory = found.held, found.memory
    rows = [
        ("parameters", held.param_bytes),
        ("optimizer state", held.state_bytes),
        ("buffers", held.buffer_bytes),
        ("batch", held.batch_bytes),
        ("gradients, once reduced", held.grad_bytes),
        (f"peak, at node {memory.nodes[memory.peak]}", memory.peak_bytes),
        ("a checked call, beside these", found.check_bytes),
    ]
    text = table(["held", "bytes", ""], [[what, f"{size:,}", human_bytes(size)] for what, size in rows], (1, 2))
    parts = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in memory.peak_kinds.items())
    return f"{text}\nthe peak is {parts}"


def _traffic(found: Estimate) -> str:
    rows = []
    for kind in dict.fromkeys(message.kind for message in found.messages):
        sizes = [message.whole_bytes for message in found.messages if message.kind == kind]
        sent = found.sent_bytes(kind)
        each = (
            human_bytes(sizes[0]) if len(set(sizes)) == 1 else f"{human_bytes(min(sizes))} to {human_bytes(max(sizes))}"
        )
        rows.append([kind, str(len(sizes)), each, f"{sent:,}", human_bytes(sent)])
    if not rows:
        return "nothing is sent"
    return table(["collective", "count", "full tensor", "sent bytes", ""], rows, (1, 2, 3, 4))


def _times(found: Estimate) -> list[str]:
    times, link, machine = found.timeline, found.link, found.machine
    return [
        f"a step takes {human_seconds(times.seconds)}: compute {human_seconds(times.compute_seconds)}, messages "
        f"{human_seconds(times.message_seconds)}, of which {times.overlap:.0%} behind compute",
        f"a checked call takes {human_seconds(found.check_seconds)} more",
        f"assumed: {link}; {machine.tflops:g} TFLOP/s, "
        f"{machine.memory_gbs:g} GB/s of memory, {machine.launch_us:g} us an operator",
    ]
