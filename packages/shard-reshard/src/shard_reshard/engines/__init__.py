"""Inference engines as destinations: what their loaders do is recorded, and vLLM receives into its own parameters."""
