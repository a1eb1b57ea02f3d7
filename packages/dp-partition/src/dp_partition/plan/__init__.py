"""Placement of parameters, gradients and state: values, decided from shapes alone.

`placements` has the vocabulary and the axes of a mesh, `plan` the choices of a caller of `compile` and the decision.
"""
