"""Write compact glob rules for layouts given by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a numeric path component
_GLOB_LETTERS = re.compile(r"[*?\[{]")


def glob_rules(values: Mapping[str, T | None], aliases: Collection[str], others: Collection[str]) -> dict[str, T]:
    """Return rules that give each name its value, and names without a value no rule.

    Numbers in a path become ``*`` if every parameter with such a path has the same value. Other names are listed, also
    those with a pattern that would match another tensor (``layers.*`` and ``layers.norm``). ``aliases`` are further
    names of tied parameters, ``others`` names that no pattern may match.
    """
    groups: dict[str, list[str]] = {}
    for name in values:
        groups.setdefault(pattern_of(name), []).append(name)
    stems = {*groups, *map(pattern_of, aliases)}  # globs match tied names too
    rules: dict[str, T] = {}
    for pattern, members in groups.items():
        alone = {stem for stem in stems if _glob_matches(pattern, stem)} == {pattern}
        alone = alone and not any(_glob_matches(pattern, name) for name in others)
        alone = alone and not any(map(_GLOB_LETTERS.search, members))  # a key of nn.ModuleDict may hold glob letters
        listed = {name: value for name in members if (value := values[name]) is not None}
        rules.update(_rules_of_group(pattern, members, values) if alone and len(members) > 1 else listed)
    return rules


def _glob_matches(pattern: str, stem: str) -> bool:
    mine, theirs = pattern.split("."), stem.split(".")
    return len(mine) == len(theirs) and all(own in ("*", other) for own, other in zip(mine, theirs, strict=True))


def _rules_of_group(pattern: str, members: list[str], values: Mapping[str, T | None]) -> dict[str, T]:
    """Return rules for all names of `pattern`: one if their values are equal, else few."""
    listed = {name: value for name in members if (value := values[name]) is not None}
    layout_values = list(listed.values())
    is_complete = len(listed) == len(members)
    if not listed or (is_complete and len(set(layout_values)) == 1):
        return {pattern: layout_values[0]} if listed else {}
    # One number written out (``layers.*.mlp.2.weight``), if that separates the values: exact, and readable.
    num_numbers = len(_NUMBER.findall(members[0]))  # equal in all: one pattern
    best: dict[str, T] | None = None
    for position in range(num_numbers if num_numbers > 1 else 0):
        parts: dict[str, set[T | None]] = {}
        for name in members:
            parts.setdefault(_pattern_but_one(name, position), set()).add(values[name])
        if all(len(numbers) == 1 for numbers in parts.values()):
            rules = {part: text for part, (text,) in parts.items() if text is not None}
            best = rules if best is None or len(rules) < len(best) else best  # fewest rules
    if best is not None:
        return best
    if not is_complete or len(members) <= 3:  # a glob would save nothing, or match too much
        return listed
    # The most frequent value becomes the pattern; an exact name overrides it.
    usual = min(layout_values, key=lambda value: (-layout_values.count(value), str(value)))
    return {pattern: usual, **{name: value for name, value in listed.items() if value != usual}}


def _pattern_but_one(name: str, position: int) -> str:
    """Replace every number by ``*`` except the one at `position`."""
    seen = itertools.count()
    return _NUMBER.sub(lambda match: match[0] if next(seen) == position else "*", name)


def pattern_of(name: str) -> str:
    """Replace every numeric path component of `name` by ``*``."""
    return _NUMBER.sub("*", name)
