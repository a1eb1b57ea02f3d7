"""Traps on placed DTensors: numbers of a partial sum, writes through views, and gradient hooks are silently wrong.

Within a call of `distribute` all ranks run the same line, so `dp_partition.eager.shards` gathers a number there.
Between calls rank 0 may be alone, and a number that is this rank's own is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import pytree
from dp_partition.runtime.saving import PICKLE

READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__format__", "is_nonzero")
) | {torch.is_nonzero}
_VIEWS = frozenset([
    "__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "diagonal", "view", "reshape",
    "flatten", "unflatten", "squeeze", "unsqueeze", "t", "transpose", "permute", "movedim", "swapaxes", "expand",
    "unfold",
])  # fmt: skip
_torchs = DTensor.__torch_function__
views = WeakTensorKeyDictionary()  # DTensors that a function above has returned


def install() -> None:
    """Set the traps for the process; DTensors on no mesh of placed tensors pass them."""
    DTensor.__torch_function__ = classmethod(_between)  # type: ignore[assignment]


def is_written(name: str) -> bool:
    """Return True if a function of torch of this name writes its first argument."""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def refuse_silent(name: str, target: DTensor, hint: str) -> None:
    """Refuse a gradient hook on a shard, which FSDP2 never runs, and a write through a view, which may be a copy.

    Raises:
        PlanError: ``parameter-hooks`` or ``parameter-replaced``, with ``hint`` as the way on.
    """
    if name == "register_hook" and isinstance(target, nn.Parameter):
        raise PlanError(
            Problem(
                "parameter-hooks",
                found="a gradient hook on a parameter in shards would never run",
                hint='use register_post_accumulate_grad_hook, or style="replicate"',
            )
        )
    if is_written(name) and (name == "__setitem__" or target in views):
        raise PlanError(Problem("parameter-replaced", found=f"a view of shards is written ({name})", hint=hint))


def note_views(name: str, result: Any) -> None:
    """Note DTensors among the result of a function that returns views."""
    if name in _VIEWS:
        views.update(dict.fromkeys([x for x in pytree.tree_leaves(result) if isinstance(x, DTensor)]))


def _between(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name, first = getattr(func, "__name__", ""), args[0] if args else None
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__get__" or not isinstance(first, DTensor) or PICKLE not in vars(first.device_mesh):
            return func(*args, **kwargs or {})
        if func in READS and not all(place.is_replicate() for place in first.placements):
            raise PlanError(
                Problem(
                    "local-shard-as-full",
                    found=f"{name}() between calls, of shards: the number would be this rank's own",
                    hint="read it within `with step.unsharded():`, which every rank enters, or call full_tensor() first"
                    " on every rank",
                )
            )
        refuse_silent(name, first, "write within `with step.unsharded():`, which every rank enters")
        result = func(*args, **kwargs or {})
        note_views(name, result)
        return result
