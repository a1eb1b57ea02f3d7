"""Choice of a parameter's format: a DTensor where placements describe the layout, else a local one, or a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shard_spec import _torch_compat
from shard_spec._shared.problems import Problem
from shard_spec.layout.intervals import Term, sections
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import from_term

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class ParameterFormat:
    """Format in which one layout is held.

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
    kinds = {term.kind for term in plain.terms}
    if layout.partial:
        return Problem("partial-value", name, found=str(layout), hint="replicate or shard what is stored")
    if kinds <= {"R", "S"} and not plain.order:
        # The axes as written, not canonical ones: an axis of one rank keeps its shard.
        return ParameterFormat("dtensor", tuple(_written(term, len(shape)) for term in layout.terms))
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
        return ParameterFormat("local", plain.terms, tuple(size for _, size in sections(term.arg, shape[term.dim])))
    return Problem("not-expressible", name, term.dim, axis, f"{layout}: {_why(term.kind)}", _hint(term.kind, local))


def _in_order(layout: Layout, shape: tuple[int, ...], name: str, strided: bool) -> ParameterFormat | Problem:
    """Axes that cut one dim in an order of their own, as in FSDP over tensor parallelism."""
    hint = "let the axes cut in mesh order, or turn the axes of the mesh around"
    terms, why = dtensor_terms(layout, shape)
    if why is None and not strided:
        why = "this call makes DTensors that cut in mesh order only"
    if why is None and not _torch_compat.computes_with_strided_shards():
        why = "operators of this torch are not known to be right on strided shards"
        hint += "; or use torch >= 2.13"
    if why is not None:
        return Problem("not-expressible", name, found=f"{layout}: {why}", hint=hint)
    return ParameterFormat("dtensor", terms)


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


# ---- terms that a DTensor has placements for ----


def dtensor_terms(layout: Layout, shape: tuple[int, ...] | None) -> tuple[tuple[Term, ...], str | None]:
    """The layout in terms that have a DTensor placement (R, P, S, and I with a number of sections), or why not.

    Without a shape only what holds for every shape is said.
    """
    if shape is not None:
        plain = layout.canonical(shape)
        pairs = zip(layout.terms, plain.terms, strict=True)
        # Axes of one rank keep their shard as written: canonical() replicates them.
        kept = [_from_front(term, len(shape)) if term.kind == "S" else canon for term, canon in pairs]
        layout = Layout(layout.mesh, kept, plain.order)
    terms = [_equal_sections(term) for term in layout.terms]
    for term in terms:
        if term.kind not in "RPS" and not (term.kind == "I" and isinstance(term.arg, int)):
            return (), _WHY[term.kind]
    if not layout.order:
        return tuple(terms), None
    if shape is None:
        return (), "whether DTensor can say this order depends on the shape; pass the model"
    strided = _strided(layout, terms)
    if strided is not None and Layout(layout.mesh, strided).equivalent_to(layout, shape):
        return strided, None
    return (), "DTensor cuts in mesh order, and a strided shard puts other rows on some ranks here"


def _from_front(term: Term, ndim: int) -> Term:
    assert term.dim is not None
    return term._replace(dim=term.dim % ndim)


_WHY = {
    "U": "a DTensor cuts as torch.chunk does, not in sizes of your own",
    "B": "a DTensor cannot keep blocks whole",
    "I": "a DTensor's strided shard has sections of one size only",
}


def _equal_sections(term: Term) -> Term:
    """Sections of one size are a number of sections, whatever comes before: torch.chunk cuts them alike."""
    if term.kind == "I" and isinstance(term.arg, tuple) and len(set(term.arg)) == 1:
        return Term("I", term.dim, len(list(sections(term.arg, sum(term.arg)))))
    return term


def _strided(layout: Layout, terms: list[Term]) -> tuple[Term, ...] | None:
    """Mesh order, with a strided shard on each axis that cuts after a later one."""
    if any(term.kind == "I" for term in terms):
        return None
    names = layout.mesh.axis_names
    found = list(terms)
    for place, axis in enumerate(layout.order):
        at = names.index(axis)
        before = [names.index(other) for other in layout.order[:place]]
        later = [b for b in before if b > at and terms[b].dim == terms[at].dim]
        factor = 1
        for other in later:
            factor *= layout.mesh.shape[other]
        if factor > 1:
            found[at] = Term("I", terms[at].dim, factor)
    return tuple(found)


def dtensor_placement(term: Term) -> Any:
    """Torch's placement of a term; an interleaved one has a number of sections."""
    if term.kind == "I":
        assert term.dim is not None
        assert isinstance(term.arg, int)
        return _torch_compat.strided_shard(term.dim, term.arg)
    return from_term(term)
