"""FQN globs: `*` is one name, `**` any number of names (none too), `?` and `[...]` as in a shell, within one name."""

from __future__ import annotations

import re
from functools import cache


def matches(pattern: str, name: str) -> bool:
    """True if the FQN is one that the pattern means."""
    return _compiled(pattern).fullmatch(name) is not None


def is_glob(pattern: str) -> bool:
    """True if the pattern can mean several names."""
    return any(character in pattern for character in "*?[")


def specificity(pattern: str) -> tuple[int, int, int, int]:
    """Greater for a pattern that says more: no glob, then fewest `**`, then most whole names, then fewest bare `*`."""
    parts = pattern.split(".")
    whole = sum(not is_glob(part) for part in parts)
    return (int(not is_glob(pattern)), -parts.count("**"), whole, -parts.count("*"))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = pattern.split(".") if pattern else []
    text = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            # Any number of whole names, each with its dot; at the end of a pattern the dot stands before it.
            if last:
                text = text.removesuffix(r"\.") + (r"(?:\.[^.]+)*" if text else r"(?:[^.]+(?:\.[^.]+)*)?")
            else:
                text += r"(?:[^.]+\.)*"
            continue
        text += _one_name(part) + ("" if last else r"\.")
    return re.compile(text)


def _one_name(part: str) -> str:
    text = ""
    index = 0
    while index < len(part):
        character = part[index]
        closing = part.find("]", index + 2) if character == "[" else -1
        if character == "*":
            text += "[^.]*"
        elif character == "?":
            text += "[^.]"
        elif closing > 0:
            inside = part[index + 1 : closing].replace("\\", r"\\")
            text += "[" + ("^" + inside[1:] if inside.startswith("!") else inside) + "]"
            index = closing
        else:
            text += re.escape(character)
        index += 1
    return text
