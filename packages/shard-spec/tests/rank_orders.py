"""Orders of ranks that this torch can make, and local batches that are chunks of one batch.

Torch 2.11 makes process groups in ascending order only; what needs another order is refused there.
"""

from __future__ import annotations

import pytest
from shard_spec._torch_compat import can_order_groups

needs_orders = pytest.mark.skipif(
    not can_order_groups(), reason="this torch makes groups in ascending order only, and what needs another is refused"
)


def chunk(total: int, count: int, at: int) -> int:
    """Rows of rank ``at`` of ``count``: torch's chunk of ``total``; the last ranks may hold fewer, or none."""
    most = -(-total // count)
    return max(0, min(most, total - most * at))
