"""Inference engines as destinations: recorded loaders, and vLLM's parameters."""
