"""Sharding: decide where every value of a graph lies, from where its inputs lie.

`propagate` walks through the graph once; `op_rules` has a rule for each operator that can run on shards.
"""
