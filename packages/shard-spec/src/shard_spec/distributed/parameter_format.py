"""DeviceMeshes over the ranks of a group, and the format of a parameter: a DTensor if placements express its layout,
else a local one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.distributed.exchange import group_or_default, on_all_ranks, scatter
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import (
    REPLICATE,
    BlockShard,
    InterleavedShard,
    PlacementSpec,
    ShardSpec,
    SpecialShard,
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

    def __init__(self, group: GroupRef, device_type: str) -> None:
        self.group = group
        self.device_type = device_type
        self._meshes: dict[MeshSpec, DeviceMesh] = {}

    def prepare(self, layouts: Iterable[Layout]) -> None:
        """Create the meshes of ``layouts``, and the 1-D one in the order of the group; a collective of the group.

        Raises:
            PlanError: On every rank, before anything else: ``no-process-group``.
        """
        keys = list(dict.fromkeys([self._flat_key(), *map(_key_of, layouts)]))
        wanted = [members for key in keys if key.ndim > 1 for groups in _groups(key) for members in groups]
        if wanted:  # new groups are needed
            self._check(wanted)
        for key in keys:
            self._meshes[key] = self._make(key)

    def mesh_of(self, layout: Layout) -> DeviceMesh:
        """Return the mesh of ``layout``.

        Raises:
            PlanError: ``mesh-mismatch`` for an output with a spec that fixes its layout at run time only.
        """
        key = _key_of(layout)
        if key not in self._meshes:
            reason = f"a mesh of shape {key.shape} over ranks {list(key.ranks)}, which was not known before the forward"
            hint = "shard outputs with a ChunkShardingSpec, an EnumerableShardingSpec or a Layout"
            raise PlanError(Problem("mesh-mismatch", found=reason, hint=hint))
        return self._meshes[key]

    def flat_mesh(self) -> DeviceMesh:
        """Return the 1-D mesh in the order of the group."""
        return self._meshes[self._flat_key()]

    def _flat_key(self) -> MeshSpec:
        return MeshSpec({"shard": self.group.size}, self.group.ranks)

    def _check(self, wanted: list[tuple[int, ...]]) -> None:
        if self.group.size == dist.get_world_size():  # all ranks of the job take part
            return
        counts: list[int] = [0] * self.group.size
        dist.all_gather_object(counts, _torch_compat.num_groups(), group=self.group.group)
        if len(set(counts)) > 1:
            # Torch names a group created by its members only after their number of groups.
            reason = f"new groups are needed, {list(wanted[0])} first, and the ranks know {counts} groups"
            hint = "use the default group, or shard along one axis"
            raise PlanError(Problem("no-process-group", "process_group", found=reason, hint=hint))

    def _make(self, key: MeshSpec) -> DeviceMesh:
        if key.ndim == 1:  # its ranks are those of the group, in order
            return DeviceMesh.from_group(self.group.group, self.device_type, mesh_dim_names=key.axis_names)
        own = [self._own_group(groups) for groups in _groups(key)]
        grid = torch.tensor(list(key.ranks), dtype=torch.int, device="cpu").view(key.shape)
        return DeviceMesh.from_group(own, self.device_type, mesh=grid, mesh_dim_names=key.axis_names)

    def _own_group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
        """Return this rank's group of one axis; every rank creates the groups in one order."""
        everybody, me = self.group.size == dist.get_world_size(), dist.get_rank()
        mine = [_torch_compat.new_ordered_group(list(each), everybody) for each in groups if everybody or me in each]
        (own,) = [each for each in mine if each is not None]
        assert isinstance(own, dist.ProcessGroup)
        return own


def _groups(mesh: MeshSpec) -> list[tuple[tuple[int, ...], ...]]:
    return [mesh.axis_groups(axis) for axis in mesh.axis_names]


def _key_of(layout: Layout) -> MeshSpec:
    """Return a mesh key; made-up axis names (``shard0``, ``shard1``) share their meshes."""
    names = tuple("shard" if re.fullmatch(r"shard\d+", name) else name for name in layout.mesh.axis_names)
    if len(set(names)) < len(names):
        names = tuple(f"{name}{at}" for at, name in enumerate(names))
    return MeshSpec(dict(zip(names, layout.mesh.shape, strict=True)), layout.mesh.ranks)


@dataclass(frozen=True)
class ParameterFormat:
    """Format of a parameter under one layout.

    Attributes:
        kind: ``"dtensor"``; or ``"local"``: a plain parameter with ``_sharding_info``.
        specs: One for each mesh axis; an interleaved one only in a DTensor with axes that do not shard in mesh order,
            as a number of sections.
        sections: For ``"local"``: the sizes of the sections of the interleaved dim.
    """

    kind: str
    specs: tuple[PlacementSpec, ...]
    sections: tuple[int, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Torch's placement for each mesh axis; without the sections of a local parameter."""
        if self.kind == "local":
            return tuple(
                dtensor_placement(ShardSpec(t.dim) if isinstance(t, InterleavedShard) else t) for t in self.specs
            )
        return tuple(dtensor_placement(spec) for spec in self.specs)


def choose_format(
    layout: Layout, shape: tuple[int, ...], name: str, *, local: bool = False, strided: bool = False
) -> ParameterFormat | Problem:
    """Return a tensor's format under ``layout``, or the problem that prevents one.

    Args:
        layout: A valid layout for ``shape``.
        shape: Global shape.
        name: FQN, for the problem.
        local: True to allow a local parameter with sections for a weight interleaved by one axis.
        strided: True to allow a strided shard for axes that shard one dim in another order than the mesh's.
    """
    plain = layout.canonical(shape)
    special = [at for at, spec in enumerate(plain.specs) if isinstance(spec, SpecialShard)]
    if layout.partial:  # a parameter has no pending sum
        return Problem("partial-value", name, found=str(layout), hint="replicate or shard what is stored")
    if not special and not plain.order:
        # The axes as written, not canonical ones: an axis of one rank keeps its shard.
        return ParameterFormat("dtensor", tuple(_written(spec, len(shape)) for spec in layout.specs))
    if not special:
        return _in_order(layout, shape, name, strided)
    spec = plain.specs[special[0]]
    axis = layout.mesh.axis_names[special[0]]
    if (
        local
        and isinstance(spec, InterleavedShard)
        and all(other == REPLICATE for at, other in enumerate(plain.specs) if at != special[0])
    ):
        section_sizes = tuple(size for _, size in spec.section_intervals(shape[spec.dim]))
        return ParameterFormat("local", plain.specs, section_sizes)
    return Problem("not-expressible", name, spec.dim, axis, f"{layout}: {_WHY[type(spec)]}", _hint(spec, local))


def _in_order(layout: Layout, shape: tuple[int, ...], name: str, strided: bool) -> ParameterFormat | Problem:
    """Return the format of axes in another order than the mesh's, as in FSDP over TP."""
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


def _written(spec: PlacementSpec, ndim: int) -> PlacementSpec:
    """Return the plain shard of a spec with its dim counted from the front."""
    return REPLICATE if spec.dim is None else ShardSpec(spec.dim % ndim)


def _hint(spec: PlacementSpec, local: bool) -> str:
    if isinstance(spec, InterleavedShard):
        return (
            "a fused weight becomes a local parameter where all other axes replicate; or use tp-styles' fused styles"
            if local
            else "use plan.apply, or tp-styles' fused styles"
        )
    return "use Shard(dim) here; shard-reshard moves tensors in any layout"


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
    specs = [_equal_sections(spec) for spec in layout.specs]
    for spec in specs:
        if isinstance(spec, SpecialShard) and not isinstance(getattr(spec, "sections", None), int):
            return (), _WHY[type(spec)]
    if not layout.order:  # mesh order is DTensor's own
        return tuple(specs), None
    if shape is None:  # equivalence needs one
        return (), "this order depends on the shape in a DTensor; pass the model"
    strided = _strided(layout, specs)
    if strided is not None and Layout(layout.mesh, strided).equivalent_to(layout, shape):
        return strided, None
    return (), "DTensor shards in mesh order, and a strided shard puts other rows on some ranks here"


_WHY: dict[type, str] = {
    UnevenShard: "a DTensor shards as torch.chunk does, not in other sizes",
    BlockShard: "a DTensor cannot keep blocks together",
    InterleavedShard: "a DTensor cannot interleave these sections",
}


def _equal_sections(spec: PlacementSpec) -> PlacementSpec:
    """Convert sections of one size to a number of sections: torch.chunk shards them alike."""
    if isinstance(spec, InterleavedShard) and isinstance(spec.sections, tuple) and len(set(spec.sections)) == 1:
        return InterleavedShard(spec.dim, len(spec.sections))
    return spec


def _strided(layout: Layout, specs: list[PlacementSpec]) -> tuple[PlacementSpec, ...] | None:
    """Return specs in mesh order, with strided shards on axes applied after later ones."""
    if any(isinstance(spec, InterleavedShard) for spec in specs):  # no second factor possible
        return None
    names = layout.mesh.axis_names
    strided = list(specs)
    for place, axis in enumerate(layout.order):
        at = names.index(axis)
        before = [names.index(other) for other in layout.order[:place]]
        dim = specs[at].dim
        factor = prod(layout.mesh.shape[b] for b in before if b > at and specs[b].dim == dim)
        if factor > 1 and dim is not None:
            strided[at] = InterleavedShard(dim, factor)
    return tuple(strided)


def dtensor_placement(spec: PlacementSpec) -> Any:
    """Return torch's placement of a spec; an interleaved one has a number of sections."""
    if isinstance(spec, InterleavedShard):
        assert isinstance(spec.sections, int)
        return _torch_compat.strided_shard(spec.dim, spec.sections)
    return to_placement(spec)


def shard_tensor(
    tensor: torch.Tensor,
    place: Callable[[tuple[int, ...]], tuple[Layout, torch.device | None]],
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> DTensor:
    """Scatter one tensor from ``src_rank`` of the group, without changing it; a collective.

    Args:
        tensor: The full tensor on the source; shape and dtype are used on every rank.
        place: Global shape -> layout over the ranks of the group, and this rank's device, if named.
        src_rank: Rank in the group with the values.
        process_group: Default: the default group.

    Raises:
        PlanError: Before any transfer, on every rank.
    """
    group = group_or_default(process_group)

    def lines(planned: tuple[Layout, torch.device]) -> list[str]:
        frozen = "" if tensor.requires_grad else ", frozen"
        where = f"{planned[0]} on ranks {list(planned[0].mesh.ranks)}, source {src_rank}, on {planned[1].type}"
        return [f"tensor {tensor.dtype} {list(tensor.shape)}{frozen} -> {where}"]

    layout, device = on_all_ranks(group, "shard", lambda: _planned(tensor, place, src_rank, group), lines)
    shape = tuple(tensor.shape)
    meshes = MeshCache(GroupRef(group), device.type)
    meshes.prepare([layout])
    full = tensor.detach() if dist.get_rank(group) == src_rank else None  # other ranks may pass meta tensors
    local = scatter(full, layout, shape, tensor.dtype, device, group, src_rank)
    value = as_dtensor(local, layout, shape, "tensor", meshes)
    value.requires_grad_(tensor.requires_grad)
    return value


def _planned(
    tensor: object,
    place: Callable[[tuple[int, ...]], tuple[Layout, torch.device | None]],
    src_rank: int,
    group: dist.ProcessGroup,
) -> tuple[Layout, torch.device]:
    """Return layout and device of the shards, without communication."""
    if not isinstance(tensor, torch.Tensor):
        reason = f"{tensor!r:.200} of type {type(tensor).__qualname__}"
        raise PlanError(Problem("wrong-type", "tensor", found=reason, hint="give the full tensor"))
    shape, ranks = tuple(tensor.shape), tuple(dist.get_process_group_ranks(group))
    layout, device = place(shape)
    problems = [*source_problems(src_rank, len(ranks)), *rank_problems("tensor", tuple(layout.mesh.ranks), ranks)]
    expression = choose_format(layout, shape, "tensor")
    problems += [expression] if isinstance(expression, Problem) else []
    if tensor.is_meta and dist.get_rank(group) == src_rank:
        hint = "give the source rank real values; only the other ranks may have meta tensors"
        problems.append(Problem("no-data", "tensor", found="a meta tensor on src_rank", hint=hint))
    raise_problems(problems)
    return layout, device or (group_device(group) if tensor.is_meta else tensor.device)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the kind of device of the group's communication."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def source_problems(src_rank: object, size: int) -> list[Problem]:
    """Report a source that is no rank of the group."""
    if isinstance(src_rank, int) and not isinstance(src_rank, bool) and 0 <= src_rank < size:
        return []
    hint = f"a rank in the group, 0 to {size - 1}"
    return [Problem("invalid-argument", "src_rank", found=repr(src_rank), hint=hint)]


def as_dtensor(local: torch.Tensor, layout: Layout, shape: tuple[int, ...], name: str, meshes: MeshCache) -> DTensor:
    """Convert this rank's shard to a DTensor."""
    expression = choose_format(layout, shape, name)
    assert isinstance(expression, ParameterFormat)  # planned
    return dtensor_of(local, meshes.mesh_of(layout), expression.placements, shape)


def dtensor_of(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Convert a local shard to a DTensor of global ``shape``; from_local alone assumes equal shards."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def rank_problems(name: str, named: tuple[int, ...], ranks: tuple[int, ...]) -> list[Problem]:
    """Report ranks of the layout outside the group, the converse, and ranks in another order than the group's."""
    outside = sorted(set(named) - set(ranks))
    missing = sorted(set(ranks) - set(named))
    problems = []
    if outside:
        reason, hint = f"ranks {outside} are not in the group {list(ranks)}", "name global ranks of the group"
        problems.append(Problem("rank-outside-mesh", name, found=reason, hint=hint))
    if missing:
        reason = f"ranks {missing} of the group hold nothing"
        hint = "name every rank of the group once, or pass a smaller process_group"
        problems.append(Problem("rank-outside-mesh", name, found=reason, hint=hint))
    if not problems and named != ranks:
        # Torch sorts the ranks of new groups, and would gather shards in that order without an error.
        reason, hint = f"ranks in the order {list(named)}", f"name them in the order of the group, {list(ranks)}"
        problems.append(Problem("mesh-mismatch", name, found=reason, hint=hint))
    return problems
