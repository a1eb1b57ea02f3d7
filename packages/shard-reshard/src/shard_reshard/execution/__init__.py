"""The one executor: guards, prepare, run.

While guards hold, a prepared call is run again; otherwise tensors are checked, ranks compare, and it is prepared anew.
One-shot, kept and repeated calls take this one route.
"""
