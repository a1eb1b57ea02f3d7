"""Placement of parameters, gradients and state: values, decided from shapes alone.

`placements` has the vocabulary, `settings` the choices of a caller of `compile`. `plan` is the decision.
"""
