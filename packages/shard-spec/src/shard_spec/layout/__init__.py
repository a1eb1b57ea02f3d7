"""Layouts: named axes of ranks, placements along them, and the boxes that follow. No torch is imported."""
