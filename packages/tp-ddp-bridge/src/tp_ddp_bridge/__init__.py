"""Let DistributedDataParallel wrap a tensor-parallel module, with nothing lost."""

from tp_ddp_bridge.__about__ import __version__

__all__ = ["__version__"]
