"""Layouts: named axes of ranks, placements along them, and the resulting boxes. No torch is imported."""
