"""Views outside a forward, for users to read parameters and assign to them.

Assignments to such a view go to the leaf: on the view they would vanish with it. Hooks are refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge.layout import Layout

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


class EagerView(DTensor):
    """A view outside a forward; ``_of`` holds its leaf and its layout."""

    __slots__ = ()
    _of: tuple[torch.Tensor, Layout]

    def _set_data(self, value: DTensor) -> None:
        leaf, layout = self._of
        leaf.data = layout.localize(value)

    def _set_grad(self, value: DTensor | None) -> None:
        leaf, layout = self._of
        leaf.grad = None if value is None else layout.localize(value)
        _GRAD.__set__(self, value)

    data = property(_DATA.__get__, _set_data)
    grad = property(_GRAD.__get__, _set_grad)  # from when the view was read

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: the hook would vanish with the view."""
        raise RuntimeError(
            "each read of the attribute is a new tensor, and a hook on it would vanish: register it on the leaf, "
            "dict(module.named_parameters())[name], whose gradient is this rank's shard, or before bridging"
        )

    register_post_accumulate_grad_hook = register_hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a plain DTensor: loading it needs no bridge."""
        return self._of[1].wrap(self._local_tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._of[1].wrap(self._local_tensor).__deepcopy__(memo)


def eager_view(view: Any, leaf: torch.Tensor, layout: Layout) -> Any:
    """Return ``view`` with the gradient of ``leaf``; assignments to it go to ``leaf``."""
    if not isinstance(view, DTensor) or not isinstance(leaf, nn.Parameter) or isinstance(leaf, DTensor):
        return view  # a buffer, or no leaf any more
    grad = leaf.grad
    if grad is not None and grad.dtype == leaf.dtype and grad.layout == torch.strided:
        _GRAD.__set__(view, layout.wrap(grad))
    eager: Any = view
    eager.__class__ = EagerView
    eager._of = (leaf, layout)
    return view
