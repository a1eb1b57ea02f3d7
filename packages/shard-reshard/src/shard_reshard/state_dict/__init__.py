"""Full state dicts: metadata of all ranks, one plan, a few fused exchanges."""
