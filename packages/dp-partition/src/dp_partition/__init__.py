"""Turn an unmodified single-device train step into a data-parallel fx graph."""

from dp_partition.__about__ import __version__

__all__ = ["__version__"]
