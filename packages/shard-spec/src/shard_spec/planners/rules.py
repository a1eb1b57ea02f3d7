"""From a layout per parameter to few rules: layers that are alike share a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shard_spec.layout import Layout

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
        said = {texts.get(name) for name in members}
        if said == {None}:
            continue
        if len(said) == 1 and len(members) > 1:
            rules[pattern] = texts[members[0]]
            continue
        # The most frequent text becomes the pattern if every member has one; an exact name beats it.
        counted = sorted(
            {text for text in said if text is not None}, key=lambda text: (-_count(texts, members, text), text)
        )
        if None not in said and len(members) > 3:
            rules[pattern] = counted[0]
            rules.update({name: texts[name] for name in members if texts[name] != counted[0]})
        else:
            rules.update({name: texts[name] for name in members if name in texts})
    return rules


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


def _count(texts: Mapping[str, str], members: Iterable[str], text: str) -> int:
    return sum(texts.get(name) == text for name in members)
