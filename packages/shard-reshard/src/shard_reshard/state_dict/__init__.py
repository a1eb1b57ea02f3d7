"""Full state dicts: metadata of all ranks, one plan, a few fused exchanges.

`meta` reads each rank's metadata, `planner` derives one plan, `agreement` compares it between ranks, `resharder` runs
it, `outputs` assigns results to names.
"""
