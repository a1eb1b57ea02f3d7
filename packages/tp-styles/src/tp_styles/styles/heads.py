"""Division of attention heads over ranks, and the error if they do not divide."""

from __future__ import annotations

from dataclasses import dataclass

from tp_styles.problems import Problem


@dataclass(frozen=True)
class Heads:
    """Heads of one attention layer over the ranks.

    Attributes:
        queries: Number of query heads.
        keys: Number of key-value heads.
        tp_size: Number of ranks.
        copies: How many neighbouring ranks hold the same key-value heads.
    """

    queries: int
    keys: int
    tp_size: int
    copies: int = 1

    @property
    def local_queries(self) -> int:
        """Query heads on each rank."""
        return self.queries // self.tp_size

    @property
    def local_keys(self) -> int:
        """Key-value heads on each rank."""
        return self.keys * self.copies // self.tp_size

    @property
    def local_groups(self) -> int:
        """Query heads for each key-value head on a rank."""
        return self.local_queries // self.local_keys


def divide_heads(
    name: str, queries: int, keys: int, tp_size: int, *, kv_replicate: bool
) -> tuple[Heads | None, Problem | None]:
    """Divide heads evenly; key-value heads may be copied where there are fewer of them than ranks.

    Every rank gets whole groups: the key-value heads that its query heads read, and no others.
    """
    if queries < 1 or keys < 1 or queries % keys:
        hint = "query heads are a multiple of key-value heads"
        return None, Problem("does-not-divide", name, found=f"{queries} heads, {keys} key-value heads", hint=hint)
    if queries % tp_size == 0 and keys % tp_size == 0:
        return Heads(queries, keys, tp_size), None
    if queries % tp_size == 0 and tp_size % keys == 0 and kv_replicate:
        return Heads(queries, keys, tp_size, copies=tp_size // keys), None
    whole = [size for size in range(1, queries + 1) if queries % size == 0 and keys % size == 0]
    copied = [size for size in range(1, queries + 1) if queries % size == 0 and size % keys == 0]
    could = queries % tp_size == 0 and tp_size % keys == 0
    label = f"num_key_value_heads={keys}" if queries % tp_size == 0 else f"num_heads={queries}"
    if keys != queries and queries % tp_size:
        label += f", num_key_value_heads={keys}"
    hint = "valid " + ", ".join(str(size) for size in whole)
    if could:
        hint += ", or kv_replicate=True"
    elif copied and keys != queries:
        hint += "; with kv_replicate=True also " + ", ".join(str(size) for size in copied if size not in whole)
    return None, Problem("does-not-divide", name, found=f"{label} with tp={tp_size}", hint=hint)
