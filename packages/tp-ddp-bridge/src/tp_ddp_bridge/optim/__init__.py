"""Optimizers beside tensor parallelism: everything that they do to a full parameter, done on shards.

``repoint`` exchanges parameters in place, ``elementwise`` shows that an optimizer may work on shards at all, ``norms``
clips by the norm of the whole model, ``scaler`` skips a step on all ranks or none, ``state`` goes through checkpoints.
"""
