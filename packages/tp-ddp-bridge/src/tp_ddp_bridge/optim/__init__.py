"""Optimizers beside tensor parallelism: all that they do to a full parameter, done on shards.

``repoint`` exchanges parameters in place, ``elementwise`` tests an optimizer on shards.
``scaler`` skips a step on all ranks or none, ``state`` goes through checkpoints.
"""
