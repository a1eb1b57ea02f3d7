"""Helpers of a training loop: loss over a sharded vocabulary, gradient clipping, full state dicts."""
