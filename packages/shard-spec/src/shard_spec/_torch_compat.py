"""Access to torch's private names, all in one place: those of 2.11 to 2.15."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

F = TypeVar("F", bound=Callable[..., Any])


def strided_shard_factor(placement: object) -> int | None:
    """Return the split factor of a DTensor strided shard, or None for other placements."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Create DTensor's strided shard: the dim has ``split_factor`` sections and each one is sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard

    placement: Any = _StridedShard(dim, split_factor=split_factor)
    return placement  # type: ignore[no-any-return]  # the class is untyped in torch


# ---- torch.distributed._shard: specs and sharders of the caller -------------------------------------------------

_SHARD_MODULES = (
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec", "chunk"),
    ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec", "enumerable"),
    ("torch.distributed._shard.metadata", "ShardMetadata", "shard"),
    ("torch.distributed._shard.sharding_plan.api", "ShardingPlan", "plan"),
    ("torch.distributed.remote_device", "_remote_device", "device"),
)


def shard_kind(value: object) -> str | None:
    """Return the kind of a sharding object of torch, or None.

    Checks only modules in sys.modules: instances of a class cannot exist before its import.
    """
    for module, name, kind in _SHARD_MODULES:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, name)):
            return kind
    return None


def torch_class(kind: str) -> Any:
    """Return torch's class of a kind of :func:`shard_kind`."""
    module, name = next((module, name) for module, name, each in _SHARD_MODULES if each == kind)
    return getattr(importlib.import_module(module), name)


def group_of_name(name: str) -> Any:
    """Return the process group called ``name``."""
    from torch.distributed import distributed_c10d

    resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009  # torch does not export it
    return resolve(name)


def can_order_groups() -> bool:
    """Return True if ``new_group`` can preserve the order of its ranks."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def mesh_without_groups(device_type: str, ranks: Any, names: tuple[str, ...]) -> Any:
    """Create a DeviceMesh on a rank outside of it, without communication."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def computes_with_strided_shards() -> bool:
    """Return True if DTensor operators and gathers are correct on ``_StridedShard``: tested on 2.13, not earlier."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def tensor_hooks(tensor: Any) -> list[Any]:
    """Return the gradient hooks of a tensor, including those after accumulation."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values()]


def eager_only(function: F) -> F:
    """Keep ``torch.compile`` from tracing ``function``: it runs eagerly between two compiled graphs.

    ``torch.compiler.disable`` does the same, but imports the compiler; here it is used only if it is loaded.
    """
    from torch._compile import _disable_dynamo

    disabled: Any = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    wrapped: Any = call
    return wrapped  # type: ignore[no-any-return]  # a function like the one it wraps


# ---- tracing of forwards --------------------------------------------------------------------------------------


def on_every_operator(handle: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a context in which ``handle(operator, args, kwargs)`` runs each operator, below autograd.

    Modes of torch functions do not see what ``handle`` calls: they are about the caller's functions, not about shapes.
    """

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunction():
                return handle(func, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]  # torch's constructor is untyped


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to each tensor of a container; classes registered with torch (model outputs) keep type."""
    return tree_map_only(torch.Tensor, function, value)


def memory_of(tensor: Any) -> int:
    """Return a number shared by tensors that share memory, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def unwatched_detach(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()`` unseen by modes of functions and of operators, which cost most of its time."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return tensor.detach()


@functools.cache
def engine_references() -> tuple[int, int] | None:
    """Return `references` of a gradient that autograd's engine alone holds while it adds another to it.

    The engine adds in place, but not while a dispatch mode watches it. A caller's own sum in a backward has other
    numbers: its Python frame or its saved tensors hold the operand, too. None if this torch counts no references.
    """
    counts: list[tuple[int, int] | None] = []

    def handle(operator: Any, args: Any, kwargs: Any) -> Any:
        if operator is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            counts.append(references(args[0]))
        return operator(*args, **kwargs)

    with torch.enable_grad():
        x = torch.empty(2, device="meta", requires_grad=True)
        y = x.exp()
        total = y.exp() + y.sin()
    with on_every_operator(handle):
        torch.autograd.backward(total, torch.empty_like(total))
    return counts[-1] if counts else None


def references(tensor: Any) -> tuple[int, int] | None:
    """Return the numbers of references to a tensor and to its memory; None if this torch counts none."""
    if not hasattr(tensor, "_use_count"):
        return None
    of_storage: Any = getattr(torch._C, "_storage_Use_Count")  # noqa: B009  # torch's stubs lack it
    return int(tensor._use_count()), int(of_storage(tensor.untyped_storage()._cdata))


def live_bytes_of(call: Callable[[], object]) -> int:
    """Return the most bytes of new meta tensors alive at one time in ``call``; numbers read from them are 1."""
    sizes: dict[int, int] = {}
    totals = [0, 0]  # now, and at most

    def handle(operator: Any, args: Any, kwargs: Any) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        operands = {memory_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = operator(*args, **kwargs)
        for each in result if isinstance(result, list | tuple) else [result]:
            if not isinstance(each, torch.Tensor) or memory_of(each) in sizes or memory_of(each) in operands:
                continue  # a view, or a result in place
            memory, size = memory_of(each), each.untyped_storage().nbytes()
            sizes[memory] = size
            totals[0] += size
            totals[1] = max(totals)
            weakref.finalize(each.untyped_storage(), free, memory).atexit = False
        return result

    def free(memory: int) -> None:
        totals[0] -= sizes.pop(memory)

    with on_every_operator(handle):
        call()
    return totals[1]
