"""Placement of parameters, gradients and state: values, decided from shapes alone.

`placements` has the words, `settings` what the caller of `compile` chooses, `plan` the decision.
"""
