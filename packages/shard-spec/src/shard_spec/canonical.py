"""Canonical layouts and equality by bytes: two spellings of one layout are recognised as one."""

from __future__ import annotations

from shard_spec.layout import Layout, cuts_by_dim
from shard_spec.mesh import MeshSpec
from shard_spec._shared.problems import raise_problems
from shard_spec.terms import REPLICATE, Term, pieces


def canonical(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The plainest layout that puts the same bytes on the same ranks for ``shape``.

    Negative dims are counted from the front, axes of one rank replicate, a special placement that cuts exactly where
    ``torch.chunk`` would becomes a plain shard, and an order that changes nothing is dropped.
    """
    raise_problems(layout.problems(shape))
    terms = [_plain_dim(term, len(shape)) for term in layout.terms]
    terms = [REPLICATE if size == 1 else term for size, term in zip(layout.mesh.shape, terms, strict=True)]
    for dim, cuts in cuts_by_dim(layout, len(shape)):
        real = [cut for cut in cuts if cut[1] > 1]
        if real:
            at, count, term = real[0]  # later cuts see stretches of several lengths: left as they are written
            if term.kind != "S" and _cuts_like_shard(term, shape[dim], count):
                terms[at] = Term("S", dim)
    # The order matters only among axes that still cut, and only where they cut the same dim.
    names = layout.mesh.axis_names
    cutting = [axis for axis in (layout.order or names) if terms[names.index(axis)].dim is not None]
    grouped = sorted(cutting, key=lambda axis: terms[names.index(axis)].dim or 0)  # stable within a dim
    plain = sorted(grouped, key=lambda axis: (terms[names.index(axis)].dim or 0, names.index(axis)))
    return Layout(layout.mesh, tuple(terms), None if grouped == plain else tuple(grouped))


def in_mesh_order(layout: Layout, shape: tuple[int, ...] | None = None) -> Layout:
    """The same bytes on the same ranks, on a mesh whose axes stand in the order in which they cut.

    A layout without an order of its own stays as it is; so does the mesh where the order changes nothing for ``shape``.
    """
    if not layout.order:
        return layout
    if shape is not None and not canonical(layout, shape).order:
        return Layout(layout.mesh, layout.terms)
    mesh = layout.mesh
    cutting = iter(layout.order)
    names = [
        next(cutting) if term.dim is not None else axis
        for axis, term in zip(mesh.axis_names, layout.terms, strict=True)
    ]
    at = [mesh.axis_names.index(name) for name in names]
    turned = [[0] * mesh.ndim]
    for axis in at:
        turned = [[*c[:axis], place, *c[axis + 1 :]] for c in turned for place in range(mesh.shape[axis])]
    ranks = [mesh.rank_at(coordinate) for coordinate in turned]
    axes = {name: mesh.axis_size(name) for name in names}
    return Layout(MeshSpec(axes, ranks, mesh.ranks_per_host), [layout.terms[axis] for axis in at])


def _plain_dim(term: Term, ndim: int) -> Term:
    return term if term.dim is None else term._replace(dim=term.dim % ndim)


def _cuts_like_shard(term: Term, length: int, count: int) -> bool:
    plain = Term("S", 0)
    return all(pieces(term, length, count, at) == pieces(plain, length, count, at) for at in range(count))


def equivalent(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Whether both layouts put the same bytes on the same ranks, and leave the same reductions to do."""
    plain_one, plain_other = canonical(one, shape), canonical(other, shape)
    if plain_one == plain_other:
        return True
    ranks = set(one.mesh.ranks)
    if ranks != set(other.mesh.ranks):
        return False
    return all(
        one.boxes(rank, shape) == other.boxes(rank, shape) and _reductions(one, rank) == _reductions(other, rank)
        for rank in sorted(ranks)
    )


def _reductions(layout: Layout, rank: int) -> list[tuple[str, frozenset[int]]]:
    """The reductions that ``rank`` takes part in: op and ranks, axis by axis; axes of one op count as one."""
    if not layout.partial:
        return []
    if len(set(layout.partial.values())) == 1:
        group = frozenset(layout.contributors(rank))
        return [(next(iter(layout.partial.values())), group)] if len(group) > 1 else []
    found = []
    for axis, op in layout.partial.items():
        group = next(frozenset(group) for group in layout.mesh.axis_groups(axis) if rank in group)
        if len(group) > 1:
            found.append((op, group))
    return found
