"""Reports of a plan. `explain` and `diff` are words and tables. `html` is a page."""
