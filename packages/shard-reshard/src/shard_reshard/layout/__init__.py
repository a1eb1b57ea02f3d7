"""Layouts resolved for a shape: which box of a tensor lies where on which rank. Without torch."""
