"""Tensor-parallel styles: prepare a module's inputs, outputs and parameters as DTensors."""

from tp_styles.__about__ import __version__

__all__ = ["__version__"]
