"""Guesses of attributes that become local with a module's heads or channels, best one first.

None of them is trusted: each is tried in the rehearsal, and the first with which every rank is right is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from tp_styles.from_plan.regions import Region, sizes_by_name
from tp_styles.styles.gqa import GROUPS, KEY_HEADS, QUERY_HEADS, Heads

Counts = dict[str, dict[str, int]]

Guess = Callable[[str, int], int | None]
"""Name and value of an attribute -> its local value; None if it stays."""

WIDTHS = ("split_size", "inner_dim", "all_head_size", "q_size", "kv_size", "kv_dim", "d_attn", "inner_size")
STREAM = ("embed_dim", "hidden_size", "d_model", "n_embd", "n_state", "dim", "width")


def local_counts(module: nn.Module, region: Region, tp_size: int) -> Iterator[Counts]:
    """FQN -> attributes with their local values, for the module that holds the columns and the one around all."""
    holders = dict.fromkeys([name.rpartition(".")[0] for name in region.columns] + [region.scope])
    sizes = {name: sizes_by_name(module.get_submodule(name)) for name in holders}
    seen: list[Counts] = []
    width = region.row_split.global_size
    for guess in _of_heads(region.heads, width) if region.heads else _of_channels(width, tp_size):
        counts = {
            name: {key: local for key, value in found.items() if (local := guess(key, value)) is not None}
            for name, found in sizes.items()
        }
        if counts not in seen:
            seen.append(counts)
            yield counts


def _of_heads(heads: Heads, width: int) -> Iterator[Guess]:
    queries, keys = (heads.queries, heads.local_queries), (heads.keys, heads.local_keys)
    groups = heads.queries // heads.keys, heads.local_groups
    known = dict.fromkeys(QUERY_HEADS, queries) | dict.fromkeys(KEY_HEADS, keys) | dict.fromkeys(GROUPS, groups)
    yield _by_name(known)
    yield _by_name({})
    size = width // heads.queries
    more = known | dict.fromkeys(("h", "heads", "nh", "num_q_heads"), queries)
    more |= dict.fromkeys(("kv_heads", "n_kv", "nkv"), keys)
    more |= dict.fromkeys(("groups", "kv_groups", "repeats", "n_groups"), groups)
    for key in WIDTHS:
        full, local = keys if key.startswith("kv") else queries
        more[key] = (full * size, local * size)
    yield _by_name(more)
    yield _by_name(more | dict.fromkeys(STREAM, (width, heads.local_queries * size)))


def _by_name(sizes: dict[str, tuple[int, int]]) -> Guess:
    """Attributes of these names that have the full value get the local one."""
    return lambda key, value: sizes[key][1] if key in sizes and sizes[key][0] == value else None


def _of_channels(width: int, tp_size: int) -> Iterator[Guess]:
    yield _by_name({})
    if width % tp_size == 0:
        yield lambda key, value: width // tp_size if value == width else None
