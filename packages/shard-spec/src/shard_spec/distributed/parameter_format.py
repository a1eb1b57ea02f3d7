"""DeviceMeshes over the ranks of a group, and the format of a parameter: a DTensor if placements express its layout,
else a local one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_spec import _torch_compat
from shard_spec._shared.problems import Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import (
    REPLICATE,
    BlockShard,
    InterleavedShard,
    PlacementSpec,
    ShardSpec,
    SpecialShard,
    StageShard,
    UnevenShard,
    to_placement,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class GroupRef:
    """A process group that survives ``copy.deepcopy`` and, within one job, pickling, by its name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, in group order."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    def __getstate__(self) -> dict[str, str]:
        return {"name": self.group.group_name}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.group = _torch_compat.group_of_name(state["name"])


class MeshCache:
    """Meshes of one call: one for each shape, order of ranks and axis names."""

    def __init__(self, group: GroupRef, device_type: str, layouts: Iterable[Layout]) -> None:
        """Create the meshes of ``layouts``, and the 1-D one in the order of the group. A collective of the group."""
        flat = MeshSpec({"shard": group.size}, group.ranks)
        self._meshes: dict[MeshSpec, DeviceMesh] = {}
        for key in dict.fromkeys([flat, *map(_key_of, layouts)]):
            if key.ndim == 1:  # its ranks are those of the group, in order
                self._meshes[key] = DeviceMesh.from_group(group.group, device_type, mesh_dim_names=key.axis_names)
            else:  # over the default group: others were refused
                self._meshes[key] = key.to_device_mesh(device_type)
        self.flat = self._meshes[flat]

    def mesh_of(self, layout: Layout) -> DeviceMesh:
        """Return the mesh of ``layout``."""
        return self._meshes[_key_of(layout)]


def _key_of(layout: Layout) -> MeshSpec:
    """Return a mesh key; made-up axis names (``shard0``, ``shard1``) share their meshes."""
    names = tuple("shard" if re.fullmatch(r"shard\d+", name) else name for name in layout.mesh.axis_names)
    if len(set(names)) < len(names):
        names = tuple(f"{name}{at}" for at, name in enumerate(names))
    return MeshSpec(dict(zip(names, layout.mesh.shape, strict=True)), layout.mesh.ranks)


@dataclass(frozen=True)
class ParameterFormat:
    """Format of a parameter under one layout."""

    kind: str  # "dtensor", or "local": a plain parameter with ``_sharding_info``
    # One for each mesh axis. An interleaved one in a DTensor has a number of sections: axes not in mesh order.
    specs: tuple[PlacementSpec, ...]
    sections: tuple[int, ...] = ()  # of "local": sizes of the sections of the interleaved dim

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Torch's placement for each mesh axis; without the sections of a local parameter."""
        specs = self.specs
        if self.kind == "local":
            specs = tuple(ShardSpec(spec.dim) if isinstance(spec, InterleavedShard) else spec for spec in specs)
        return tuple(map(dtensor_placement, specs))


def choose_format(
    layout: Layout, shape: tuple[int, ...], name: str, *, local: bool = False, strided: bool = False
) -> ParameterFormat | Problem:
    """Return a tensor's format under a valid ``layout`` for its global shape, or the problem that prevents one.

    ``local`` allows a local parameter with sections for a weight interleaved by one axis; ``strided`` allows a strided
    shard for axes that shard one dim in another order than the mesh's.
    """
    plain = layout.canonical(shape)
    special = [at for at, spec in enumerate(plain.specs) if isinstance(spec, SpecialShard)]
    if layout.partial:  # a parameter has no pending sum
        return Problem("partial-value", name, found=str(layout), hint="replicate or shard what is stored")
    if not special and not plain.order:
        # The axes as written, not canonical ones: an axis of one rank keeps its shard.
        dims = [None if spec.dim is None else spec.dim % len(shape) for spec in layout.specs]
        return ParameterFormat("dtensor", tuple(REPLICATE if dim is None else ShardSpec(dim) for dim in dims))
    if not special:  # axes in another order than the mesh's (FSDP over TP)
        hint = "let the axes shard in mesh order, or reverse the axes of the mesh"
        specs, why = dtensor_specs(layout, shape)
        if why is None and not strided:
            why = "this call makes DTensors that shard in mesh order only"
        if why is None and not _torch_compat.computes_with_strided_shards():
            why = "this torch computes strided shards wrongly in some operators"
            hint += "; or use torch >= 2.13"
        if why is not None:
            return Problem("not-expressible", name, found=f"{layout}: {why}", hint=hint)
        return ParameterFormat("dtensor", specs)
    spec = plain.specs[special[0]]
    axis = layout.mesh.axis_names[special[0]]
    if (
        local
        and isinstance(spec, InterleavedShard)
        and all(other == REPLICATE for at, other in enumerate(plain.specs) if at != special[0])
    ):
        section_sizes = tuple(size for _, size in spec.section_intervals(shape[spec.dim]))
        return ParameterFormat("local", plain.specs, section_sizes)
    hint = "use Shard(dim) here; shard-reshard moves tensors in any layout"
    if isinstance(spec, InterleavedShard):
        hint = "use plan.apply, or tp-styles' fused styles"
        if local:
            hint = "a fused weight becomes a local parameter where all other axes replicate; or use tp-styles"
    return Problem("not-expressible", name, spec.dim, axis, f"{layout}: {_WHY[type(spec)]}", hint)


# ---- specs with DTensor placements ----


def dtensor_specs(layout: Layout, shape: tuple[int, ...] | None) -> tuple[tuple[PlacementSpec, ...], str | None]:
    """Return specs with DTensor placements (R, P, S, I by number), or a reason against.

    Without a shape the result holds for every shape.
    """
    if shape is not None:
        plain = layout.canonical(shape)
        pairs = zip(layout.specs, plain.specs, strict=True)
        # Axes of one rank keep their shard as written: canonical() replicates them.
        specs_written = [spec.from_front(len(shape)) if isinstance(spec, ShardSpec) else canon for spec, canon in pairs]
        layout = Layout(layout.mesh, specs_written, plain.order)
    specs = list(layout.specs)
    for at, spec in enumerate(specs):
        sections = getattr(spec, "sections", None)
        if isinstance(sections, tuple) and len(set(sections)) == 1:  # torch.chunk shards sections of one size alike
            specs[at] = spec = InterleavedShard(spec.dim or 0, len(sections))
        if isinstance(spec, SpecialShard) and not isinstance(getattr(spec, "sections", None), int):
            return (), _WHY[type(spec)]
    if not layout.order:  # mesh order is DTensor's own
        return tuple(specs), None
    if shape is None:  # equivalence needs one
        return (), "this order depends on the shape in a DTensor; pass the model"
    # In mesh order, with strided shards on axes applied after later ones. An interleaved spec has no second factor.
    names, in_order = layout.mesh.axis_names, list(specs)
    for place, axis in enumerate(layout.order):
        at, dim = names.index(axis), specs[names.index(axis)].dim
        before = [names.index(other) for other in layout.order[:place]]
        factor = prod(layout.mesh.shape[b] for b in before if b > at and specs[b].dim == dim)
        if factor > 1 and dim is not None:
            in_order[at] = InterleavedShard(dim, factor)
    interleaved = any(isinstance(spec, InterleavedShard) for spec in specs)
    if not interleaved and Layout(layout.mesh, in_order).equivalent_to(layout, shape):
        return tuple(in_order), None
    return (), "DTensor shards in mesh order, and a strided shard puts other rows on some ranks here"


_WHY: dict[type, str] = {
    UnevenShard: "a DTensor shards as torch.chunk does, not in other sizes",
    BlockShard: "a DTensor cannot keep blocks together",
    InterleavedShard: "a DTensor cannot interleave these sections",
    StageShard: "a DTensor lies on every rank of its mesh; apply the plan of one stage on the mesh of its other axes",
}


def dtensor_placement(spec: PlacementSpec) -> Any:
    """Return torch's placement of a spec; an interleaved one has a number of sections."""
    if isinstance(spec, InterleavedShard):
        assert isinstance(spec.sections, int)
        return _torch_compat.strided_shard(spec.dim, spec.sections)
    return to_placement(spec)
