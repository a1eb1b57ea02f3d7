"""`shard_module` and `shard_parameter` of torch's `_shard`: a module that is sharded and goes on running.

Each rank passes its own rows; the forwards of `nn.Linear` and `nn.Embedding` exchange them. For new
code, plan tensor parallelism with a planner and carry the plan out with tp-styles.
"""
