"""The one executor: guards, prepare, run.

While guards hold, a prepared call is replayed; otherwise tensors are checked, ranks compare, and it is prepared anew.
One-shot, kept and repeated calls share this path.
"""
