"""Cost of a step without its ranks: bytes, messages and live memory, from shapes alone."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from dp_partition._shared.page import human_bytes
from dp_partition._shared.problems import PlanError, Problem
from dp_partition.analysis import KINDS, Memory, Message, explain_messages, explain_sums, live_memory, messages_of
from dp_partition.api import compile as compile_step
from dp_partition.api import runner_of
from dp_partition.capture.inputs import read_arguments
from dp_partition.capture.state import check_traceable, find_step_state
from dp_partition.plan.placements import DataParallelStyle, fake_mesh, shard_rank, shard_world
from dp_partition.plan.plan import PartitionPlan, Style

FORMAT = 1
_COLOURS = ("#4c78a8", "#72b7b2", "#9d9d9d", "#bab0ab", "#f58518", "#eeca3b", "#e45756", "#b279a2", "#54a24b")


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on one rank.

    Attributes:
        param_bytes: Parameters between steps.
        grad_bytes: Gradients after their reduction.
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
class Estimate:
    """Bytes and messages of one rank in a step.

    Attributes:
        name: Name of the train step.
        plan: Placements of parameters, gradients and state.
        rank: Rank of the numbers; under uneven shards the first ranks hold most.
        held: Bytes of parameters, gradients, state, buffers and batch on the rank.
        messages: Every collective of a step, in the order of issue.
        memory: Live memory at every node of the graph.
        check_bytes: Extra bytes of a checked call: full copies, and a snapshot of the shards.
    """

    name: str
    plan: PartitionPlan
    rank: int
    held: StaticMemory
    messages: tuple[Message, ...]
    memory: Memory
    check_bytes: int

    @property
    def world(self) -> int:
        """Number of data-parallel ranks."""
        return self.plan.world * self.plan.replicas  # replicas are ranks too

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes on the rank during a step."""
        return self.memory.peak_bytes

    def count(self, kind: str | None = None) -> int:
        """Return the number of collectives of a step, of one kind or of all."""
        return sum(kind is None or message.kind == kind for message in self.messages)

    def sent_bytes(self, kind: str | None = None) -> int:
        """Return the bytes sent by the rank in a step (see `Message`)."""
        return sum(message.sent_bytes for message in self.messages if kind is None or message.kind == kind)

    def explain(self, name: str | None = None) -> str:
        """Return text about the step, or about one parameter by its full name."""
        if name is not None:
            return "\n".join([self.plan.explain(name), *explain_messages(self.messages, self.plan[name].info.name)])
        held, memory = self.held, self.memory
        rows = {
            "parameters": held.param_bytes,
            "optimizer state": held.state_bytes,
            "buffers": held.buffer_bytes,
            "batch": held.batch_bytes,
            "gradients, once reduced": held.grad_bytes,
            f"peak, at node {memory.nodes[memory.peak]}": memory.peak_bytes,
            "a checked call, beside these": self.check_bytes,
        }
        numel = sum(math.prod(param.info.shape) for param in self.plan.params)
        return "\n".join([
            f"{self.name}: {self.plan.style.name.lower()} over {self.world} ranks, {self.plan.semantics} semantics; "
            f"{len(self.plan.params)} parameters, {numel:,} elements; bytes of rank {self.rank}:",
            *(f"  {what}: {size:,} ({human_bytes(size)})" for what, size in rows.items()),
            f"  in the peak: {', '.join(f'{kind} {human_bytes(size)}' for kind, size in memory.peak_kinds.items())}",
            *explain_sums(self.messages),
        ])  # fmt: skip

    def to_json(self) -> str:
        """Return everything but the memory of single nodes, as JSON."""
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
            "check": {"bytes": self.check_bytes},
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(data, sort_keys=True)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Write live memory over the graph's nodes as an SVG picture, by kind of tensor."""
        wide, high, peak = 960.0, 320.0, max(self.peak_bytes, 1)  # no division by zero
        step, below = wide / max(len(self.memory.live), 1), [0] * len(self.memory.live)
        shapes = [f'<text y="14">{escape(self.name)}, rank {self.rank}: peak {human_bytes(peak)}</text>']
        for number, kind in enumerate(KINDS):
            above = [low + at[number] for low, at in zip(below, self.memory.live, strict=True)]
            if above == below:  # no bytes of this kind
                continue
            # Along the upper edge and back along the lower one; a column as wide as its node.
            edge = [(x * step, y) for at, y in enumerate(above) for x in (at, at + 1)]
            edge += [(x * step, below[at]) for at in reversed(range(len(below))) for x in (at + 1, at)]
            points = " ".join(f"{x:.1f},{20 + high * (1 - y / peak):.1f}" for x, y in edge)
            title = f"<title>{kind}</title>"
            shapes.append(f'<polygon points="{points}" fill="{_COLOURS[number]}">{title}</polygon>')
            shapes.append(f'<text x="{wide + 8}" y="{32 + 16 * number}" fill="{_COLOURS[number]}">{kind}</text>')
            below = above
        size = f'viewBox="0 0 {wide + 100} {high + 24}" font-family="sans-serif" font-size="12"'
        Path(path).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(shapes)}</svg>\n')


def estimate(
    train_step: Callable[..., Any],
    *args: Any,
    world: int | tuple[int, int],
    style: Style | DataParallelStyle = "default",
    rank: int = 0,
    device: str | None = None,
    **settings: Any,
) -> Estimate:
    """Estimate the cost of a step on ``world`` ranks. Needs no process group, no device and no memory for weights.

    Tensors may be real or on the meta device; nothing is computed and no object of the caller is changed. Bytes of
    collectives are exact; live memory is that of the graph, without rounding by allocators and temporary memory
    of kernels.

    Args:
        train_step: The train step, as for `compile`.
        args: Its arguments: the model, its optimizer, one rank's batch.
        world: Number of data-parallel ranks; for ``"hybrid"`` of replicas, and of ranks in each.
        style: As for `compile`.
        rank: The rank to estimate for.
        device: Device to estimate for, for example ``"cuda"``; default: the tensors' own, the CPU for meta tensors.
            If it is not available here, the step is traced on the CPU and counted without the CPU's copies.
        settings: Other arguments of `compile`: ``semantics``, ``batch``, ``placements``, ``bucket_mb``, ``prefetch``,
            ``reshard_after_forward``, ``accumulate``, ...

    Raises:
        PlanError: As by `compile` or its first call.
    """
    problems = []
    try:
        torch.device(device or "cpu")
    except RuntimeError:
        problems.append(
            Problem(
                "invalid-argument",
                "device",
                found=repr(device),
                hint="pass a device as torch names it, for example 'cuda'",
            )
        )
    ranks = (world,) if isinstance(world, int) else world  # hybrid: replicas, and ranks in each
    if min(ranks) < 1 or not 0 <= rank < math.prod(ranks):
        problems.append(
            Problem(
                "invalid-argument",
                "world, rank",
                found=f"world={world}, rank={rank}",
                hint="world is at least 1, rank from 0 to world - 1",
            )
        )
    hint = "an estimate places nothing; leave it out"
    # These need placed parameters, or ranks.
    beyond = [name for name in ("mesh", "share", "backend") if name in settings]
    problems += [Problem("conflicting-arguments", n, found="passed to estimate", hint=hint) for n in beyond]
    if problems:
        raise PlanError(problems, "dp_partition.estimate")
    name = getattr(train_step, "__name__", "train_step")  # callables may have none
    call = read_arguments(name, args, {})
    step_state = find_step_state(train_step, call.args, {})
    check_traceable(step_state)  # as in a first call
    tensors = [*step_state.params.values(), *step_state.buffers.values()]
    on_meta = any(tensor.is_meta for tensor in tensors)
    # A device can be traced if it is here: autograd needs it, or ends with an error. Meta tensors, and those of other
    # devices, are traced as the CPU's: every operator has rules for it.
    here = torch.accelerator.current_accelerator(check_available=True)
    kinds = ("cpu",) if here is None else ("cpu", here.type)
    traced_on = device if device is not None and device.split(":")[0] in kinds else "cpu" if on_meta or device else None
    kind = torch.device(traced_on or (tensors[0].device.type if tensors else "cpu")).type
    mesh = fake_mesh(world, rank, kind)  # it cannot communicate
    runner = runner_of(compile_step(train_step, mesh=mesh, style=style, **settings))
    plan = runner.plan_for(step_state, shard_world(mesh))
    program = runner.traces.build(step_state, plan, call, traced_on)
    full = live_memory(program.module.graph, on_cpu=False).resident_bytes  # before local values replace global ones
    graph = program.with_local_values().graph  # at this rank's shapes from here on
    memory = live_memory(graph, on_cpu=torch.device(device or kind).type == "cpu")
    sizes = dict(zip(KINDS, memory.resident, strict=True))
    trained = [param for param in plan.params if param.info.requires_grad]
    grads = sum(p.local_numel(p.grad, plan.world, shard_rank(mesh)) * p.info.dtype.itemsize for p in trained)
    held = StaticMemory(sizes["parameters"], grads, sizes["optimizer"], sizes["buffers"], sizes["batch"])
    check = 2 * full + memory.resident_bytes  # copy, gradients, snapshot: as `CheckedCall`
    return Estimate(name, plan, rank, held, messages_of(graph, plan.world), memory, check)
