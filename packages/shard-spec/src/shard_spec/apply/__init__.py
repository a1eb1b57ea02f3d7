"""Applying a plan to a module: compare, scatter, then replace its tensors, all or nothing."""
