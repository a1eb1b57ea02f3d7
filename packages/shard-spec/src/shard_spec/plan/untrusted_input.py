"""JSON and YAML from strangers as plain values: bounded in size and depth, each key once, nothing run.

A file that says two things under one key is refused: which of them a reader would keep is no business of a plan.
"""

from __future__ import annotations

import functools
import json
from typing import Any

MAX_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**20  # PyYAML reads less than that in a second
MAX_YAML_DEPTH = 12
_LONG_INTEGER = 20  # digits


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


def yaml_values(text: str | bytes) -> Any:
    """The values of a YAML text: mappings, lists, text, integers in decimal, ``true``, ``false`` and ``null``.

    What YAML 1.1 makes of ``on``, ``010``, ``1:30`` or a date is not read into a plan: these stay text. Aliases and
    tags are refused: a plan needs neither, and they are how a small file becomes a large one.

    Raises:
        ValueError: It is too long, nested too deep, not YAML, or names a key twice in one mapping.
        ModuleNotFoundError: Without PyYAML.
    """
    _check_length(text, MAX_YAML_BYTES)
    try:
        loader = _yaml_loader()
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reading YAML needs PyYAML: pip install 'shard-spec[yaml]'") from error
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return yaml.load(text, Loader=loader)  # a SafeLoader that knows less
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None


@functools.cache
def _yaml_loader() -> Any:
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Loader of what JSON can hold: each key once, no aliases or tags, bounded depth."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own way
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML types it not
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ValueError("it has an anchor, an alias or a tag")
            if self.depth >= MAX_YAML_DEPTH:
                raise ValueError(f"nested deeper than {MAX_YAML_DEPTH}")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("a key that is no text; put it in quotes")
            if len(set(keys)) != len(keys):
                twice = next(key for at, key in enumerate(keys) if key in keys[:at])
                raise ValueError(f"the key {twice[:100]!r} appears twice in one mapping")
            return super().construct_mapping(node, deep)

    import re

    whole = re.compile(rf"-?(?:0|[1-9][0-9]{{0,{_LONG_INTEGER - 1}}})\Z")
    PlainLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|)\Z"), ["~", "n", ""])
    PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)\Z"), ["t", "f"])
    PlainLoader.add_implicit_resolver("tag:yaml.org,2002:int", whole, list("-0123456789"))
    return PlainLoader


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
