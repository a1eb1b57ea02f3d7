"""The eager way: a step that does not trace runs as it is written, on placed parameters.

`reach` finds models, optimizers and state past the arguments, `reducer` averages gradients behind each backward pass,
`step` is the recipe of a call. Nothing of torch is patched; hooks stand on the step's own parameters.
"""
