"""Passes over the graph. `dp_partition.pipeline` lists them in order."""
