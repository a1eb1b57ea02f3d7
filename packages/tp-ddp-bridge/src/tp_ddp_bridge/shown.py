"""What a view can do outside a forward, where users look at parameters and hang things on them.

`module.weight.grad` shows the gradient, and `module.weight.register_hook` registers on the leaf: a view that is about
to be let go must not take a hook along.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge.hooks import register_carried
from tp_ddp_bridge.layout import Layout


class Shown(DTensor):
    """A view outside a forward: what is assigned to its ``data`` and ``grad`` goes to the leaf.

    Torch lets both be assigned to a DTensor that is about to be let go, and nothing would change.
    """

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        """As of a DTensor: shares the leaf's memory."""
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        leaf, layout = self.__dict__["_of"]
        leaf.data = _local(value, layout, "data")

    @property
    def grad(self) -> torch.Tensor | None:
        """The leaf's gradient in its layout, as it was when the view was read."""
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        leaf, layout = self.__dict__["_of"]
        leaf.grad = None if value is None else _local(value, layout, "grad")
        _GRAD.__set__(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied as the DTensor that it shows."""
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_plain(self), memo)


_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


def _plain(view: Shown) -> DTensor:
    _, layout = view.__dict__["_of"]
    found: DTensor = layout.wrap(view._local_tensor)
    return found


def _local(value: Any, layout: Layout, name: str) -> torch.Tensor:
    if not isinstance(value, DTensor) or value.shape != layout.shape:
        raise TypeError(
            f"{name} of a parameter that is laid out as {layout}: assign a DTensor of that global shape (found "
            f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))})"
        )
    return layout.localize(value)


def shown(view: Any, leaf: torch.Tensor, layout: Layout) -> Any:
    """``view`` with the gradient of ``leaf``, and with hooks that go to ``leaf``."""
    if not isinstance(view, DTensor) or not isinstance(leaf, nn.Parameter) or isinstance(leaf, DTensor):
        return view
    grad = leaf.grad
    if grad is not None and grad.dtype == leaf.dtype and grad.layout == torch.strided:
        _GRAD.__set__(view, layout.wrap(grad))
    hang: Any = view
    hang.__class__ = Shown
    hang.__dict__["_of"] = (leaf, layout)
    hang.register_hook = functools.partial(_register, leaf, layout, False)
    hang.register_post_accumulate_grad_hook = functools.partial(_register, leaf, layout, True)
    return view


def _register(leaf: torch.Tensor, layout: Layout, after: bool, hook: Any) -> Any:
    return register_carried(leaf, layout, hook, after)
