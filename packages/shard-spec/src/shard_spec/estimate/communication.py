"""Communication of one training step under a plan, axis by axis.

Parameters and gradients are counted to the byte. Activations follow from the roles of the weights (see
:mod:`shard_spec.estimate.roles`): tensor-parallel training moves them with one collective at each boundary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shard_spec.estimate.cost import AlphaBetaCostModel
from shard_spec.estimate.memory import local_numels
from shard_spec.estimate.roles import (
    EXPERT_AXIS_NAMES,
    PIPELINE_AXIS_NAMES,
    Batch,
    data_axes_of,
    expert_modules,
    is_embedding,
    num_tokens,
    role,
    uncounted_axes,
    weight_dims,
)
from shard_spec.formatting import communication_parts, joined
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import SpecialShard
from shard_spec.plan.metadata import ITEM_BYTES, TensorMetadata, require_floating
from shard_spec.plan.resolve import Resolution

if TYPE_CHECKING:
    from shard_spec.estimate.cost import CostModel, Topology


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind for one tensor in a step.

    Attributes:
        axis: Mesh axis of the communicating groups.
        op: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        what: Kind of content: ``"parameters"``, ``"gradients"`` or ``"activations"``.
        name: FQN of the tensor.
        full_bytes: Bytes of the full buffer of one group: after a gather, before a scatter, in a reduction.
        count: Number of collectives in a step.
        group_size: Ranks in a group.
    """

    axis: str
    op: str
    what: str
    name: str
    full_bytes: int
    count: int
    group_size: int

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by each rank in the step, at a ring's minimum."""
        passes = 2 if self.op == "all_reduce" else 1  # reduce-scatter, then all-gather
        return self.count * passes * self.full_bytes * (self.group_size - 1) / self.group_size


@dataclass(frozen=True, eq=False)
class Communication:
    """Communication volume of one step.

    Attributes:
        mesh: The mesh of the axes.
        transfers: One entry for each tensor, axis and kind of collective, for the fullest rank.
        seconds: Axis to the time of its collectives in sequence, if a topology was given.
        assumptions: Assumptions about activations.
    """

    mesh: MeshSpec
    transfers: tuple[Transfer, ...]
    seconds: dict[str, float] | None
    assumptions: tuple[str, ...]

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
            "assumptions": list(self.assumptions),
            "transfers": [[t.axis, t.op, t.what, t.name, t.full_bytes, t.count] for t in self.transfers],
        }
        return json.dumps(document, sort_keys=True, indent=1)

    def __str__(self) -> str:
        return joined(communication_parts(self))


def communication(
    found: Resolution,
    batch: Batch | None = None,
    *,
    topology: Topology | None = None,
    data_axes: Iterable[str] | None = None,
    dtype: str | None = None,
    cost_model: CostModel | None = None,
) -> Communication:
    """Return the communication of a step of a resolved plan; see ``ShardingPlan.communication``."""
    require_floating(dtype)
    mesh = found.one_mesh
    data = data_axes_of(mesh, data_axes)
    step = _Step(mesh, data, num_tokens(batch, prod(map(mesh.axis_size, data))), dtype)
    transfers: list[Transfer] = []
    experts = expert_modules(found.metadata.parameters)
    for tensor in found.metadata.parameters:
        layout = found.layouts.get(tensor.name)
        # experts stay on their expert axis: tokens travel
        stays = EXPERT_AXIS_NAMES if tensor.name.rpartition(".")[0] in experts else ()
        if layout is not None:
            gathered = tuple(axis for axis in data if axis not in stays)
            for axis in (axis for axis, size in mesh.axes.items() if size > 1 and axis in data):
                if axis in gathered or role(tensor, layout, axis) == "whole":
                    transfers += step.along_data(tensor, layout, axis, gathered)
    if step.tokens is not None:
        transfers += _activations(found, step)
    seconds = None if topology is None else _seconds(mesh, transfers, topology, cost_model)
    return Communication(mesh, tuple(transfers), seconds, (*_assumptions(step), *_uncounted_weights(found, step)))


@dataclass(frozen=True)
class _Step:
    """Settings shared by all transfers of a step."""

    mesh: MeshSpec
    data_axes: tuple[str, ...]
    tokens: int | None
    dtype: str | None

    def item_bytes(self, tensor: TensorMetadata) -> int:
        return ITEM_BYTES[self.dtype] if self.dtype and tensor.is_floating else tensor.item_bytes

    @property
    def local_tokens(self) -> int:
        return -(-(self.tokens or 0) // prod(map(self.mesh.axis_size, self.data_axes)))

    def along_data(
        self, tensor: TensorMetadata, layout: Layout, axis: str, gathered: tuple[str, ...]
    ) -> list[Transfer]:
        """Gather for each use and scatter the gradient if sharded; all-reduce the gradient if replicated."""
        local = _largest_local_bytes(layout, tensor, self.item_bytes(tensor))
        size = self.mesh.axis_size(axis)
        trains = tensor.requires_grad and tensor.is_floating
        if role(tensor, layout, axis) == "whole":
            return [Transfer(axis, "all_reduce", "gradients", tensor.name, local, 1, size)] if trains else []
        # Other data axes that shard the tensor are gathered first, from the last axis to the first.
        inner = 1
        for other in gathered:
            if self.mesh.axis_index(other) >= self.mesh.axis_index(axis) and role(tensor, layout, other) != "whole":
                inner *= self.mesh.axis_size(other)
        full = local * inner
        uses = 2 if trains else 1  # gathered for forward and backward; frozen ones for forward only
        moved = [Transfer(axis, "all_gather", "parameters", tensor.name, full, uses, size)]
        if trains:
            moved.append(Transfer(axis, "reduce_scatter", "gradients", tensor.name, full, 1, size))
        return moved


def _activations(found: Resolution, step: _Step) -> list[Transfer]:
    """Return transfers along model axes: after row-, before column-sharded weights, and at the model's ends."""
    transfers: list[Transfer] = []
    weights = [
        (tensor, found.layouts[tensor.name])
        for tensor in found.metadata.parameters
        if tensor.name in found.layouts and weight_dims(tensor) is not None
    ]
    for axis in _model_axes(step):
        size = step.mesh.axis_size(axis)
        if size == 1:  # no communication
            continue
        roles = {tensor.name: role(tensor, layout, axis) for tensor, layout in weights}
        row_parents = {_parent(t.name) for t, _ in weights if roles[t.name] == "row" and not is_embedding(t)}
        entered: set[tuple[str, int]] = set()  # siblings share one reduction
        for tensor, _ in weights:
            kind = roles[tensor.name]
            dims = weight_dims(tensor)
            assert dims is not None
            out_bytes = step.local_tokens * tensor.shape[dims[0]] * step.item_bytes(tensor)
            in_bytes = step.local_tokens * tensor.shape[dims[1]] * step.item_bytes(tensor)
            if kind == "row":
                transfers.append(Transfer(axis, "all_reduce", "activations", tensor.name, out_bytes, 1, size))
            elif kind == "column" and is_embedding(tensor):
                transfers.append(Transfer(axis, "all_gather", "activations", tensor.name, out_bytes, 1, size))
            elif kind == "column":
                entry = (_parent(tensor.name), tensor.shape[dims[1]])
                # Siblings (q, k, v; gate, up) share one input and one reduction of its gradient.
                if entry not in entered:
                    entered.add(entry)
                    transfers.append(Transfer(axis, "all_reduce", "activations", tensor.name, in_bytes, 1, size))
                if _parent(tensor.name) not in row_parents:  # no row-sharded weight takes the sharded output
                    transfers.append(Transfer(axis, "all_gather", "activations", tensor.name, out_bytes, 1, size))
    return transfers


def _uncounted_weights(found: Resolution, step: _Step) -> list[str]:
    """Return remarks, by model axis, on sharded weights of modules of unknown use."""
    remarks = []
    for axis in _model_axes(step) if step.tokens is not None else ():
        names = [
            tensor.name
            for tensor in found.metadata.parameters
            if len(tensor.shape) > 1
            and tensor.name in found.layouts
            and role(tensor, found.layouts[tensor.name], axis) == "cut"
        ]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            remarks.append(f"{axis}: activations around {names[0]}{more} are not counted: no linear or embedding")
    return remarks


def _model_axes(step: _Step) -> list[str]:
    return [axis for axis in step.mesh.axis_names if axis not in (*step.data_axes, *PIPELINE_AXIS_NAMES)]


def _parent(name: str) -> str:
    """Return the FQN two levels up: equal for sibling projections of one block."""
    return ".".join(name.split(".")[:-2])


def _largest_local_bytes(layout: Layout, tensor: TensorMetadata, item_bytes: int) -> int:
    if not any(isinstance(spec, SpecialShard) for spec in layout.specs):  # plain chunks: rank 0 is the fullest
        return prod(layout.local_shape(layout.mesh.ranks[0], tensor.shape)) * item_bytes
    return max(local_numels(layout, tensor.shape)) * item_bytes


def _seconds(
    mesh: MeshSpec, transfers: list[Transfer], topology: Topology, cost_model: CostModel | None
) -> dict[str, float]:
    model: Any = cost_model or AlphaBetaCostModel()
    ranks = None if mesh.rank_list is None else mesh.rank_list
    seconds = {}
    for axis in mesh.axis_names:
        link = topology.link(mesh.axes, axis, ranks)
        seconds[axis] = sum(t.count * getattr(model, t.op)(t.full_bytes, link) for t in transfers if t.axis == axis)
    return seconds


def _assumptions(step: _Step) -> tuple[str, ...]:
    lines = [
        f"data axes (ranks see different samples): {', '.join(step.data_axes) or 'none'}",
        f"model axes (ranks see the same samples): {', '.join(_model_axes(step)) or 'none'}",
        "weights sharded along a data axis are gathered for the forward and again for the backward",
    ]
    if step.tokens is None:
        lines.append("no batch given: activations are not counted")
    else:
        lines.append(f"{step.tokens} tokens a step, {step.local_tokens} on each rank; one collective at each boundary")
    return (*lines, *uncounted_axes(step.mesh))
