"""Everything of torch that is only to be had under an underscore. Read against torch 2.13.0 and 2.11.0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards
from torch._guards import detect_fake_mode
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

F = TypeVar("F", bound=Callable[..., Any])


def assume_constant_result(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import all of torch._dynamo to set this mark.

    The tracer passes groups and meshes in a wrapper (torch 2.13), which is taken off.
    """

    @wraps(function)
    def constant(*arguments: Any) -> Any:
        return function(*map(_unwrapped, arguments))

    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
    return constant  # type: ignore[return-value]  # the same signature


def _unwrapped(value: Any) -> Any:
    if isinstance(value, FakeScriptObject):
        return value.real_obj
    return tuple(map(_unwrapped, value)) if type(value) is tuple else value


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy every source to its target, on CUDA in as few kernels as torch knows how to; dtypes are converted."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


def is_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors, or without tensors the mode that is on, have no data: nothing can be compared then."""
    if tensors:
        return any(isinstance(tensor, FakeTensor) for tensor in tensors)
    return detect_fake_mode() is not None


PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def same_metadata(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A test whether as many other tensors have the types, shapes, strides, dtypes, devices and flags of these.

    The guards of compiled code ask this in C++, a tenth of what it costs to ask tensors for each. They say no where one
    tensor is passed twice.
    """
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    count = len(tensors)
    return lambda others: len(others) == count and guards.check(*others)


def told_by(values: Sequence[Any]) -> tuple[list[torch.Tensor], list[object]]:
    """The local parts of tensors and DTensors, and what each says of where it lies; other values are left out.

    A DTensor's parts are read as it keeps them: its ``to_local`` and properties cost ten times as much.
    """
    public = sys.modules.get("torch.distributed.tensor")
    dtensor = None if public is None else public.DTensor
    kinds = set(map(type, values))
    if not kinds <= {*PLAIN_TYPES, dtensor}:
        values = [value for value in values if type(value) in PLAIN_TYPES or type(value) is dtensor]
    if kinds == {dtensor}:
        return [value._local_tensor for value in values], [value._spec for value in values]
    return [value._local_tensor if type(value) is dtensor else value for value in values], [
        value._spec if type(value) is dtensor else value.__dict__.get("_sharding_info") for value in values
    ]


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that an AsyncCollectiveTensor will be, which has no memory of its own; another tensor as it is."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    # Views of one do not wait; a copy does, and keeps the graph.
    if tensor.requires_grad:
        return tensor.clone()
    done: torch.Tensor = tensor.trigger_wait()
    return done


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others, so that its own memory says nothing."""
    return is_traceable_wrapper_subclass(tensor)


def is_transforming() -> bool:
    """Whether a transformation of torch.func is under way: no tensor that is made meanwhile has memory to send."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor is a dual number of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def real_tensors() -> AbstractContextManager[Any]:
    """A block in which tensors are real, whatever mode is on: for tables that a DeviceMesh keeps on the CPU."""
    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


def torch_shard(tensor: torch.Tensor, metadata: object) -> object:
    """A ``Shard`` of torch's ShardedTensor."""
    from torch.distributed._shard.sharded_tensor.shard import Shard

    return Shard(tensor, metadata)  # type: ignore[arg-type]  # torch's own metadata, by construction


def declare_ordered_effect(operator: str) -> None:
    """Keep the compiler from dropping or reordering calls of an operator of ours."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    try:
        _register_effectful_op(operator, _EffectType.ORDERED)
    except Exception:  # torch 2.11 takes the overload, not its name
        namespace, name = operator.split("::")
        overload = getattr(getattr(torch.ops, namespace), name).default
        _register_effectful_op(overload, _EffectType.ORDERED)


def is_sharded_tensor(value: object) -> bool:
    """Whether ``value`` is torch's ShardedTensor."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(value, ShardedTensor)


def sharded_tensor_parts(st: Any) -> tuple[Any, Any]:
    """Metadata and process group of a ShardedTensor."""
    return st.metadata(), st._process_group


def make_sharded_tensor(shards: list[Any], spec: Any, shape: Sequence[int], group: Any, like: Any) -> Any:
    """A ShardedTensor of local shards under torch's ``spec``, with the properties of ``like``; no communication."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    metadata = spec.build_metadata(torch.Size(shape), like.metadata().tensor_properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=group, sharding_spec=spec
    )
