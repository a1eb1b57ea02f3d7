"""Check by execution: at some calls the step also runs eagerly on a copy, and the graph's outcome is compared with it.

`checked_call` chooses the calls and is the recipe, `copying` copies everything the step works on, `reference` runs the
copy with `gradients` averaged as the graph does, `verdict` compares.
"""
