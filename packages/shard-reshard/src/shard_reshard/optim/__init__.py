"""Optimizers that read full matrices, on parameters in any layout."""
