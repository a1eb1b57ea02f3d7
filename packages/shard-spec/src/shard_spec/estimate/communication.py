"""Communication of one training step under a plan, axis by axis.

Along data axes by units (see :mod:`shard_spec.estimate.fully_shard`), to the byte. Along model axes a step runs on
shapes (see :mod:`shard_spec.estimate.activations`): tensor-parallel training moves activations at each boundary.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from shard_spec._shared.page import human_bytes
from shard_spec.estimate.activations import Step
from shard_spec.estimate.cost import AlphaBetaCostModel, Topology
from shard_spec.estimate.exchanges import Stages, of_fullest_stage, stages_of
from shard_spec.estimate.fully_shard import Transfer, unit_transfers
from shard_spec.estimate.memory import MemorySettings, owned_matrices
from shard_spec.estimate.optimizers import OptimizerChoice
from shard_spec.estimate.step_options import StepOptions, expert_modules, policy_of, uncounted_axes
from shard_spec.formatting import Table
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.resolve import Resolution


@dataclass(frozen=True, eq=False)
class Communication:
    """Communication volume of one step.

    Attributes:
        mesh: The mesh of the axes.
        transfers: One entry for each tensor, axis and kind of collective, for the fullest rank.
        seconds: Axis to the time of its collectives in sequence, if a topology was given.
        assumptions: Assumptions about activations.
        flops: Floating-point operations of one rank's products in the step; 0 without a batch.
        compute_seconds: Their time, if a topology was given with a batch.
    """

    mesh: MeshSpec
    transfers: tuple[Transfer, ...]
    seconds: dict[str, float] | None
    assumptions: tuple[str, ...]
    flops: int = 0
    compute_seconds: float | None = None

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Least and most time of the step: all collectives beside the products, or one after another."""
        if self.seconds is None or self.compute_seconds is None:
            return None
        sent = sum(self.seconds.values())
        return max(sent, self.compute_seconds), sent + self.compute_seconds

    def by_axis(self) -> dict[str, dict[str, float]]:
        """Return each rank's sent bytes of a step, by axis and kind of content."""
        totals: dict[str, dict[str, float]] = {axis: {} for axis in self.mesh.axis_names}
        for transfer in self.transfers:
            kinds = totals[transfer.axis]
            kinds[transfer.what] = kinds.get(transfer.what, 0.0) + transfer.sent_bytes
        return totals

    def count(self, axis: str | None = None, op: str | None = None) -> int:
        """Count the collectives of a step, optionally of one axis or kind."""
        return sum(t.count for t in self.transfers if axis in (None, t.axis) and op in (None, t.op))

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by each rank in a step, over all axes."""
        return sum(transfer.sent_bytes for transfer in self.transfers)

    def to_json(self) -> str:
        """Return the numbers as JSON."""
        document: dict[str, Any] = {
            "format": "shard-spec/communication",
            "version": 1,
            "by_axis": self.by_axis(),
            "seconds": self.seconds,
            "flops": self.flops,
            "compute_seconds": self.compute_seconds,
            "assumptions": list(self.assumptions),
            "transfers": [[t.axis, t.op, t.what, t.name, t.full_bytes, t.count] for t in self.transfers],
        }
        return json.dumps(document, sort_keys=True, indent=1)

    def __str__(self) -> str:
        sums: dict[tuple[str, str, str], list[float]] = {}  # a line for each axis and kind of collective
        for transfer in self.transfers:
            entry = sums.setdefault((transfer.axis, transfer.what, transfer.op), [0, 0.0])
            entry[0] += transfer.count
            entry[1] += transfer.sent_bytes
        rows = [[*key, str(int(count)), human_bytes(sent)] for key, (count, sent) in sums.items()]
        head = ["axis", "what", "collective", "count", "sent by each rank"]
        lines = [str(Table(head, rows, (3, 4))) if rows else "nothing moves"]
        if self.seconds is not None:
            times = ", ".join(f"{axis} {seconds * 1e3:.2f} ms" for axis, seconds in self.seconds.items())
            lines.append(f"time of the collectives, one after another: {times}")
        if self.step_seconds is not None:
            least, most = (f"{seconds * 1e3:.2f}" for seconds in self.step_seconds)
            products = f"{self.flops / 1e12:.3g} TFLOP of products in {self.compute_seconds or 0:.3g} s"
            lines.append(f"time of the step: {least} to {most} ms, collectives beside or after {products}")
        return "\n".join([*lines, *(f"- {line}" for line in self.assumptions)])


def communication_of(
    resolution: Resolution,
    step: Step | None,
    options: StepOptions,
    optimizer: OptimizerChoice,
    *,
    topology: Topology | None = None,
    cost_model: AlphaBetaCostModel | None = None,
) -> Communication:
    """Return the communication of a step of a resolved plan; see ``ShardingPlan.communication``.

    Args:
        resolution: The plan on its model.
        step: Its simulated step; None: activations are not counted.
        options: How the step runs.
        optimizer: The optimizer, which may exchange gradients and values of its own.
        topology: Machine for times.
        cost_model: Times of collectives and products on it.
    """
    mesh = resolution.one_mesh
    roles = resolution.axis_roles(options.get("data_axes"))
    data, model_axes = roles.data, roles.axes("model")
    transfers = unit_transfers(resolution, roles, options)
    lines = [
        f"data axes (ranks see different samples): {', '.join(data) or 'none'}",
        f"model axes (ranks see the same samples): {', '.join(model_axes) or 'none'}",
        "weights sharded along a data axis are gathered for the forward and again for the backward, the root once",
    ]
    if step is None:
        lines.append("no batch given: activations are not counted")
    else:
        flow = step.flow
        for (axis, op, what, name, size, at), count in Counter(flow.collectives).items():
            if axis in (*model_axes, *roles.axes("expert", "context", "stage")) and mesh.axis_size(axis) > 1:
                uses, stage = count * options.get("accumulate", 1), at if step.stages is not None else None
                transfers.append(Transfer(axis, op, what, name, size, uses, mesh.axis_size(axis), stage))
        experts = expert_modules(resolution.metadata.parameters)
        for axis in model_axes:
            names = [each.name for each in flow.weights.values() if axis in each.other and each.is_weight]
            names = [name for name in names if name.rpartition(".")[0] not in experts]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"{axis}: activations around {names[0]}{more} are not counted: no linear or embedding")
    if sparse := [tensor.name for tensor in resolution.metadata.parameters if tensor.sparse_grad and data]:
        lines.append(f"gradients of sparse tables ({', '.join(sparse[:3])}) are not counted: they depend on the batch")
    exchanged, remarks = _of_optimizer(resolution, data, options, optimizer)
    transfers += exchanged
    lines += remarks
    if (stages := stages_of(resolution)) is not None:
        transfers += _sums_of_copies(resolution, stages, options)
        transfers, fullest = of_fullest_stage(transfers)
        lines.append(
            f"{stages.axis}: bytes are those of stage {fullest}, which sends most; products those of the busiest"
        )
    seconds, compute, flops = None, None, 0
    if step is not None:
        flops = max(step.flow.flops.values(), default=0) * options.get("accumulate", 1)
    if topology is not None:
        model: Any = cost_model or AlphaBetaCostModel()
        seconds = {}
        for axis in mesh.axis_names:
            link = topology.link(mesh.axes, axis, mesh.rank_list)
            seconds[axis] = sum(t.count * getattr(model, t.op)(t.full_bytes, link) for t in transfers if t.axis == axis)
        compute = model.compute(flops, topology) if step is not None else None
    counted = {each.axis for each in transfers if each.what == "activations"}
    if counted & set(roles.axes("expert")):
        lines.append("tokens travel to experts and back by all-to-all; routing counts as even")
    lines += [*roles.assumptions, *uncounted_axes(mesh, roles, counted)]
    return Communication(mesh, tuple(transfers), seconds, tuple(lines), flops, compute)


def _sums_of_copies(resolution: Resolution, stages: Stages, options: StepOptions) -> list[Transfer]:
    """Return the sums of gradients of tied weights, which lie on several stages."""
    sums = []
    dtype = policy_of(options)["reduce_dtype"] or options.get("dtype")
    for tensor in resolution.metadata.parameters:
        layout = resolution.layouts.get(tensor.name)
        if layout is None or not tensor.requires_grad or not (copies := stages.copies(tensor, layout)):
            continue
        for stage in (layout.stages[stages.axis], *copies):
            size = tensor.bytes_of(prod(layout.local_shape(layout.first_rank, tensor.shape)), dtype)
            sums.append(Transfer(stages.axis, "all_reduce", "gradients", tensor.name, size, 1, 1 + len(copies), stage))
    return sums


def _of_optimizer(
    resolution: Resolution, data: tuple[str, ...], options: StepOptions, optimizer: OptimizerChoice
) -> tuple[list[Transfer], list[str]]:
    """Return the exchanges of an optimizer's step, and lines about them: parameters of ZeRO-1, matrices of owners."""
    mesh, dtype = resolution.one_mesh, options.get("dtype")
    transfers, lines = [], []
    for axis in (axis for axis in data if options.get("zero") and mesh.axis_size(axis) > 1):
        trained = (each for each in resolution.metadata.parameters if each.requires_grad and each.is_floating)
        held = ((each, resolution.layouts[each.name]) for each in trained if each.name in resolution.layouts)
        size = sum(each.bytes_of(prod(at.local_shape(at.first_rank, each.shape)), dtype) for each, at in held)
        transfers.append(Transfer(axis, "all_gather", "parameters", "", size, 1, mesh.axis_size(axis)))
    owned = owned_matrices(resolution, MemorySettings(optimizer, True, dtype))
    if owned is not None and (world := mesh.world_size) > 1:
        axis = next(name for name, size in mesh.axes.items() if size > 1)
        for what, total in zip(("gradients", "parameters"), owned.sent, strict=True):
            # A rank sends the mean of `total`; a full buffer is what that would be a part of.
            transfers.append(Transfer(axis, "all_to_all", what, "owners", round(total / (world - 1)), 1, world))
        lines.append(f"matrices on owners: gradients there and values back among all {world} ranks, counted at {axis}")
    return transfers, lines
