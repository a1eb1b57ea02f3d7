"""Sharding: decide the placement of every value in a graph, from those of its inputs.

`propagate` walks through the graph once. `op_rules` has a rule for each operator that can run on shards; `rule_table`
keeps them and weighs what they offer.
"""
