"""The first tensor-parallel styles, with their meaning, on today's DTensor.

`SequenceParallel` here is the pair of linear layers between sequence shards: rows are gathered on the way in and
reduce-scattered on the way out. The class of that name in `tp_styles` itself is today's style for norms and dropout.
`ColwiseParallel` and `RowwiseParallel` here take prepare functions, those of `tp_styles` layouts.
"""

from __future__ import annotations

from tp_styles.legacy.prepare import (
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_output_replicate_1d,
    make_output_reshard_tensor,
    make_output_shard_1d,
    make_output_tensor,
    make_sharded_output_tensor,
)
from tp_styles.legacy.styles import ColwiseParallel, PairwiseParallel, RowwiseParallel, SequenceParallel
from tp_styles.styles.base import ParallelStyle

__all__ = [
    "ParallelStyle",
    "RowwiseParallel",
    "ColwiseParallel",
    "PairwiseParallel",
    "SequenceParallel",
    "make_input_replicate_1d",
    "make_input_reshard_replicate",
    "make_input_shard_1d",
    "make_input_shard_1d_last_dim",
    "make_sharded_output_tensor",
    "make_output_replicate_1d",
    "make_output_reshard_tensor",
    "make_output_tensor",
    "make_output_shard_1d",
]
