"""The decorator interface of torch 2.1's SPMD compiler: local batches in, a step over all ranks' batches together."""

from dp_partition.legacy.api import compile
from dp_partition.legacy.modes import DataParallel, Override, ParallelMode

__all__ = ["compile", "DataParallel", "Override", "ParallelMode"]
