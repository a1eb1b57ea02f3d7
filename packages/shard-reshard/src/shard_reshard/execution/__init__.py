"""The one executor. While guards hold, a prepared call runs again. Else tensors are checked, and ranks compare."""
