"""Full state dicts. Ranks gather metadata and make one plan. A few fused exchanges carry it out."""
