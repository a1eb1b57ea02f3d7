"""Matching of modules and styles by pattern."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tp_styles._shared.patterns import Pattern, most_specific
from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.problems import PlanError, Problem


@dataclass(frozen=True)
class Match:
    """One module, its style, and the matching pattern."""

    name: str
    pattern: str
    style: TorchParallelStyle


def match_plan(
    names: Iterable[str], plan: Mapping[str, TorchParallelStyle], *, strict: bool
) -> tuple[list[Match], list[Problem]]:
    """Give every named module at most one style; an exact name beats globs, which must agree.

    Args:
        names: FQNs of all modules, in the model's order.
        plan: Pattern -> style.
        strict: Report a pattern without a module.

    Returns:
        Matches in the order of `names`, and the problems: no match, not a style, conflicting globs.
    """
    problems = [_not_a_style(pattern, style) for pattern, style in plan.items() if not is_style(style)]
    names = list(names)
    patterns: list[Pattern] = []
    for text in plan:
        try:
            patterns.append(Pattern(text))
        except PlanError as error:
            problems += error.problems
    used: set[Pattern] = set()
    matches: list[Match] = []
    for name in names:
        matching = [pattern for pattern in patterns if pattern.matches(name)]
        used.update(matching)
        if not matching:
            continue
        first, *others = most_specific(matching)  # one exact name, or all globs
        rivals = [other for other in others if plan[other.text] != plan[first.text]]  # equal styles do not conflict
        if rivals:
            problems.append(
                Problem(
                    "ambiguous-pattern",
                    name,
                    found=", ".join(repr(pattern.text) for pattern in (first, *rivals)),
                    hint="they give it different styles: add an exact entry, or narrow one of the globs",
                )
            )
        if is_style(plan[first.text]):
            matches.append(Match(name, first.text, plan[first.text]))
    if strict:
        problems += [_unmatched(pattern.text, names) for pattern in patterns if pattern not in used]
    return matches, problems


def is_style(style: object) -> bool:
    """True for a style of ours, of torch's, or of a user's."""
    return isinstance(style, TorchParallelStyle)


def _not_a_style(pattern: str, style: object) -> Problem:
    hint = "pass a ParallelStyle"
    if isinstance(style, type):
        hint = f"pass an instance: {style.__name__}()"
    elif isinstance(style, str):
        hint = "pass ColwiseParallel() or RowwiseParallel(); from_hf_tp_plan(model, plan) takes plans of style names"
    return Problem("wrong-type", pattern, found=repr(style), hint=hint)


def _unmatched(pattern: str, names: list[str]) -> Problem:
    import difflib  # only for the hint

    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    near = near or [name for name in names if name and name.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
    hint = "modules with similar names: " + ", ".join(near) if near else "`*` is one name, `**` any number of them"
    return Problem("unmatched-pattern", pattern, found="no module of that name", hint=hint)
