"""The calls: one tensor, DTensors, torch.compile, ShardedTensor and the functions of torch that this package replaces.

Each resolves layouts, finds or makes a `Mover`, and hands over local tensors. Nothing below imports from here.
"""
