"""What a parameter becomes: a DTensor where its placements can say the layout, else a local parameter or a problem."""

from __future__ import annotations

from dataclasses import dataclass

from shard_spec.layout import Layout
from shard_spec.problems import Problem


@dataclass(frozen=True)
class Expression:
    """How one layout is held.

    Attributes:
        kind: ``"dtensor"``; or ``"local"``: a plain parameter that carries ``_sharding_info``.
        dims: For each mesh axis the dim it cuts, None where it replicates.
        sections: For ``"local"``: the sizes of the sections of the interleaved dim.
    """

    kind: str
    dims: tuple[int | None, ...]
    sections: tuple[int, ...] = ()


def express(layout: Layout, shape: tuple[int, ...], name: str, *, local: bool = False) -> Expression | Problem:
    """How a tensor of ``shape`` under ``layout`` is held, or why it cannot be.

    Args:
        layout: It fits ``shape``.
        shape: Global shape.
        name: FQN, for the problem.
        local: Whether a weight that one axis interleaves may become a local parameter with sections.
    """
    plain = layout.canonical(shape)
    dims = tuple(None if term.dim is None else term.dim for term in plain.terms)
    kinds = {term.kind for term in plain.terms}
    if layout.partial:
        return Problem("partial-parameter", name, found=str(layout), hint="replicate or shard what is stored")
    if kinds <= {"R", "S"} and not plain.order:
        # The axes as written, not canonical ones: an axis of one rank keeps its shard.
        written = tuple(None if term.dim is None else term.dim % len(shape) for term in layout.terms)
        return Expression("dtensor", written)
    if kinds <= {"R", "S"}:
        hint = "let the axes cut in mesh order, or turn the axes of the mesh around"
        return Problem("order-not-expressible", name, found=f"{layout}: a DTensor cuts in mesh order", hint=hint)
    special = [at for at, term in enumerate(plain.terms) if term.kind not in "RS"]
    term = plain.terms[special[0]]
    axis = layout.mesh.axis_names[special[0]]
    if (
        local
        and term.kind == "I"
        and all(other.kind == "R" for at, other in enumerate(plain.terms) if at != special[0])
    ):
        assert term.dim is not None
        return Expression("local", dims, _section_sizes(term.arg, shape[term.dim]))
    return Problem("not-expressible", name, term.dim, axis, f"{layout}: {_why(term.kind)}", _hint(term.kind, local))


def _section_sizes(arg: object, length: int) -> tuple[int, ...]:
    from shard_spec.terms import sections

    return tuple(size for _, size in sections(arg, length))


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
