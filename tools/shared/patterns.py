"""Patterns: names of tensors or modules in the rules of a plan.

========================  ===================================================================================
``fc1.weight``            exactly that one; ``""`` is the root module
``layers.*.wq.weight``    a glob: ``*`` and ``?`` stay within a segment, ``**`` is any number of full segments
                          (none too, beside others), ``{wq,wk}`` either, ``[ab]`` one of these letters, ``[!ab]`` none
========================  ===================================================================================

An exact name beats every glob. Two globs for one name have to give it the same value: no glob is more
specific than another, so a reader of a plan need not order its globs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .problems import PlanError, Problem

_MAX_PATTERN = 1_000
_MAX_REPEATS = 4  # more unbounded repeats make matching slow, on purpose or not
_MAX_ALTERNATIVES = 256
_WILD = re.compile(r"[*?\[{]")


@dataclass(frozen=True)
class Pattern:
    """One pattern: ``Pattern("layers.*.wq.weight").matches("layers.3.wq.weight")``.

    Raises:
        PlanError: ``invalid-argument`` for an unreadable pattern.
    """

    text: str

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_PATTERN:
            raise _bad(self.text, f"longer than {_MAX_PATTERN} characters")
        if self.text.startswith("re:"):
            raise _bad(self.text, "a regular expression; write globs, or list the names")
        if self.text:  # "" names the root module
            for alternative in self.alternatives:
                _check_glob(alternative, self.text)

    @cached_property
    def is_exact(self) -> bool:
        """Return True if it names exactly one tensor or module."""
        return not _WILD.search(self.text)

    @cached_property
    def names_buffers(self) -> bool:
        """Return True if it may decide about buffers: only with a literal last segment."""
        return not _WILD.search(self.text.rsplit(".", 1)[-1])

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """Globs with each ``{a,b}`` written out."""
        return _expand(self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{_glob_regex(alternative)})" for alternative in self.alternatives))

    def matches(self, name: str) -> bool:
        """Return True if the full ``name`` matches."""
        return self.text == name if self.is_exact else self._regex.fullmatch(name) is not None

    def __getstate__(self) -> dict[str, str]:
        return {"text": self.text}


def most_specific(patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Return the deciding patterns for a name matched by all of ``patterns``.

    Returns:
        The exact one if there is one; else all globs, which have to agree.
    """
    listed = tuple(dict.fromkeys(patterns))
    return tuple(pattern for pattern in listed if pattern.is_exact)[:1] or listed


def _bad(text: str, why: str) -> PlanError:
    return PlanError(
        Problem("invalid-argument", name=text[:200], found=why, hint="'*' is one segment, '**' any number of them")
    )


def _expand(text: str) -> tuple[str, ...]:
    """Write out ``{a,b}``, the rightmost first: what follows an opening brace has no other."""
    globs, head = [""], text
    while "{" in head:
        head, _, inner = head.rpartition("{")
        choices, closing, between = inner.partition("}")
        if not closing:
            raise _bad(text, "braces that do not pair; they cannot be nested")
        globs = [choice + between + glob for choice in choices.split(",") for glob in globs]
        if len(globs) > _MAX_ALTERNATIVES:
            raise _bad(text, f"more than {_MAX_ALTERNATIVES} alternatives")
    return tuple(head + glob for glob in globs)


def _check_glob(glob: str, text: str) -> None:
    segments = glob.split(".")
    if any("**" in segment and segment != "**" for segment in segments):
        raise _bad(text, "'**' means full segments: write it between dots")
    if "" in segments:
        raise _bad(text, "an empty segment (two dots in a row, or a dot at an end)")
    if segments.count("**") > _MAX_REPEATS or any(segment.count("*") > _MAX_REPEATS for segment in segments):
        raise _bad(text, f"more than {_MAX_REPEATS} times '**', or '*' in a segment")
    try:
        re.compile(_glob_regex(glob))
    except re.error as error:
        raise _bad(text, f"{glob!r} cannot be read: {error}") from None


# Several `**` in a row mean the same as one. In front or in the middle it takes its segments with their dots, so
# ``**.norm.*`` also matches ``norm.weight``; at the end it takes the dot before.
_TOKEN = re.compile(r"(?:\*\*\.)+|(?:\.\*\*)+$|\*\*|\*|\?|\[[^.][^.\]]*\]|.", re.DOTALL)


def _glob_regex(glob: str) -> str:
    return "".join(map(_token_regex, _TOKEN.findall(glob)))


def _token_regex(token: str) -> str:
    if token.startswith("**."):
        return r"(?:[^.]+\.)*"
    if token.startswith(".**"):
        return r"(?:\.[^.]+)*"
    if token == "[":
        raise re.error("'[' without ']'")
    if token.startswith("["):
        negated = token[1] in "!^"
        letters = re.sub(r"[\\\[\]^&~|]", lambda found: "\\" + found[0], token[1 + negated : -1])
        return f"[{'^.' if negated else ''}{letters}]"
    # The root module has no name of segments; only `""` names it.
    return {"**": r".+", "*": r"[^.]*", "?": r"[^.]"}.get(token) or re.escape(token)
