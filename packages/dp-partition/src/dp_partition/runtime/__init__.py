"""Runtime: a placed model, and all that runs around a graph.

`state` places parameters and optimizer state, `io` reconciles changes since the last call. `consensus` compares
ranks, `rollback` undoes a failed step.
"""
