"""Passes over the graph, each in a file of its own; `dp_partition.pipeline` lists them in order."""
