"""Canonical layouts and equality by bytes: two spellings of one layout are recognised as one."""

from __future__ import annotations

from shard_spec.layout import Layout, cuts_by_dim
from shard_spec.problems import raise_problems
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
    in_mesh_order = sorted(grouped, key=lambda axis: (terms[names.index(axis)].dim or 0, names.index(axis)))
    return Layout(layout.mesh, tuple(terms), None if grouped == in_mesh_order else tuple(grouped))


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
