"""Bridging one module: survey it, exchange DTensors for leaves, read leaves as DTensors.

``survey`` reads and finds every problem. ``transform`` then exchanges the objects and changes the class of each owner
to one of ``view``, whose properties read a leaf as a view of it, also outside a forward, and which runs users' hooks
for leaves. ``loading`` takes a state dict apart.
"""
