"""Groups of parameters that data-parallel ranks gather and scatter together, as FSDP2's ``fully_shard`` does.

A unit is a wrapped module with the parameters that no unit inside of it has; the root takes the rest. One unit is one
all-gather for each use and one reduction of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shard_spec._shared.patterns import Pattern
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.estimate.fully_shard import UnitBytes
from shard_spec.estimate.roles import expert_modules, local_shapes, role
from shard_spec.estimate.step_options import StepOptions, check_effects, check_options, policy_of
from shard_spec.layout.placements import SpecialShard, StageShard
from shard_spec.plan.axis_roles import AxisRoles
from shard_spec.plan.metadata import ModelMetadata, TensorMetadata
from shard_spec.plan.resolve import Resolution


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind for one tensor or unit in a step.

    Attributes:
        axis: Mesh axis of the communicating groups.
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"p2p"`` (to the next stage).
        what: Kind of content: ``"parameters"``, ``"gradients"`` or ``"activations"``.
        name: FQN of the tensor or of the unit's module; ``""`` is the root.
        full_bytes: Bytes of the full buffer of one group: after a gather, before a scatter, in a reduction.
        count: Number of collectives in a step.
        group_size: Ranks in a group.
        stage: Pipeline stage whose ranks send; None for all.
    """

    axis: str
    op: str
    what: str
    name: str
    full_bytes: int
    count: int
    group_size: int
    stage: int | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by each rank in the step, at a ring's minimum."""
        if self.op == "p2p":
            return float(self.count * self.full_bytes)
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
            raise PlanError(
                [
                    Problem(
                        "unmatched-pattern",
                        text,
                        found="no module",
                        hint="FQNs of modules that fully_shard wraps, or patterns of them",
                    )
                    for text in unused
                ]
            )
    members: dict[str, list[TensorMetadata]] = {name: [] for name in (*names, "")}
    for tensor in metadata.parameters:
        above = [name for name in names if tensor.name.startswith(f"{name}.")]
        members[max(above, key=len, default="")].append(tensor)
    return members


def unit_transfers(resolution: Resolution, roles: AxisRoles, options: StepOptions) -> list[Transfer]:
    """Return each unit's collectives along data axes, in the order of the units.

    The root is gathered once a batch, since FSDP2 frees it at the end alone; other units for forward and for backward.

    Raises:
        PlanError: For options that are wrong, or of no effect on this plan.
    """
    check_options(options)
    units, policy = options.get("units"), policy_of(options)
    compute, accumulate = policy["param_dtype"] or options.get("dtype"), options.get("accumulate", 1)
    reduce = policy["reduce_dtype"] or compute
    in_backward = options.get("reshard_after_forward", True)
    mesh, data_axes = resolution.one_mesh, roles.data
    mesh_at = {axis: at for at, axis in enumerate(mesh.axis_names)}
    experts = expert_modules(resolution.metadata.parameters)
    transfers: list[Transfer] = []
    for unit, tensors in units_of(resolution.metadata, units).items():
        sums: dict[tuple[str, str, str, int | None], int] = {}
        for tensor in tensors:
            layout = resolution.layouts.get(tensor.name)
            if layout is None:  # a Sharder's
                continue
            # Of plain chunks rank 0 has the most elements.
            special = any(isinstance(spec, SpecialShard) and not isinstance(spec, StageShard) for spec in layout.specs)
            first = prod(layout.local_shape(layout.first_rank, tensor.shape))
            stage = next(iter(layout.stages.values()), None)
            numel = max(map(prod, local_shapes(layout, tensor.shape))) if special else first
            # experts stay on their expert axis: tokens travel
            stays = roles.axes("expert") if tensor.name.rpartition(".")[0] in experts else ()
            for axis in data_axes:
                if mesh.axis_size(axis) == 1 or (axis in stays and role(tensor, layout, axis) != "whole"):
                    continue
                trains, is_whole = tensor.requires_grad and tensor.is_floating, role(tensor, layout, axis) == "whole"
                size = tensor.bytes_of(numel, compute)
                reduced = tensor.bytes_of(numel, reduce)
                if is_whole and trains and not tensor.sparse_grad:
                    key = axis, "all_reduce", "gradients", stage
                    sums[key] = sums.get(key, 0) + reduced
                if is_whole:
                    continue
                # Other data axes that shard the tensor are gathered first, from the last axis to the first.
                later = [other for other in data_axes if other not in stays and mesh_at[other] >= mesh_at[axis]]
                pieces = prod(mesh.axis_size(other) for other in later if role(tensor, layout, other) != "whole")
                moved = (("all_gather", "parameters", size), ("reduce_scatter", "gradients", reduced))
                for op, what, own in moved if trains else moved[:1]:
                    sums[axis, op, what, stage] = sums.get((axis, op, what, stage), 0) + own * pieces
        for (axis, op, what, stage), size in sums.items():
            uses = accumulate * (1 + (bool(unit) and in_backward)) if op == "all_gather" else accumulate
            uses = 1 if op != "all_gather" and options.get("sync") == "last" else uses
            transfers.append(Transfer(axis, op, what, unit, size, uses, mesh.axis_size(axis), stage))
    shards = any(each.op == "all_gather" for each in transfers)
    check_effects(options, shards=shards, replicates=any(mesh.axis_size(axis) > 1 for axis in data_axes))
    return transfers


def unit_bytes(
    resolution: Resolution, transfers: Iterable[Transfer], units: Iterable[str] | None, dtype: str | None
) -> dict[str, UnitBytes]:
    """Return the bytes of each unit that is gathered along data axes, by its FQN."""
    full: dict[tuple[str, str], int] = {}
    for each in transfers:  # the outermost axis gathers what inner ones have gathered
        full[each.name, each.op] = max(full.get((each.name, each.op), 0), each.full_bytes)
    members = units_of(resolution.metadata, units)
    sizes = {}
    for unit in (unit for unit, op in full if op == "all_gather"):
        trained = [each for each in members[unit] if each.requires_grad and each.name in resolution.layouts]
        shards = 0
        for tensor in trained:
            layout = resolution.layouts[tensor.name]
            shards += tensor.bytes_of(prod(layout.local_shape(layout.first_rank, tensor.shape)), dtype)
        sizes[unit] = UnitBytes(full[unit, "all_gather"], full.get((unit, "reduce_scatter"), 0), shards)
    return sizes
