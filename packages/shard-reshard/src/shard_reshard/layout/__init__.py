"""Layouts resolved for a shape: which box of a tensor lies where on which rank.

Everything that says where a tensor lies becomes a shard map (`parse`), of a mesh, of boxes, or a view of one. Planning
needs nothing else, and no torch.
"""
