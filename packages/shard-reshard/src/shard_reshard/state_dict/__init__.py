"""Whole state dicts: metadata of all ranks, one plan, a few fused exchanges.

`meta` reads what each rank has, `planner` makes one plan of it, `agreement` has ranks compare, `resharder` runs it,
`outputs` puts results under their names.
"""
