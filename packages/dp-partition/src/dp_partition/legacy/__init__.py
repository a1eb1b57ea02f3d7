"""Names of torch 2.1's SPMD data parallelism, over this package's own stages.

`graph_interface` partitions a graph from elsewhere, `batch_dim` follows the batch through it, `decorator` has the front
end of torch 2.1. New code calls `dp_partition.compile`.
"""

from dp_partition.legacy.decorator import DataParallel, compile

__all__ = ["compile", "DataParallel"]
