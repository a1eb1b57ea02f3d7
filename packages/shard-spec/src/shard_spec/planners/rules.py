"""From a layout per parameter to few rules: layers that are alike share a pattern."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from shard_spec.layout.layout import Layout

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number


def rules_of(layouts: Mapping[str, Layout], names: Iterable[str]) -> dict[str, str]:
    """Rules that give each of `layouts` its text and mention no other of `names`.

    Numbers in a path become ``*`` where every parameter with such a path has the same layout; others are listed by
    name.

    Args:
        layouts: FQN to layout; fully replicated ones need no rule and get none.
        names: FQNs of all parameters of the model, each tensor once.
    """
    texts = {name: short_text(layout) for name, layout in layouts.items() if not layout.is_replicated}
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys((*names, *texts)):
        groups.setdefault(pattern_of(name), []).append(name)
    rules: dict[str, str] = {}
    for pattern, members in groups.items():
        rules.update(_rules_of_group(pattern, members, texts))
    return rules


def _rules_of_group(pattern: str, members: list[str], texts: Mapping[str, str]) -> dict[str, str]:
    """Rules for all the names that `pattern` matches: one if they are alike, else as few as are easily found."""
    said = {texts.get(name) for name in members}
    if said == {None}:
        return {}
    if len(said) == 1 and len(members) > 1:
        return {pattern: texts[members[0]]}
    by_position = _split_at_one_number(members, texts)
    if by_position is not None:
        return by_position
    # The most frequent text becomes the pattern if every member has one; an exact name beats it.
    spoken = {text for text in said if text is not None}
    usual = min(spoken, key=lambda text: (-sum(texts.get(name) == text for name in members), text))
    if None in said or len(members) <= 3:
        return {name: texts[name] for name in members if name in texts}
    return {pattern: usual, **{name: texts[name] for name in members if texts[name] != usual}}


def _split_at_one_number(members: list[str], texts: Mapping[str, str]) -> dict[str, str] | None:
    """Rules with one of the numbers written out (``layers.*.mlp.2.weight``), if that makes each of them true."""
    num_numbers = len(_NUMBER.findall(members[0]))
    best: dict[str, str] | None = None
    for position in range(num_numbers if num_numbers > 1 else 0):
        parts: dict[str, set[str | None]] = {}
        for name in members:
            parts.setdefault(_pattern_but_one(name, position), set()).add(texts.get(name))
        if all(len(said) == 1 for said in parts.values()):
            rules = {part: text for part, (text,) in parts.items() if text is not None}
            if best is None or len(rules) < len(best):
                best = rules
    return best


def _pattern_but_one(name: str, position: int) -> str:
    """``*`` for every number but the one at `position`."""
    seen = itertools.count()
    return _NUMBER.sub(lambda match: match[0] if next(seen) == position else "*", name)


def pattern_of(name: str) -> str:
    """`name` with ``*`` for every path component that is a number."""
    return _NUMBER.sub("*", name)


def short_text(layout: Layout) -> str:
    """The layout's text without the axes that replicate."""
    parts, _, order = str(layout).partition(";")
    kept = [part for part in _axis_texts(parts) if not part.endswith(":R")]
    return ", ".join(kept) + (f";{order}" if order else "")


def _axis_texts(text: str) -> list[str]:
    """Splits at commas outside of parentheses."""
    return [part.strip() for part in re.split(r",\s*(?![^()]*\))", text)]
