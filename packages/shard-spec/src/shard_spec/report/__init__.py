"""Reports: a plan in words, in tables and as a page."""
