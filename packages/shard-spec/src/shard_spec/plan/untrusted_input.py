"""JSON of untrusted input as plain values: bounded in size and depth, each key once, nothing run.

A file with two values under one key is refused: a reader cannot know which of them the writer meant.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 64 * 2**20


def json_values(text: str | bytes, *, floats: bool = False) -> Any:
    """The values of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        floats: Whether fractions are read. NaN and Infinity never are; they are not JSON.

    Raises:
        ValueError: It is too long, nested too deep, not JSON, or names a key twice in one object.
    """
    _check_length(text, MAX_BYTES)
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    fraction = float if floats else _no_constant
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=fraction)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _check_length(text: str | bytes, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"{len(text)} characters, more than {limit}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text[:40]} has no place in it")
