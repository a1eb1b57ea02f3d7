"""Optimizers beside tensor parallelism: all that they do to a full parameter, done on shards.

``elementwise`` tests an optimizer on shards, ``state`` re-points it in place and takes its state through checkpoints.
``scaler`` skips a step on all ranks or none.
"""
