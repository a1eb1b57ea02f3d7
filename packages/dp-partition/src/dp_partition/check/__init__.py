"""Check by execution: compare calls with an eager run of the step's copy.

`checked_call` schedules and runs a check, `copying` copies everything used by the step, `reference` runs the
copy with `gradients` averaged as in the graph, and compares.
"""
