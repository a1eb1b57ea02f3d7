"""Consistency of ranks: groups with the same shards, and equal values in them.

``axes`` is pure. ``replicas`` compares by hash, and makes all ranks raise together.
"""
