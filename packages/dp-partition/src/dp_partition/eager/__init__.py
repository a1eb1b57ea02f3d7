"""The eager way: a step without a trace runs as written, on placed parameters.

`reach` finds models, optimizers and state outside of the arguments, `reducer` averages gradients in each backward pass,
`step` runs a call. Nothing of torch is patched; hooks are on the step's own parameters only.
"""
