"""Forward and backward of a sharded model, on local tensors.

`install` gives modules their forwards and hooks. These bring inputs to their layout (`redistribute`), compute on local
parameters (`forwards`, `attention`, `parameters`), and bring outputs to theirs. Random numbers of a region (`dropout`)
and state dicts (`state_hooks`) have hooks of their own.
"""
