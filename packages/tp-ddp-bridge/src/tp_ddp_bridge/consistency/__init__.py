"""Consistency of ranks: groups with the same shards, and equal values in them.

``axes`` is pure. ``replicas`` compares by fingerprint, and makes all ranks raise together.
"""
