"""A DTensor from a rank's local shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Return a DTensor around ``local``, sharing its memory; no communication.

    ``DTensor.from_local`` alone computes the global shape from one rank's shard as if all were equal: 5 rows over 2
    ranks would be 6 on the first rank and 4 on the second.

    Args:
        local: This rank's shard, of any size.
        mesh: One placement for each of its axes.
        placements: Torch's own.
        shape: Global shape.
        stride: Global stride in elements; that of a contiguous tensor by default.
    """
    from torch.distributed.tensor import DTensor  # takes 1.3 s, which moves of plain tensors do without

    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
