"""Reports: a step as one page with pictures."""
