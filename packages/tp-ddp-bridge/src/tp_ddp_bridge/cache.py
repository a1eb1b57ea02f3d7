"""One view per leaf and outermost forward.

A leaf that is read again in the same forward (a tie, a module called twice, an attention that looks at its weight
several times) gives the same view again, if everything that could make it another one is unchanged: the leaf's data and
dtype, grad mode, inference mode, and the checkpointed region one is in. When the outermost forward ends, all views are
let go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tp_ddp_bridge._torch_compat import saved_tensors_hooks_in_force

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tp_ddp_bridge.view import View


class _Forward(threading.local):
    """The forward that this thread is in; a recomputation in backward starts one of its own."""

    depth = 0
    views: dict[Any, tuple[torch.Tensor, DTensor]] | None = None


_forward = _Forward()


@contextmanager
def forward_scope() -> Iterator[None]:
    """Keep views until the outermost of nested scopes ends."""
    if _forward.depth == 0:
        _forward.views = {}
    _forward.depth += 1
    try:
        yield
    finally:
        _forward.depth -= 1
        if _forward.depth == 0:
            _forward.views = None


def cached_view(view: View, leaf: torch.Tensor) -> DTensor:
    """The view of ``leaf`` that this forward already has, or a new one."""
    views = _forward.views
    if views is None or leaf.is_inference():
        made = view.make(leaf)
        grad = leaf.grad
        if views is None and grad is not None and grad.dtype == leaf.dtype and grad.layout == torch.strided:
            made.grad = view.layout.wrap(grad)  # `module.weight.grad` outside a forward shows the gradient
        return made
    key = (
        id(leaf),
        id(view.layout),
        leaf._version,
        leaf.dtype,
        leaf.requires_grad,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        saved_tensors_hooks_in_force(),
    )
    found = views.get(key)
    if found is not None:
        return found[1]
    made = view.make(leaf)
    views[key] = (leaf, made)  # holds the leaf, so that its id stays its own
    return made


def in_forward() -> bool:
    """Whether a bridged module is running in this thread."""
    return _forward.depth > 0


def live_views() -> int:
    """How many views are kept at this moment (0 outside any forward)."""
    return len(_forward.views or ())
