"""The graph-level interface: from a traced single-device step to a data-parallel graph, stage by stage."""

from dp_partition.capture.tagging import gradients_tagging
from dp_partition.data_parallel.batch_dim import BatchDimAnalyzer
from dp_partition.data_parallel.marking import mark_data_parallel_shardings, partitioner
from dp_partition.data_parallel.partition import partition_data_parallel
from dp_partition.data_parallel.strategies import build_data_parallel_strategies

__all__ = [
    "BatchDimAnalyzer",
    "build_data_parallel_strategies",
    "gradients_tagging",
    "mark_data_parallel_shardings",
    "partition_data_parallel",
    "partitioner",
]
