"""The eager way: a step without a trace runs as written, on placed parameters.

`reducer` averages gradients in each backward pass and lets ranks meet, `shards` places parameters by FSDP2, `step` runs
a call.
"""
