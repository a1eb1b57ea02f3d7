"""Forward and backward of a sharded model: collectives with gradients, local compute, hooks.

Five things happen around the forward of a sharded module, in this order: the check of a first call, random numbers of
the region (`dropout`), inputs to their layout (`redistribute`), local compute on local parameters (`forwards`,
`parameters`), outputs to their layout.
"""
