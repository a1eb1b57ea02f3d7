"""Layouts. Axes of ranks have names, and placements along them give boxes. No torch is imported."""
