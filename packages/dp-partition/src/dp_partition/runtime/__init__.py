"""Runtime: a placed model, and what happens around each run of a graph.

`state` places parameters and optimizer state, `io` brings in what was changed since the last call, `consensus` lets
ranks agree, `rollback` takes back what a failed step left.
"""
