"""What a view can do outside a forward, where users look at parameters and hang things on them.

`module.weight.grad` shows the gradient, and `module.weight.register_hook` registers on the leaf: a view that is about
to be let go must not take a hook along.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge.hooks import register_carried
from tp_ddp_bridge.layout import Layout


def shown(view: Any, leaf: torch.Tensor, layout: Layout) -> Any:
    """``view`` with the gradient of ``leaf``, and with hooks that go to ``leaf``."""
    if not isinstance(view, DTensor) or not isinstance(leaf, nn.Parameter) or isinstance(leaf, DTensor):
        return view
    grad = leaf.grad
    if grad is not None and grad.dtype == leaf.dtype and grad.layout == torch.strided:
        view.grad = layout.wrap(grad)
    hang: Any = view
    hang.register_hook = functools.partial(_register, leaf, layout, False)
    hang.register_post_accumulate_grad_hook = functools.partial(_register, leaf, layout, True)
    return view


def _register(leaf: torch.Tensor, layout: Layout, after: bool, hook: Any) -> Any:
    return register_carried(leaf, layout, hook, after)
