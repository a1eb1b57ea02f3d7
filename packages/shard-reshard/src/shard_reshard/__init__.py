"""Move tensors from one layout to another with the fewest bytes, in one all-to-all."""

from shard_reshard.__about__ import __version__

__all__ = ["__version__"]
