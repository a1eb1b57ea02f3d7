"""Head counts of an attention module, from its attributes and its model's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from shard_spec.planners.megatron import names


@dataclass(frozen=True)
class DeclaredHeads:
    """Declared counts; ``None`` where nothing is declared."""

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


def declared_heads(chain: Sequence[nn.Module]) -> DeclaredHeads:
    """Looks at the attention module first, then at the modules around it, innermost first, each with its config.

    Args:
        chain: the attention module, its parent, and so on up to the root.
    """
    places = [place for module in chain for place in (module, getattr(module, "config", None)) if place is not None]
    return DeclaredHeads(
        num_heads=_first(places, names.NUM_HEADS) or _first(places[:1], ("h",)),
        num_kv_heads=_first(places, names.NUM_KV_HEADS),
        head_dim=_first(places[:2], names.HEAD_DIM),
    )


def declared_vocab_sizes(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Every vocabulary size that a config or attribute of `modules` declares."""
    sizes = set()
    for module in modules:
        for place in (module, getattr(module, "config", None)):
            size = None if place is None or isinstance(place, nn.Embedding) else _first([place], names.VOCAB_SIZE)
            if size is not None:
                sizes.add(size)
    return frozenset(sizes)


def _first(places: Iterable[object], attributes: Sequence[str]) -> int | None:
    for place in places:
        for attribute in attributes:
            value = read_attribute(place, attribute)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def read_attribute(place: object, attribute: str) -> object:
    """An attribute, or None: configs of transformers raise errors of their own for what differs between layers."""
    try:
        return getattr(place, attribute, None)
    except Exception:
        return None
