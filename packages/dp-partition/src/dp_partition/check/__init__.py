"""Check by execution: at some calls the step also runs eagerly on a copy, and the graph's outcome is compared with it.

`schedule` chooses the calls, `copying` copies everything the step works on, `reference` runs the copy, `verdict`
compares, and `checked_call` is the recipe that puts them together.
"""
