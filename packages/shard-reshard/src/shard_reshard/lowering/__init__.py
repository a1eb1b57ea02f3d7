"""From a plan to bytes: steps, splits and places in memory, still without tensors.

`program` lays copies out in messages and rounds. `memory_layout` decides for given strides what is copied and what is
sent from where it lies.
"""
