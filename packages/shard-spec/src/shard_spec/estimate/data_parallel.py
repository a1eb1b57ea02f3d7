"""Groups of parameters that data-parallel ranks gather and scatter together, as FSDP2's ``fully_shard`` does.

A unit is a wrapped module with the parameters that no unit inside of it has; the root takes the rest. One unit is one
all-gather for each use and one reduction of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shard_spec._shared.dtypes import ITEM_BYTES
from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.roles import EXPERT_AXIS_NAMES, expert_modules, local_numels, role
from shard_spec.layout.placements import SpecialShard
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata
from shard_spec.plan.resolve import Resolution


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind for one tensor or unit in a step.

    Attributes:
        axis: Mesh axis of the communicating groups.
        op: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        what: Kind of content: ``"parameters"``, ``"gradients"`` or ``"activations"``.
        name: FQN of the tensor or of the unit's module; ``""`` is the root.
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


def block_names(metadata: ModelMetadata) -> list[str]:
    """Return FQNs of the repeated blocks: children of outermost `ModuleList`s of several modules."""
    children: dict[str, list[str]] = {}
    for name in metadata.modules:  # in the order of the modules: outer ones first
        if name and metadata.modules.get(name.rpartition(".")[0]) == "ModuleList":
            children.setdefault(name.rpartition(".")[0], []).append(name)
    blocks: dict[str, None] = {}
    for name in (name for names in children.values() if len(names) > 1 for name in names):
        if not any(name[:at] in blocks for at in range(len(name)) if name[at] == "."):
            blocks[name] = None
    return list(blocks)


def units_of(metadata: ModelMetadata, units: Iterable[str] | None) -> dict[str, list[TensorMetadata]]:
    """Return the parameters of each unit by the FQN of its module. ``""`` is the root.

    ``units`` are FQNs or patterns of wrapped modules beside the root. By default they are the repeated blocks.
    """
    names = block_names(metadata)
    if units is not None:
        patterns = [Pattern(text) for text in ([units] if isinstance(units, str) else units)]
        names = [name for name in metadata.modules if name and any(each.matches(name) for each in patterns)]
        unused = [each.text for each in patterns if not any(each.matches(name) for name in metadata.modules)]
        if unused:
            hint = "FQNs of modules that fully_shard wraps, or patterns of them"
            raise PlanError([Problem("unmatched-pattern", text, found="no module", hint=hint) for text in unused])
    members: dict[str, list[TensorMetadata]] = {name: [] for name in (*names, "")}
    for tensor in metadata.parameters:
        above = [name for name in names if tensor.name.startswith(f"{name}.")]
        members[max(above, key=len, default="")].append(tensor)
    return members


def unit_transfers(
    resolution: Resolution, data_axes: tuple[str, ...], units: Iterable[str] | None, dtype: str | None
) -> list[Transfer]:
    """Return each unit's collectives along data axes, in the order of the units.

    The root is gathered once a step, since FSDP2 frees it at the end alone; other units for forward and for backward.
    """
    mesh = resolution.one_mesh
    mesh_at = {axis: at for at, axis in enumerate(mesh.axis_names)}
    experts = expert_modules(resolution.metadata.parameters)
    transfers: list[Transfer] = []
    for unit, tensors in units_of(resolution.metadata, units).items():
        sums: dict[tuple[str, str, str], int] = {}
        for tensor in tensors:
            layout = resolution.layouts.get(tensor.name)
            if layout is None:  # a Sharder's
                continue
            # Of plain chunks rank 0 has the most elements.
            special = any(isinstance(spec, SpecialShard) for spec in layout.specs)
            first = prod(layout.local_shape(layout.mesh.ranks[0], tensor.shape))
            numel = max(local_numels(layout, tensor.shape)) if special else first
            # experts stay on their expert axis: tokens travel
            stays = EXPERT_AXIS_NAMES if tensor.name.rpartition(".")[0] in experts else ()
            for axis in data_axes:
                if mesh.axis_size(axis) == 1 or (axis in stays and role(tensor, layout, axis) != "whole"):
                    continue
                trains, is_whole = tensor.requires_grad and tensor.is_floating, role(tensor, layout, axis) == "whole"
                size = numel * (ITEM_BYTES[dtype] if dtype and tensor.is_floating else tensor.item_bytes)
                if is_whole and trains:
                    sums[axis, "all_reduce", "gradients"] = sums.get((axis, "all_reduce", "gradients"), 0) + size
                if is_whole:
                    continue
                # Other data axes that shard the tensor are gathered first, from the last axis to the first.
                later = [other for other in data_axes if other not in stays and mesh_at[other] >= mesh_at[axis]]
                size *= prod(mesh.axis_size(other) for other in later if role(tensor, layout, other) != "whole")
                moved = (("all_gather", "parameters"), ("reduce_scatter", "gradients"))
                for op, what in moved if trains else moved[:1]:
                    sums[axis, op, what] = sums.get((axis, op, what), 0) + size
        for (axis, op, what), size in sums.items():
            uses = 2 if op == "all_gather" and unit else 1
            transfers.append(Transfer(axis, op, what, unit, size, uses, mesh.axis_size(axis)))
    return transfers


def gathered_bytes(transfers: Iterable[Transfer]) -> dict[str, int]:
    """Return the bytes of each unit's parameters when they are gathered along all data axes."""
    sizes: dict[str, int] = {}
    for each in transfers:
        if each.op == "all_gather":  # the outermost axis gathers what inner ones have gathered
            sizes[each.name] = max(sizes.get(each.name, 0), each.full_bytes)
    return sizes
