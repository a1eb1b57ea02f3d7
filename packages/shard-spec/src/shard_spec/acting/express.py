"""What a parameter becomes: a DTensor where its placements can say the layout, else a local parameter or a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shard_spec import _torch_compat
from shard_spec.convert.dtensor import dtensor_placement, dtensor_terms
from shard_spec.layout import Layout
from shard_spec._shared.problems import Problem
from shard_spec.terms import Term, sections

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Expression:
    """How one layout is held.

    Attributes:
        kind: ``"dtensor"``; or ``"local"``: a plain parameter that carries ``_sharding_info``.
        terms: One for each mesh axis; an interleaved one only in a DTensor whose axes cut in another order than the
            mesh has them, as a number of sections.
        sections: For ``"local"``: the sizes of the sections of the interleaved dim.
    """

    kind: str
    terms: tuple[Term, ...]
    sections: tuple[int, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement of torch's for each mesh axis; the sections of a local parameter are not in them."""
        if self.kind == "local":
            return tuple(dtensor_placement(Term("S", t.dim) if t.kind == "I" else t) for t in self.terms)
        return tuple(dtensor_placement(term) for term in self.terms)


def express(
    layout: Layout, shape: tuple[int, ...], name: str, *, local: bool = False, strided: bool = False
) -> Expression | Problem:
    """How a tensor of ``shape`` under ``layout`` is held, or why it cannot be.

    Args:
        layout: It fits ``shape``.
        shape: Global shape.
        name: FQN, for the problem.
        local: Whether a weight that one axis interleaves may become a local parameter with sections.
        strided: Whether axes that cut one dim in another order than the mesh has them may become a strided shard.
    """
    plain = layout.canonical(shape)
    kinds = {term.kind for term in plain.terms}
    if layout.partial:
        return Problem("partial-parameter", name, found=str(layout), hint="replicate or shard what is stored")
    if kinds <= {"R", "S"} and not plain.order:
        # The axes as written, not canonical ones: an axis of one rank keeps its shard.
        return Expression("dtensor", tuple(_written(term, len(shape)) for term in layout.terms))
    if kinds <= {"R", "S"}:
        return _in_order(layout, shape, name, strided)
    special = [at for at, term in enumerate(plain.terms) if term.kind not in "RS"]
    term = plain.terms[special[0]]
    axis = layout.mesh.axis_names[special[0]]
    if (
        local
        and term.kind == "I"
        and all(other.kind == "R" for at, other in enumerate(plain.terms) if at != special[0])
    ):
        assert term.dim is not None
        return Expression("local", plain.terms, tuple(size for _, size in sections(term.arg, shape[term.dim])))
    return Problem("not-expressible", name, term.dim, axis, f"{layout}: {_why(term.kind)}", _hint(term.kind, local))


def _in_order(layout: Layout, shape: tuple[int, ...], name: str, strided: bool) -> Expression | Problem:
    """Axes that cut one dim in an order of their own, as in FSDP over tensor parallelism."""
    hint = "let the axes cut in mesh order, or turn the axes of the mesh around"
    terms, why = dtensor_terms(layout, shape)
    if why is None and not strided:
        why = "this call makes DTensors that cut in mesh order only"
    if why is None and not _torch_compat.computes_with_strided_shards():
        why = "operators of this torch are not known to be right on strided shards"
        hint += "; or use torch >= 2.13"
    if why is not None:
        return Problem("order-not-expressible", name, found=f"{layout}: {why}", hint=hint)
    return Expression("dtensor", terms)


def _written(term: Term, ndim: int) -> Term:
    """The cut as it is written, whatever kind of cut it is called."""
    return Term("R") if term.dim is None else Term("S", term.dim % ndim)


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
