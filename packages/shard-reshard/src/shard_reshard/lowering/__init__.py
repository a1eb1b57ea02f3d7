"""Lowering of a plan to bytes: steps, splits and positions in memory, still without tensors.

`program` orders copies in messages, `chunking` splits them into rounds, `memory_layout` decides for given strides
between copies through buffers and transfers in place.
"""
