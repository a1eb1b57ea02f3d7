"""Passes over the graph. Each has a file of its own. `dp_partition.pipeline` lists them in order."""
