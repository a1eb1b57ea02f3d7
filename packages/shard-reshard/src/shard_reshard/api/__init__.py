"""The calls: one tensor, DTensors, torch.compile, ShardedTensor and replacements of torch's functions.

Each resolves layouts, finds or builds a `Mover`, and passes it local tensors. Lower layers do not import from here.
"""
