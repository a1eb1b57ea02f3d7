"""Layouts resolved for a shape: the boxes of a tensor on each rank.

Every form of a layout becomes a shard map (`parse`), of a mesh, of boxes, or a view of one. Planning needs nothing
else, and no torch.
"""
