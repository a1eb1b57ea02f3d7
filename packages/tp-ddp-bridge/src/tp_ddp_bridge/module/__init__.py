"""Bridging one module: survey it, exchange DTensors for leaves, read leaves as DTensors.

``survey`` reads and finds every problem. ``transform`` then exchanges the objects and changes the class of each owner
to one of ``view_class``, whose properties read a leaf as the ``view`` of it. ``eager`` is a view outside a forward;
``hooks`` runs users' hooks for leaves.
"""
