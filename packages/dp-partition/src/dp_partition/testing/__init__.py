"""Verification: all ranks of a step simulated in one process, compared with one device node by node."""
