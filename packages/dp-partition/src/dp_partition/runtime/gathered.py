"""Views that torch makes of gathered rows, and full copies of views that a step has returned: both hold other memory.

`weight[0]` of a weight in shards by rows is a copy on every rank. A write to one would be lost: it is refused. Once the
shards have been written, such as by an optimizer, a copy is taken again within a call, where all ranks read it; between
calls, where rank 0 may be alone, a read is refused.

Before torch 2.13 operators on a subclass of DTensor do not reach it: there a write between calls is lost as in torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

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


@dataclass
class _Copy:
    """Memory that stands for a view of a placed tensor, shared by views of that view."""

    source: DTensor
    take: Callable[[], torch.Tensor]  # gathers the view's present values, on all ranks
    values: torch.Tensor
    version: int  # of the source, when the values were taken
    was_written: bool = False  # the source in a call since then, maybe by `.data`, whose version counts alone


# By each tensor that has the memory of a copy. Weak: a gathered weight is freed with the last view of it.
copies = WeakTensorKeyDictionary()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def note_write(written: Any) -> None:
    """Note that a call writes placed tensors: what was taken of them is stale."""
    memory = {storage_of(x) for x in pytree.tree_leaves(written) if isinstance(x, DTensor)}
    for copy in list(copies.values()):
        copy.was_written = copy.was_written or storage_of(copy.source) in memory


def _is_stale(tensor: torch.Tensor) -> bool:
    copy = copies.get(tensor)
    return copy is not None and (
        copy.was_written or copy.version != _version(copy.source) or _is_stale(copy.source)  # of a row that is returned
    )


def is_written(name: str) -> bool:
    """Return True if a function of torch of this name writes its first argument."""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def refuse_write(name: str, written: Any) -> None:
    """Refuse a write to a copy, which its shards would not see.

    Raises:
        PlanError: ``parameter-replaced``.
    """
    if any(x in copies for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)):
        reason = f"a view of shards is written ({name}){user_line()}, and holds a copy of their rows"
        hint = "write it within `with step.unsharded():`, which every rank enters"
        if threading.get_ident() in running:
            hint = 'write full tensors, or in call 1, too, which keeps the parameter full; or use style="replicate"'
        raise PlanError(Problem("parameter-replaced", found=reason, hint=hint))


def refresh(tensor: torch.Tensor) -> None:
    """Take a copy again if its shards were written since.

    Raises:
        PlanError: ``local-shard-as-full`` between calls; in a call, where some ranks alone read, as of `meet`.
    """
    if not _is_stale(tensor):
        return
    copy = copies[tensor]
    if threading.get_ident() not in running and not is_in_backward():
        reason = f"a view of shards, which were written since it was taken, is read{user_line()}: it has the old values"
        hint = "take it again, or take a clone() for the values of that time"
        raise PlanError(Problem("local-shard-as-full", found=reason, hint=hint))
    for traps in running.get(threading.get_ident(), [])[-1:]:
        traps.meet()
    with torch.no_grad():
        copy.values.copy_(copy.take())
    copy.version, copy.was_written = _version(copy.source), False


def marked(result: Any, used: Iterable[torch.Tensor]) -> Any:
    """Return the result of a function, in which tensors with the memory of one of the ``used`` copies are copies."""
    memory = {storage_of(x): x for x in used if x in copies}
    for each in pytree.tree_leaves(result) if memory else ():
        if isinstance(each, torch.Tensor) and each not in copies and (like := memory.get(storage_of(each))) is not None:
            each.__class__ = type(like)
            copies[each] = copies[like]
    return result


class Gathered(DTensor):
    """A view that holds a copy of a placed tensor's rows. Views of it are of its class; results are DTensors."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The copy, with present values: operators, `full_tensor` and `to_local` read it."""
        refresh(self)
        return _rows_of(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on copies; refuse one that writes them."""
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        for each in func._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                refuse_write(str(func), named.get(each.name))
        used = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Gathered)]
        plain = partial(DTensor, requires_grad=False)  # torch runs operators on DTensors themselves
        own = pytree.tree_map_only(Gathered, lambda x: plain(x._local_tensor, x._spec), (args, kwargs or {}))
        return marked(func(*own[0], **own[1]), used)


class Returned(torch.Tensor):
    """A full copy, returned by a call, of a placed tensor or of a view of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the plain copies; refuse one that writes them."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            refuse_write(name, (args[:1] if is_written(name) else (), kwargs.get("out")))
            used = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Returned)]
            for x in used if name != "__get__" else ():
                refresh(x)
            plain = pytree.tree_map_only(Returned, lambda x: x.as_subclass(torch.Tensor), (args, kwargs))
            result = func(*plain[0], **plain[1])
            if name in ("numpy", "__array__"):  # numpy refuses a write itself
                result.flags.writeable = False
            return marked(result, used)


def returned(tensor: DTensor) -> torch.Tensor:
    """Return the full values of a view of placed tensors, with which a call ends."""

    @torch.no_grad()  # of one of several views, as those of split(), torch has no gradient once it was written
    def take() -> torch.Tensor:
        return tensor.full_tensor()

    full = take().as_subclass(Returned)
    copies[full] = _Copy(tensor, take, full.as_subclass(torch.Tensor), _version(tensor))
    return full


def storage_of(tensor: torch.Tensor) -> object:
    """Return what identifies the memory of a tensor, or of a DTensor's local rows; of fake ones too."""
    local = _rows_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata


def _rows_of(tensor: DTensor) -> torch.Tensor:
    local: torch.Tensor = vars(DTensor)["_local_tensor"].__get__(tensor)
    return local


def view_of(call: Callable[[], Any], operator: Any, args: Any) -> Any:
    """Return the view that an operator makes of a DTensor, marked where it holds a copy of placed rows."""
    result, source = call(), args[0]
    if PICKLE not in vars(source.device_mesh) or is_in_backward():
        return result
    memory = storage_of(source)
    for place, each in enumerate(pytree.tree_leaves(result)):
        if type(each) is DTensor and storage_of(each) != memory:

            def take(place: int = place) -> torch.Tensor:
                local: torch.Tensor = pytree.tree_leaves(call())[place]._local_tensor
                return local

            each.__class__ = Gathered
            copies[each] = _Copy(source, take, _rows_of(each), _version(source))
    return marked(result, (source,))  # before torch 2.13: of `weight[0, 0]`, two views in one call of torch
