"""The first tensor-parallel styles, with the meaning they had, on today's DTensor.

`SequenceParallel` here is the pair of linear layers between sequence shards: rows are gathered on the way in and
reduce-scattered on the way out. The class of that name in `tp_styles` itself is today's style for norms and dropout.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_styles.legacy.pairwise import PairwiseParallel as PairwiseParallel
    from tp_styles.legacy.pairwise import SequenceParallel as SequenceParallel
    from tp_styles.legacy.prepare import make_input_replicate_1d as make_input_replicate_1d
    from tp_styles.legacy.prepare import make_input_reshard_replicate as make_input_reshard_replicate
    from tp_styles.legacy.prepare import make_input_shard_1d as make_input_shard_1d
    from tp_styles.legacy.prepare import make_input_shard_1d_last_dim as make_input_shard_1d_last_dim
    from tp_styles.legacy.prepare import make_output_replicate_1d as make_output_replicate_1d
    from tp_styles.legacy.prepare import make_output_reshard_tensor as make_output_reshard_tensor
    from tp_styles.legacy.prepare import make_output_shard_1d as make_output_shard_1d
    from tp_styles.legacy.prepare import make_output_tensor as make_output_tensor
    from tp_styles.legacy.prepare import make_sharded_output_tensor as make_sharded_output_tensor
    from tp_styles.styles.base import ParallelStyle as ParallelStyle
    from tp_styles.styles.colwise import ColwiseParallel as ColwiseParallel
    from tp_styles.styles.rowwise import RowwiseParallel as RowwiseParallel

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

_MODULES = {
    "ParallelStyle": "tp_styles.styles.base",
    "RowwiseParallel": "tp_styles.styles.rowwise",
    "ColwiseParallel": "tp_styles.styles.colwise",
    "PairwiseParallel": "tp_styles.legacy.pairwise",
    "SequenceParallel": "tp_styles.legacy.pairwise",
}


# Reached lazily: the styles use the prepare functions of this package as their defaults.
def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, "tp_styles.legacy.prepare")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
