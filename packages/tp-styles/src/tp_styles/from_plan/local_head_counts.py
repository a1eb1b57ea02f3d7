"""Guesses of attributes that become local with a module's heads or channels, best one first.

None of them is trusted: each is tried in the rehearsal, and the first with which every rank is right is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from tp_styles.from_plan.regions import Region, sizes_by_name
from tp_styles.styles.gqa import GROUPS, KEY_HEADS, QUERY_HEADS, Heads

Counts = dict[str, dict[str, int]]

WIDTHS = ("split_size", "inner_dim", "all_head_size", "q_size", "kv_size", "kv_dim", "d_attn", "inner_size")
STREAM = ("embed_dim", "hidden_size", "d_model", "n_embd", "n_state", "dim", "width")


def local_counts(module: nn.Module, region: Region, tp_size: int) -> Iterator[Counts]:
    """FQN -> attributes with their local values, for the module that holds the columns and the one around all."""
    holders = dict.fromkeys([name.rpartition(".")[0] for name in region.columns] + [region.scope])
    seen: list[Counts] = []
    guesses = _of_heads(region.heads, region.row_split.global_size) if region.heads else _of_channels(region, tp_size)
    for guess in guesses:
        counts = {
            name: {key: guess[key][1] for key, value in _sizes(module, name).items() if _fits(guess, key, value)}
            for name in holders
        }
        if counts not in seen:
            seen.append(counts)
            yield counts


def _sizes(module: nn.Module, name: str) -> dict[str, int]:
    return sizes_by_name(module.get_submodule(name))


def _fits(guess: Mapping[str, tuple[int, int]], key: str, value: int) -> bool:
    return key in guess and guess[key][0] == value


class _Guess(dict[str, tuple[int, int]]):
    """Attribute -> (global value, local value)."""


def _of_heads(heads: Heads, width: int) -> Iterator[Mapping[str, tuple[int, int]]]:
    known = _Guess(dict.fromkeys(QUERY_HEADS, (heads.queries, heads.local_queries)))
    known.update(dict.fromkeys(KEY_HEADS, (heads.keys, heads.local_keys)))
    known.update(dict.fromkeys(GROUPS, (heads.queries // heads.keys, heads.local_groups)))
    yield known
    yield _Guess()
    size = width // heads.queries
    more = _Guess(known)
    more.update(dict.fromkeys(("h", "heads", "nh", "num_q_heads"), (heads.queries, heads.local_queries)))
    more.update(dict.fromkeys(("kv_heads", "n_kv", "nkv"), (heads.keys, heads.local_keys)))
    more.update(
        dict.fromkeys(("groups", "kv_groups", "repeats", "n_groups"), (heads.queries // heads.keys, heads.local_groups))
    )
    for key in WIDTHS:
        whole, own = (heads.keys, heads.local_keys) if key.startswith("kv") else (heads.queries, heads.local_queries)
        more[key] = (whole * size, own * size)
    yield more
    stream = _Guess(more)
    stream.update(dict.fromkeys(STREAM, (width, heads.local_queries * size)))
    yield stream


def _of_channels(region: Region, tp_size: int) -> Iterator[Mapping[str, tuple[int, int]]]:
    yield _Guess()
    width = region.row_split.global_size
    if width % tp_size == 0:
        yield _Any(width, width // tp_size)


class _Any(Mapping[str, tuple[int, int]]):
    """Every attribute with that value."""

    def __init__(self, whole: int, own: int) -> None:
        self.pair = (whole, own)

    def __getitem__(self, key: str) -> tuple[int, int]:
        return self.pair

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, key: object) -> bool:
        return True
