"""Runtime: a placed model, and all that runs around a graph.

`state` places parameters and optimizer state, and keeps their values to undo a failed step. `program` runs a graph,
after it reconciled changes since the last call. `consensus` compares ranks.
"""
