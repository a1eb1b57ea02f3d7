"""The decorator interface of torch 2.1's SPMD compiler."""

from dp_partition.legacy.decorator import DataParallel, compile

__all__ = ["compile", "DataParallel"]
