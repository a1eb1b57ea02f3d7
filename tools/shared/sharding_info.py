"""ShardingInfo: the global tensor of a plain local shard, as metadata.

A DTensor has this itself. A local parameter has it as ``parameter._sharding_info``, written by one package and
read by others, which need not be installed together: so it is a tuple, and readers use `sharding_info_of`.

Vocabulary of a sharded dim beyond a single ``Shard`` placement:

* a **section** is a run of rows, sharded on its own (the q, k and v rows of one fused weight);
* a **unit** is the number of rows that stay together (the rows of one head);
* **copies** is the number of neighbouring ranks with the same shard (few key-value heads over many ranks);
* **first** is the rank that holds the first unit (all rows of expert 3 on rank 1: one unit, first 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

ATTRIBUTE = "_sharding_info"


class Section(NamedTuple):
    """One section of a fused dim.

    Attributes:
        size: Global length in rows.
        unit: Rows that stay together; divides ``size``.
        copies: Neighbouring ranks with the same shard.
        first: Rank of the first unit; the ranks after it, and then those before it, hold the next ones.
    """

    size: int
    unit: int = 1
    copies: int = 1
    first: int = 0

    def bounds(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return start and end of a rank's shard within the section, chunked as ``torch.chunk``."""
        if num_ranks % self.copies:
            raise ValueError(f"{self}: copies does not divide {num_ranks} ranks")
        units, count = self.size // self.unit, num_ranks // self.copies  # of one copy of the section
        step = -(-units // count)  # rounded up, as in torch.chunk
        start = min((rank - self.first) % num_ranks // self.copies * step, units)
        return start * self.unit, min(start + step, units) * self.unit


class ShardingInfo(NamedTuple):
    """Mesh, placements, global shape and stride of a local parameter's global tensor.

    Attributes:
        mesh: One placement for each of its axes.
        placements: Torch's own ``Shard`` and ``Replicate``.
        shape: Global shape.
        stride: Global stride, in elements.
        sections: Sections of the one sharded dim; empty if the placements suffice.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    sections: tuple[Section, ...] = ()

    @property
    def needs_sections(self) -> bool:
        """True if placements alone would misdescribe the shard: it has several sections, units, or copies."""
        return len(self.sections) > 1 or any(section != Section(section.size) for section in self.sections)

    def section_axis(self) -> tuple[int, int]:
        """Return the mesh axis and the tensor dim of the sections.

        Raises:
            ValueError: Not exactly one axis shards.
        """
        sharding = [(axis, placement.dim) for axis, placement in enumerate(self.placements) if placement.is_shard()]  # type: ignore[attr-defined]  # a Shard has one
        if len(sharding) != 1:
            raise ValueError(f"sections describe the dim of one sharding axis, placements are {self.placements}")
        axis, dim = sharding[0]
        return axis, dim % len(self.shape)

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return global ``(start, stop)`` rows of each section for a rank along the sharding axis."""
        axis, _ = self.section_axis()
        size, offset, ranges = self.mesh.size(axis), 0, []
        for section in self.sections:
            start, stop = section.bounds(rank, size)
            ranges.append((offset + start, offset + stop))
            offset += section.size
        return tuple(ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        # A plain tuple when pickled: unpickling needs neither this package nor this version of it.
        plain = (self.mesh, self.placements, self.shape, self.stride, tuple(tuple(each) for each in self.sections))
        return tuple, (plain,)


def sharding_info_of(tensor: torch.Tensor) -> ShardingInfo | None:
    """Return the sharding metadata of a local parameter, or None.

    Raises:
        ValueError: The attribute has another form.
    """
    value = getattr(tensor, ATTRIBUTE, None)
    if value is None or isinstance(value, ShardingInfo):
        return value
    try:
        mesh, placements, shape, stride, *rest = value
        sections = tuple(
            Section(*each) if isinstance(each, tuple) else Section(int(each)) for each in (*rest, ())[0] or ()
        )
        return ShardingInfo(mesh, tuple(placements), torch.Size(shape), tuple(stride), sections)
    except (TypeError, ValueError) as error:
        form = "(device_mesh, placements, global_shape, global_stride[, sections])"
        raise ValueError(f"{ATTRIBUTE} has to be {form}, got {value!r:.200}") from error
