"""Choice of a parameter's format: a DTensor where placements describe the layout, else a local one, or a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shard_spec import _torch_compat
from shard_spec._shared.problems import Problem
from shard_spec.layout.intervals import PlacementSpec, sections
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import to_placement

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class ParameterFormat:
    """Format in which one layout is held.

    Attributes:
        kind: ``"dtensor"``; or ``"local"``: a plain parameter that carries ``_sharding_info``.
        specs: One for each mesh axis; an interleaved one only in a DTensor whose axes cut in another order than the
            mesh has them, as a number of sections.
        sections: For ``"local"``: the sizes of the sections of the interleaved dim.
    """

    kind: str
    specs: tuple[PlacementSpec, ...]
    sections: tuple[int, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement of torch's for each mesh axis; the sections of a local parameter are not in them."""
        if self.kind == "local":
            return tuple(dtensor_placement(PlacementSpec("S", t.dim) if t.kind == "I" else t) for t in self.specs)
        return tuple(dtensor_placement(spec) for spec in self.specs)


def choose_format(
    layout: Layout, shape: tuple[int, ...], name: str, *, local: bool = False, strided: bool = False
) -> ParameterFormat | Problem:
    """Return the format of a tensor of ``shape`` under ``layout``, or the problem that prevents one.

    Args:
        layout: It fits ``shape``.
        shape: Global shape.
        name: FQN, for the problem.
        local: Whether a weight that one axis interleaves may become a local parameter with sections.
        strided: Whether axes that cut one dim in another order than the mesh has them may become a strided shard.
    """
    plain = layout.canonical(shape)
    kinds = {spec.kind for spec in plain.specs}
    if layout.partial:
        return Problem("partial-parameter", name, found=str(layout), hint="replicate or shard what is stored")
    if kinds <= {"R", "S"} and not plain.order:
        # The axes as written, not canonical ones: an axis of one rank keeps its shard.
        return ParameterFormat("dtensor", tuple(_written(spec, len(shape)) for spec in layout.specs))
    if kinds <= {"R", "S"}:
        return _in_order(layout, shape, name, strided)
    special = [at for at, spec in enumerate(plain.specs) if spec.kind not in "RS"]
    spec = plain.specs[special[0]]
    axis = layout.mesh.axis_names[special[0]]
    if (
        local
        and spec.kind == "I"
        and all(other.kind == "R" for at, other in enumerate(plain.specs) if at != special[0])
    ):
        assert spec.dim is not None
        return ParameterFormat("local", plain.specs, tuple(size for _, size in sections(spec.arg, shape[spec.dim])))
    return Problem("not-expressible", name, spec.dim, axis, f"{layout}: {_why(spec.kind)}", _hint(spec.kind, local))


def _in_order(layout: Layout, shape: tuple[int, ...], name: str, strided: bool) -> ParameterFormat | Problem:
    """Axes that cut one dim in an order of their own, as in FSDP over tensor parallelism."""
    hint = "let the axes cut in mesh order, or turn the axes of the mesh around"
    specs, why = dtensor_specs(layout, shape)
    if why is None and not strided:
        why = "this call makes DTensors that cut in mesh order only"
    if why is None and not _torch_compat.computes_with_strided_shards():
        why = "operators of this torch are not known to be right on strided shards"
        hint += "; or use torch >= 2.13"
    if why is not None:
        return Problem("order-not-expressible", name, found=f"{layout}: {why}", hint=hint)
    return ParameterFormat("dtensor", specs)


def _written(spec: PlacementSpec, ndim: int) -> PlacementSpec:
    """The cut as it is written, whatever kind of cut it is called."""
    return PlacementSpec("R") if spec.dim is None else PlacementSpec("S", spec.dim % ndim)


def _why(kind: str) -> str:
    return {
        "U": "a DTensor cuts as torch.chunk does, not in sizes of your own",
        "B": "a DTensor cannot keep blocks whole",
        "I": "a DTensor cannot interleave sections",
    }[kind]


def _hint(kind: str, local: bool) -> str:
    if kind == "I":
        return (
            "a fused weight becomes a local parameter where all other axes replicate; or use tp-styles' fused styles"
            if local
            else "use plan.apply, or tp-styles' fused styles"
        )
    return "use Shard(dim) here; shard-reshard moves tensors in any layout"


# ---- specs that a DTensor has placements for ----


def dtensor_specs(layout: Layout, shape: tuple[int, ...] | None) -> tuple[tuple[PlacementSpec, ...], str | None]:
    """The layout in specs that have a DTensor placement (R, P, S, and I with a number of sections), or why not.

    Without a shape only what holds for every shape is said.
    """
    if shape is not None:
        plain = layout.canonical(shape)
        pairs = zip(layout.specs, plain.specs, strict=True)
        # Axes of one rank keep their shard as written: canonical() replicates them.
        kept = [_from_front(spec, len(shape)) if spec.kind == "S" else canon for spec, canon in pairs]
        layout = Layout(layout.mesh, kept, plain.order)
    specs = [_equal_sections(spec) for spec in layout.specs]
    for spec in specs:
        if spec.kind not in "RPS" and not (spec.kind == "I" and isinstance(spec.arg, int)):
            return (), _WHY[spec.kind]
    if not layout.order:
        return tuple(specs), None
    if shape is None:
        return (), "whether DTensor can say this order depends on the shape; pass the model"
    strided = _strided(layout, specs)
    if strided is not None and Layout(layout.mesh, strided).equivalent_to(layout, shape):
        return strided, None
    return (), "DTensor cuts in mesh order, and a strided shard puts other rows on some ranks here"


def _from_front(spec: PlacementSpec, ndim: int) -> PlacementSpec:
    assert spec.dim is not None
    return spec._replace(dim=spec.dim % ndim)


_WHY = {
    "U": "a DTensor cuts as torch.chunk does, not in sizes of your own",
    "B": "a DTensor cannot keep blocks whole",
    "I": "a DTensor's strided shard has sections of one size only",
}


def _equal_sections(spec: PlacementSpec) -> PlacementSpec:
    """Sections of one size are a number of sections, whatever comes before: torch.chunk cuts them alike."""
    if spec.kind == "I" and isinstance(spec.arg, tuple) and len(set(spec.arg)) == 1:
        return PlacementSpec("I", spec.dim, len(list(sections(spec.arg, sum(spec.arg)))))
    return spec


def _strided(layout: Layout, specs: list[PlacementSpec]) -> tuple[PlacementSpec, ...] | None:
    """Mesh order, with a strided shard on each axis that cuts after a later one."""
    if any(spec.kind == "I" for spec in specs):
        return None
    names = layout.mesh.axis_names
    found = list(specs)
    for place, axis in enumerate(layout.order):
        at = names.index(axis)
        before = [names.index(other) for other in layout.order[:place]]
        later = [b for b in before if b > at and specs[b].dim == specs[at].dim]
        factor = 1
        for other in later:
            factor *= layout.mesh.shape[other]
        if factor > 1:
            found[at] = PlacementSpec("I", specs[at].dim, factor)
    return tuple(found)


def dtensor_placement(spec: PlacementSpec) -> Any:
    """Torch's placement of a spec; an interleaved one has a number of sections."""
    if spec.kind == "I":
        assert spec.dim is not None
        assert isinstance(spec.arg, int)
        return _torch_compat.strided_shard(spec.dim, spec.arg)
    return to_placement(spec)
