"""Movement of tensors between ranks, and the format of a parameter there.

Ranks exchange decisions, and tensors of any dtype and layout as exact bytes.

A call makes its DeviceMeshes over the ranks of a group. A parameter is a DTensor if placements express its layout, else
a local one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_spec import _torch_compat
from shard_spec._shared.consensus import as_bytes, assert_consistent, problems_of
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout import (
    REPLICATE,
    BlockShard,
    InterleavedShard,
    Layout,
    MeshSpec,
    PlacementSpec,
    ShardSpec,
    SpecialShard,
    StageShard,
    UnevenShard,
    to_placement,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

T = TypeVar("T")


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the given group, or the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            Problem(
                "no-process-group",
                found="torch.distributed is not initialized",
                hint="call torch.distributed.init_process_group first; planning needs no process group",
            )
        )
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise PlanError(
            Problem(
                "rank-outside-mesh",
                "process_group",
                found=f"rank {dist.get_rank()} is not in the process group it passed",
                hint="call it on members only",
            )
        )
    return group


def on_all_ranks(
    group: dist.ProcessGroup, subject: str, work: Callable[[], T], lines: Callable[[T], Sequence[str]] = lambda _: ()
) -> T:
    """Return what ``work`` gives once it succeeded, with equal ``lines`` about it, on every rank. A collective.

    ``work`` sends nothing. What it raises on one rank, all ranks raise: a PlanError with the problems of all ranks, or
    ``ranks-disagree`` with the different lines.
    """
    facts: Sequence[str] = ()
    error = None
    try:
        value = work()
        facts = lines(value)
    except Exception as failure:  # this rank still meets its peers
        error = PlanError(problems_of(failure))
    assert_consistent(group, subject, facts, error, hint="pass the same to every rank of the group")
    return value


def source_problems(src_rank: object, size: int) -> list[Problem]:
    """Report a source that is no rank of the group."""
    if isinstance(src_rank, int) and not isinstance(src_rank, bool) and 0 <= src_rank < size:
        return []
    return [Problem("invalid-argument", "src_rank", found=repr(src_rank), hint=f"a rank in the group, 0 to {size - 1}")]


def take(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The shard of ``full`` that lies on global rank ``rank``. A view where it is one box."""
    shard = full.detach()
    for dim, intervals in enumerate(layout.intervals(rank, tuple(full.shape))):
        parts = [shard.narrow(dim, start, size) for start, size in intervals]
        shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return shard


def broadcast_(tensor: torch.Tensor, group: dist.ProcessGroup, src: int) -> torch.Tensor:
    """Fill a contiguous tensor with what rank ``src`` of the group has in it."""
    if tensor.numel():
        dist.broadcast(as_bytes(tensor), group=group, group_src=src)
    return tensor


def gather_shards(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """The whole tensor on every rank, from the shards of a layout without partial sums. One collective."""
    ranks = dist.get_process_group_ranks(group)
    numels = [prod(layout.local_shape(rank, shape)) for rank in ranks]
    most = max(numels)
    mine = local.new_empty(most)
    mine[: local.numel()] = local.detach().reshape(-1)
    every = local.new_empty(most * len(ranks))
    if most:
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        all_gather(as_bytes(every), as_bytes(mine), group=group)
    full = local.new_empty(shape)
    for rank, numel, padded in zip(ranks, numels, torch.split(every, most or 1), strict=False):
        shard = padded[:numel].view(layout.local_shape(rank, shape))
        for box, part in zip(layout.boxes(rank, shape), split(shard, layout, rank, shape), strict=True):
            full[box.slices()] = part
    return full


def split(local: torch.Tensor, layout: Layout, rank: int, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Split the local tensor of ``rank`` into views of its boxes, in their order."""
    views = [local]
    for dim, intervals in enumerate(layout.intervals(rank, shape)):
        sizes = [size for _, size in intervals]
        views = [part for view in views for part in torch.split(view, sizes, dim)]
    return tuple(view for view in views if view.numel())


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
        (specs, why), way_on = dtensor_specs(layout, shape), ""
        if why is None and not strided:
            why = "this call makes DTensors that shard in mesh order only"
        if why is None and not _torch_compat.computes_with_strided_shards():
            why, way_on = "this torch computes strided shards wrongly in some operators", "; or use torch >= 2.13"
        if why is None:
            return ParameterFormat("dtensor", specs)
        hint = f"let the axes shard in mesh order, or reverse the axes of the mesh{way_on}"
        return Problem("not-expressible", name, found=f"{layout}: {why}", hint=hint)
    spec = plain.specs[special[0]]
    axis = layout.mesh.axis_names[special[0]]
    if (
        local
        and isinstance(spec, InterleavedShard)
        and all(other == REPLICATE for at, other in enumerate(plain.specs) if at != special[0])
    ):
        return ParameterFormat("local", plain.specs, tuple(size for _, size in spec.section_intervals(shape[spec.dim])))
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
