"""Capture: one graph of forward, backward and optimizer, recorded on fake tensors."""
