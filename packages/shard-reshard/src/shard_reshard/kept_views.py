"""Views that stay from call to call while callers pass the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shard_reshard.packing import Region


class KeptViews:
    """The strided views of one side's local tensors.

    Making a view costs as much as copying a few kilobytes. Views are kept from the second call with the same memory
    on, and dropped as soon as a call comes with other memory, so that at most one call's tensors are held on to.
    """

    def __init__(self) -> None:
        self._pointers: tuple[int, ...] = ()
        self._anchors: list[torch.Tensor] = []
        self._views: dict[tuple[str, int, object], list[torch.Tensor]] = {}
        self._keeps = False

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Look at the tensors of a new call."""
        pointers = tuple([tensor.data_ptr() for tensor in tensors])
        same = pointers == self._pointers
        # A kept anchor keeps its memory from being freed; one whose memory was taken away has another address now.
        if same and self._keeps and pointers != tuple([anchor.data_ptr() for anchor in self._anchors]):
            same = False
        if not same:
            self._views, self._anchors, self._keeps = {}, [], False
        elif not self._keeps:
            self._anchors, self._keeps = [tensor.detach() for tensor in tensors], True
        self._pointers = pointers

    def get(
        self,
        use: str,
        number: int,
        memory: object,
        tensors: Sequence[torch.Tensor],
        regions: Callable[[], list[Region]],
    ) -> list[torch.Tensor]:
        """The views of ``regions()`` for one use of one step; ``memory`` lives as long as the exchange."""
        key = (use, number, id(memory))
        found = self._views.get(key)
        if found is None:
            found = strided_views(tensors, regions())
            if self._keeps:
                self._views[key] = found
        return found


def strided_views(tensors: Sequence[torch.Tensor], regions: Sequence[Region]) -> list[torch.Tensor]:
    """The regions of local tensors."""
    return [
        tensors[r.tensor].as_strided(r.sizes, r.strides, tensors[r.tensor].storage_offset() + r.offset) for r in regions
    ]
