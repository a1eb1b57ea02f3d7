"""Views that torch makes of gathered rows: a write to one reaches no shard, so between calls it is refused.

`weight[0]` of a weight in shards by rows is a copy on every rank. Within a call of a step its own traps see to writes.
Before torch 2.13 operators on a subclass of DTensor do not reach it: there such a write is lost as in torch itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import is_in_backward, pytree
from dp_partition.capture.tracer import user_line
from dp_partition.runtime.saving import PICKLE, running

_aten = torch.ops.aten
# Views of one dim, of which torch gathers rows that are spread; a transposed shard, say, is a view of the shard.
VIEWS = (
    *(_aten.select.int, _aten.slice.Tensor, _aten.unbind.int, _aten.diagonal.default, _aten.view.default),
    *(_aten.split.Tensor, _aten.split_with_sizes.default),
)


class Gathered(DTensor):
    """A view that holds a copy of a placed tensor's rows. Views of it are of its class; results are DTensors."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on copies.

        Raises:
            PlanError: ``parameter-replaced``: the operator writes one.
        """
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        for each in func._schema.arguments:
            is_written = each.alias_info is not None and each.alias_info.is_write
            if is_written and any(isinstance(x, Gathered) for x in pytree.tree_leaves(named.get(each.name))):
                raise PlanError(
                    Problem(
                        "parameter-replaced",
                        found=f"a view of shards is written ({func}){user_line()}, and holds a copy of their rows",
                        hint="write it within `with step.unsharded():`, which every rank enters",
                    )
                )
        memory = {storage_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Gathered)}
        plain = partial(DTensor, requires_grad=False)  # torch runs operators on DTensors themselves
        own = pytree.tree_map_only(Gathered, lambda x: plain(x._local_tensor, x._spec), (args, kwargs or {}))
        return marked(func(*own[0], **own[1]), lambda x: storage_of(x) in memory)


def storage_of(tensor: DTensor) -> object:
    """Return what identifies the memory of a DTensor's local rows; of fake ones too."""
    return tensor._local_tensor.untyped_storage()._cdata


def marked(result: Any, is_copy: Callable[[DTensor], bool]) -> Any:
    """Return the result of a view, in which copies are `Gathered`."""
    for each in pytree.tree_leaves(result):
        if type(each) is DTensor and is_copy(each):
            each.__class__ = Gathered
    return result


def view_of(call: Callable[[], Any], operator: Any, args: Any) -> Any:
    """Return the view that an operator makes of a DTensor, marked where it holds a copy of placed rows."""
    result, source = call(), args[0]
    if PICKLE not in vars(source.device_mesh) or threading.get_ident() in running or is_in_backward():
        return result
    memory = storage_of(source)
    return marked(result, lambda x: storage_of(x) != memory)
