r"""Patterns: how a rule of a plan names tensors or modules.

========================  ===================================================================================
``fc1.weight``            exactly that one; ``""`` is the root module
``layers.*.wq.weight``    a glob: ``*`` and ``?`` stay within a segment, ``**`` is any number of full segments
                          (none too, beside others), ``{wq,wk}`` either, ``[ab]`` one of these letters, ``[!ab]`` none
``re:layers\.\d+\..*``    a regular expression that has to match the full name
========================  ===================================================================================

Of several matching patterns an exact one decides; else the one that is more specific than every other, where a
pattern is *more specific* when everything it can match is matched by the other too. ``layers.0.*`` is more specific
than ``layers.**``; of ``layers.0.**`` and ``**.bias`` neither is, and a name that both match has no decision.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from .problems import PlanError, Problem

_MAX_PATTERN = 1_000  # also what YAML takes as a key
_MAX_REPEATS = 4  # more unbounded repeats make matching slow, on purpose or not
_MAX_ALTERNATIVES = 256
_WILD = re.compile(r"[*?\[{]")


@dataclass(frozen=True)
class Pattern:
    """One pattern: ``Pattern("layers.*.wq.weight").matches("layers.3.wq.weight")``.

    Raises:
        PlanError: ``invalid-argument`` for what cannot be read.
    """

    text: str

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_PATTERN:
            raise _bad(self.text, f"longer than {_MAX_PATTERN} characters")
        if self.is_regex:
            _check_repeats(self.text)
            try:
                re.compile(self.text[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise _bad(self.text, f"not a regular expression: {error}") from None
        elif self.text:  # "" names the root module
            for alternative in self.alternatives:
                _check_glob(alternative, self.text)

    @cached_property
    def is_regex(self) -> bool:
        """Return whether it starts with ``re:``."""
        return self.text.startswith("re:")

    @cached_property
    def is_exact(self) -> bool:
        """Return whether it names exactly one tensor or module."""
        return not self.is_regex and not _WILD.search(self.text)

    @cached_property
    def names_buffers(self) -> bool:
        """Return whether it may decide about buffers: only where its last segment is spelled out."""
        return not self.is_regex and not _WILD.search(self.text.rsplit(".", 1)[-1])

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """Globs that remain when each ``{a,b}`` is written out."""
        return _expand(self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        if self.is_regex:
            return re.compile(self.text[3:])
        return re.compile("|".join(f"(?:{_glob_regex(alternative)})" for alternative in self.alternatives))

    def matches(self, name: str) -> bool:
        """Return whether the full ``name`` matches."""
        return self.text == name if self.is_exact else self._regex.fullmatch(name) is not None

    def within(self, other: Pattern) -> bool:
        """Return whether ``other`` matches everything that this pattern can match; False where that is undecided."""
        return _within(self, other)

    def __getstate__(self) -> dict[str, str]:
        return {"text": self.text}


def most_specific(patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Return the pattern that decides about a name that all of ``patterns`` match.

    Returns:
        One pattern where there is a decision; several rivals, none within all others, where there is none.
    """
    listed = list(dict.fromkeys(patterns))
    exact = [pattern for pattern in listed if pattern.is_exact]
    if exact:
        return (exact[0],)
    best = [one for one in listed if all(one.within(other) for other in listed)]
    if best:
        return (best[0],)
    return tuple(one for one in listed if not any(other is not one and other.within(one) for other in listed))


def _bad(text: str, why: str) -> PlanError:
    return PlanError(
        Problem("invalid-argument", name=text[:200], found=why, hint="'*' is one segment, '**' any number of them")
    )


def _expand(text: str) -> tuple[str, ...]:
    """Write out ``{a,b}``, leftmost first."""
    done: list[str] = []
    waiting = [text]
    while waiting:
        current = waiting.pop(0)
        opening = current.find("{")
        if opening < 0:
            done.append(current)
            continue
        closing = current.find("}", opening)
        if closing < 0 or "{" in current[opening + 1 : closing]:
            raise _bad(text, "braces that do not pair; they cannot be nested")
        choices = current[opening + 1 : closing].split(",")
        waiting += [current[:opening] + choice + current[closing + 1 :] for choice in choices]
        if len(waiting) + len(done) > _MAX_ALTERNATIVES:
            raise _bad(text, f"more than {_MAX_ALTERNATIVES} alternatives")
    return tuple(done)


# A group that repeats or chooses inside and is repeated itself; an unbounded repeat outside of a letter class.
_REPEATED_GROUP = re.compile(r"\((?:[^()\\]|\\.)*(?:[*+|]|\{\d*,)(?:[^()\\]|\\.)*\)(?:[*+]|\{\d)")
_NESTED_REPEAT = re.compile(r"\)[^(]*\)(?:[*+]|\{\d)")
_UNBOUNDED = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\})")


def _check_repeats(text: str) -> None:
    """Refuse regular expressions that can take exponential time: a plan file may come from anywhere."""
    regex = text[3:]
    if _REPEATED_GROUP.search(regex) or _NESTED_REPEAT.search(regex):
        raise _bad(text, "a repeated group that repeats or chooses inside; write '**' or several rules")
    if len(_UNBOUNDED.findall(regex)) > _MAX_REPEATS:
        raise _bad(text, f"more than {_MAX_REPEATS} unbounded repeats")


def _check_glob(glob: str, text: str) -> None:
    segments = glob.split(".")
    if any("**" in segment and segment != "**" for segment in segments):
        raise _bad(text, "'**' stands for whole segments: write it between dots")
    if "" in segments:
        raise _bad(text, "an empty segment (two dots in a row, or a dot at an end)")
    if segments.count("**") > _MAX_REPEATS or any(segment.count("*") > _MAX_REPEATS for segment in segments):
        raise _bad(text, f"more than {_MAX_REPEATS} times '**', or '*' in a segment")
    for segment in segments:
        try:
            re.compile(_segment_regex(segment))
        except re.error as error:
            raise _bad(text, f"the segment {segment!r} cannot be read: {error}") from None


@lru_cache(maxsize=4096)
def _segment_regex(segment: str) -> str:
    parts = []
    at = 0
    while at < len(segment):
        letter = segment[at]
        if letter == "*":
            parts.append(r"[^.]*")
        elif letter == "?":
            parts.append(r"[^.]")
        elif letter == "[":
            closing = segment.find("]", at + 2)
            if closing < 0:
                raise re.error("'[' without ']'")
            letters = segment[at + 1 : closing]
            negated = letters.startswith(("!", "^"))
            letters = letters[1:] if negated else letters
            ranged = re.sub(r"[\\\[\]^&~|]", lambda found: "\\" + found[0], letters)
            parts.append(f"[{'^.' if negated else ''}{ranged}]")
            at = closing
        else:
            parts.append(re.escape(letter))
        at += 1
    return "".join(parts)


def _glob_regex(glob: str) -> str:
    """``**`` with its dot is optional, so that ``**.norm.*`` also matches ``norm.weight``."""
    parts = glob.split(".")
    # `**` in a row mean what one means; two would ask for a dot between nothing and nothing.
    segments = [part for at, part in enumerate(parts) if part != "**" or parts[at - 1 : at] != ["**"]]
    if segments == ["**"]:
        return r".+"  # the root module has no name of segments; only `""` names it
    regex = ""
    for at, segment in enumerate(segments):
        last = at == len(segments) - 1
        if segment == "**":
            # In front or in the middle it takes its segments with their dots; at the end it takes the dot before.
            regex = regex.removesuffix(r"\.") + r"(?:\.[^.]+)*" if last else regex + r"(?:[^.]+\.)*"
        else:
            regex += _segment_regex(segment) + ("" if last else r"\.")
    return regex


@lru_cache(maxsize=65536)
def _within(one: Pattern, other: Pattern) -> bool:
    if one == other:
        return True
    if other.text == "**":
        return True
    if one.is_exact:
        return other.matches(one.text)
    if one.is_regex or other.is_regex or other.is_exact:
        return False
    return all(any(_glob_within(mine, theirs) for theirs in other.alternatives) for mine in one.alternatives)


def _glob_within(one: str, other: str) -> bool:
    """Return whether the glob ``other`` matches the glob ``one``, segment by segment."""
    mine, theirs = one.split("."), other.split(".")

    @cache
    def covers(at: int, their_at: int) -> bool:
        if their_at == len(theirs):
            return at == len(mine)
        if theirs[their_at] == "**":
            return covers(at, their_at + 1) or (at < len(mine) and covers(at + 1, their_at))
        if at == len(mine) or mine[at] == "**":
            return False
        return _segment_within(mine[at], theirs[their_at]) and covers(at + 1, their_at + 1)

    return covers(0, 0)


def _segment_within(one: str, other: str) -> bool:
    if other in ("*", one):
        return True
    if not _WILD.search(one):
        return re.fullmatch(_segment_regex(other), one) is not None
    # With wildcards on both sides only 'prefix*suffix' forms are compared; anything else counts as "cannot tell".
    if other.count("*") != 1 or re.search(r"[?\[]", other) or re.search(r"\[", one):
        return False
    prefix, suffix = other.split("*")
    literal_head, literal_tail = re.split(r"[*?]", one)[0], re.split(r"[*?]", one)[-1]
    return literal_head.startswith(prefix) and literal_tail.endswith(suffix)
