"""One view per leaf and outermost forward.

A leaf that is read again in the same forward (a tie, a module called twice, an attention that looks at its weight
several times) gives the same view again, if everything that could make it another one is unchanged: the leaf's data and
dtype, grad mode, inference mode, and the checkpointed region one is in. When the outermost forward ends, all views are
let go.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from tp_ddp_bridge._torch_compat import saved_tensors_hooks_in_force

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tp_ddp_bridge.view import View


class _Forward(threading.local):
    """The forward that this thread is in; a recomputation in backward starts one of its own."""

    depth = 0
    views: dict[Any, tuple[DTensor, torch.Tensor, View]] | None = None


_forward = _Forward()


class ForwardScope:
    """Keeps views until the outermost of nested scopes ends."""

    __slots__ = ()

    def __enter__(self) -> None:
        if _forward.depth == 0:
            _forward.views = {}
        _forward.depth += 1

    def __exit__(self, *_: object) -> None:
        _forward.depth -= 1
        if _forward.depth == 0:
            views, _forward.views = _forward.views, None
            for made, leaf, view in (views or {}).values():
                view.lay_by(made, leaf)


def cached_view(view: View, leaf: torch.Tensor) -> DTensor:
    """The view of ``leaf`` that this forward already has, or a new one."""
    views = _forward.views
    if views is None or leaf.is_inference():
        return view.make(leaf)
    region = saved_tensors_hooks_in_force()
    grad_mode, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (
        id(leaf),
        id(view.layout),
        leaf._version,
        leaf.dtype,
        leaf.requires_grad,
        grad_mode,
        inference,
        region,
    )
    found = views.get(key)
    if found is None:
        made = view.spare(leaf) if region is None and grad_mode else None
        # with its leaf, whose id stays its own for so long
        found = views[key] = (view.make(leaf) if made is None else made, leaf, view)
    return found[0]


def in_forward() -> bool:
    """Whether a bridged module is running in this thread."""
    return _forward.depth > 0


def live_views() -> int:
    """How many views are kept at this moment (0 outside any forward)."""
    return len(_forward.views or ())
