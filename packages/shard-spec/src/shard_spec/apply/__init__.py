"""Apply a plan to a module. Ranks compare, then scatter. Then all tensors are replaced, or none."""
