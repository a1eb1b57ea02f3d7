"""Shards of a parameter on the tensor-parallel axis: index arithmetic, no communication.

One `Split` serves sharding, state dicts, undo and `explain`. Vocabulary:

* a **section** is a run of rows, sharded over the ranks on its own (the q, k and v rows of one fused weight);
* a **unit** is a number of indivisible rows (the rows of one head);
* **copies** is the number of neighbouring ranks with the same shard (few key-value heads over many ranks);
* a **part** is one rank's shard of one section. Parts follow `torch.chunk`, as DTensor's `Shard` does: as many units
  as fit evenly, rounded up, to the first ranks; the last ones may hold less, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tp_styles._shared.sharding_info import Section as Section

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Split:
    """Split of one dim of a parameter over the ranks; `dim=None` means replicated.

    Args:
        dim: Tensor dim, not negative, or None for a replicated parameter.
        sections: The sections of that dim, in order.
    """

    dim: int | None = None
    sections: tuple[Section, ...] = field(default=())

    def __post_init__(self) -> None:
        if (self.dim is None) != (len(self.sections) == 0):
            raise ValueError(f"{self}: a split has a dim and sections, a replicated parameter neither")
        if self.dim is not None and self.dim < 0:
            raise ValueError(f"{self}: the dim must not be negative")
        for size, unit, copies in self.sections:
            if size < 0 or unit < 1 or copies < 1 or size % unit:
                raise ValueError(f"{self}: a size must be a multiple of its unit, and unit and copies at least 1")

    @classmethod
    def replicated(cls) -> Split:
        """Return the split of a replicated parameter."""
        return cls()

    @classmethod
    def along(cls, dim: int, size: int, *, unit: int = 1, copies: int = 1) -> Split:
        """Return one section of `size` rows along `dim`."""
        return cls(dim, (Section(size, unit, copies),))

    @classmethod
    def fused(cls, dim: int, sizes: Sequence[int], *, unit: int = 1) -> Split:
        """Return several sections along `dim`, each sharded on its own."""
        return cls(dim, tuple(Section(size, unit) for size in sizes))

    # properties

    @property
    def is_replicated(self) -> bool:
        """True if replicated."""
        return self.dim is None

    @property
    def global_size(self) -> int:
        """Rows of all sections together."""
        return sum(section.size for section in self.sections)

    @property
    def is_single(self) -> bool:
        """True if ranks hold consecutive rows: at most one section, and no copies."""
        return len(self.sections) <= 1 and all(section.copies == 1 for section in self.sections)

    def is_plain(self, tp_size: int) -> bool:
        """True if DTensor's `Shard(dim)` or `Replicate()` means exactly the same; never for a fused weight."""
        if self.is_replicated:
            return True
        if not self.is_single:
            return False
        (section,) = self.sections
        return section.unit == 1 or section.size // section.unit % tp_size == 0  # even

    def placement(self) -> Placement:
        """Return the nearest placement: exact if `is_plain`, else only the dim is right."""
        from torch.distributed.tensor import Replicate, Shard

        return Replicate() if self.dim is None else Shard(self.dim)

    # row indices

    def ranges(self, rank: int, tp_size: int) -> tuple[tuple[int, int], ...]:
        """Return global `(start, stop)` of `rank`'s shard of each section, in order."""
        ranges = []
        offset = 0
        for section in self.sections:
            start, stop = section.bounds(rank, tp_size)
            ranges.append((offset + start, offset + stop))  # offset: earlier sections
            offset += section.size
        return tuple(ranges)

    def local_size(self, rank: int, tp_size: int) -> int:
        """Return the rows of `rank`'s shard."""
        return sum(stop - start for start, stop in self.ranges(rank, tp_size))

    def sizes(self, tp_size: int) -> tuple[int, ...]:
        """Return the rows of each rank's shard."""
        return tuple(self.local_size(rank, tp_size) for rank in range(tp_size))

    def local_shape(self, shape: Sequence[int], rank: int, tp_size: int) -> torch.Size:
        """Return the shape of `rank`'s shard of a tensor of global `shape`."""
        local = list(shape)
        if self.dim is not None:
            local[self.dim] = self.local_size(rank, tp_size)
        return torch.Size(local)

    # operations on tensors, without communication

    def take(self, full: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
        """Return `rank`'s shard of a full tensor, as a contiguous tensor with its own storage."""
        if self.dim is None:
            return full.clone(memory_format=torch.contiguous_format)
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges(rank, tp_size)]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)  # no view: the full tensor can be freed
        return torch.cat(pieces, dim=self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the full tensor from every rank's shard, in rank order."""
        if self.dim is None:
            return parts[0].clone()
        tp_size = len(parts)
        shape = list(parts[0].shape)
        shape[self.dim] = self.global_size
        full = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            offset = 0
            for start, stop in self.ranges(rank, tp_size):
                length = stop - start
                full.narrow(self.dim, start, length).copy_(part.narrow(self.dim, offset, length))
                offset += length
        return full

    def __str__(self) -> str:
        if self.dim is None:
            return "replicated"
        text = f"dim {self.dim}"
        if len(self.sections) > 1:
            text += " in sections " + "+".join(str(section.size) for section in self.sections)
        if any(section.unit > 1 for section in self.sections):
            text += " by " + "/".join(str(section.unit) for section in self.sections)
        if any(section.copies > 1 for section in self.sections):
            text += ", copies " + "/".join(str(section.copies) for section in self.sections)
        return text
