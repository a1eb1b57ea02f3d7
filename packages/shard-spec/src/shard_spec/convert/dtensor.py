"""DTensor placements of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_spec.convert.refuse import not_expressible, sharder_problems
from shard_spec.layout import Layout
from shard_spec.placements import from_term
from shard_spec.plan.resolve import resolve
from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.terms import Term, sections

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from shard_spec.plan.facts import ModelFacts
    from shard_spec.plan.sharding_plan import ShardingPlan


def to_dtensor_placements(
    plan: ShardingPlan, module: nn.Module | ModelFacts | None = None
) -> dict[str, tuple[Placement, ...]]:
    """Placements for each rule, or with ``module`` for each tensor; see ``ShardingPlan.to_dtensor_placements``."""
    problems: list[Problem] = []
    found: dict[str, tuple[Placement, ...]] = {}
    if module is None:
        problems += plan.problems
        for rule in plan.rules:
            if rule.layout is not None:
                found[rule.key] = _said(rule.key, rule.layout, None, problems)
            elif not rule.problems:
                hint = "pass the model: placements of specs depend on shapes"
                problems.append(not_expressible(rule.key, f"a {rule.kind}, not placements", hint))
    else:
        resolved = resolve(plan, module)
        problems += sharder_problems(resolved, "a DTensor")
        for tensor in resolved.facts.tensors:
            layout = resolved.layouts.get(tensor.name)
            if layout is not None:
                found[tensor.name] = _said(tensor.name, layout, tensor.shape, problems)
    raise_problems(problems, "DTensor placements cannot say this plan")
    return found


def _said(name: str, layout: Layout, shape: tuple[int, ...] | None, problems: list[Problem]) -> tuple[Placement, ...]:
    terms, why = dtensor_terms(layout, shape)
    if why is not None:
        hint = "shard-reshard moves tensors in any layout; plan.apply keeps fused weights as local parameters"
        problems.append(not_expressible(name, f"{layout}: {why}", hint))
        return ()
    return tuple(dtensor_placement(term) for term in terms)


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
        from shard_spec._torch_compat import strided_shard

        assert term.dim is not None
        assert isinstance(term.arg, int)
        return strided_shard(term.dim, term.arg)
    return from_term(term)
