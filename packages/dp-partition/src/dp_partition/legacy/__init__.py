"""The decorator interface of torch 2.1's SPMD compiler: local batches in, a step over all ranks' batches together."""

from dp_partition.legacy.decorator import DataParallel, Override, ParallelMode, compile

__all__ = ["compile", "DataParallel", "Override", "ParallelMode"]
