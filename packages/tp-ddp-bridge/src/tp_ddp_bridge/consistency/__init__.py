"""Agreement of ranks: which of them hold the same shards, and that they hold the same values.

``axes`` is pure. ``replicas`` compares by fingerprint, and lets all ranks raise together.
"""
