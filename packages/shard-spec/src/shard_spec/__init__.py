"""Describe, check, compute, explain, compare and apply how a model's tensors lie on ranks."""

from shard_spec.__about__ import __version__

__all__ = ["__version__"]
