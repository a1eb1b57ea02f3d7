"""Parse JSON of untrusted input: bounded in size and depth, unique keys, plain values.

A file with two values under one key is refused: the intended one is unknown.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 64 * 2**20


def json_values(text: str | bytes, *, floats: bool = False) -> Any:
    """Return the values of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        floats: True to accept fractions. NaN and Infinity are never accepted; they are not JSON.

    Raises:
        ValueError: It is too long, nested too deep, not JSON, or has a key twice in one object.
    """
    if len(text) > MAX_BYTES:  # before any parsing
        raise ValueError(f"{len(text)} characters, more than {MAX_BYTES}")
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # UnicodeDecodeError is a ValueError
    fraction = float if floats else _no_constant  # no fraction in a plan
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=fraction)
    except RecursionError:  # json recurses once per level
        raise ValueError("nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):  # a duplicate overwrote a value
        raise ValueError("a key appears twice in one object")
    return mapping


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text[:40]} has no place in it")
