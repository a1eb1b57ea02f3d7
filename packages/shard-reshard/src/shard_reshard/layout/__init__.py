"""Layouts resolved for a shape. A layout says which box of a tensor lies on which rank. Without torch."""
