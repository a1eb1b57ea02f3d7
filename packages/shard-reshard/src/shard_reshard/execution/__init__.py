"""The one executor: while guards hold a prepared call runs again; else tensors are checked, and ranks compare."""
