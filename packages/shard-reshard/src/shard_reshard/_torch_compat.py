"""Access to torch's private names. Written for torch 2.13.0 and 2.11.0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.guards import TensorGuards
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DispatchMode = TorchDispatchMode
# True for a tensor that wraps others, without memory of its own.
is_wrapper: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
# A context with real tensors in any mode: a DeviceMesh keeps tables on the CPU.
real_tensors: Callable[[], AbstractContextManager[Any]] = unset_fake_temporarily

# A context in which tensor subclasses do not intercept torch functions.
as_plain_tensors: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
# Makes access to the address of a tensor's storage raise.
refuse_addresses: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """`torch.compiler.disable`, which would import all of torch._dynamo to set these marks: run between graphs."""
    frames = torch._C._dynamo.eval_frame
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skipped)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # functions take attributes
    return function


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy every source to its target. On CUDA in as few kernels as torch supports; dtypes are converted."""
    if targets and targets[0].is_cuda and not is_fake(targets):
        targets, sources = map(list, zip(*map(_in_words, targets, sources), strict=True))
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


def _in_words(*pair: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View rows of two tensors as words of 16 bytes where they lie so: torch's strided kernel copies words faster."""
    ratio = _WORD.itemsize // pair[0].itemsize
    starts = [n for x in pair for n in (x.size(-1), x.storage_offset(), *x.stride()[:-1])] if pair[0].ndim > 1 else [1]
    is_plain = pair[0].dtype == pair[1].dtype and pair[0].stride()[-1:] == pair[1].stride()[-1:] == (1,)
    if ratio < 2 or not is_plain or any(n % ratio for n in starts) or any(x.data_ptr() % _WORD.itemsize for x in pair):
        return pair
    return tuple(x.view(_WORD) for x in pair)


def is_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if tensors are fake; without tensors, if a fake mode is on."""
    if tensors:
        return any(isinstance(tensor, FakeTensor) for tensor in tensors)
    return detect_fake_mode() is not None


# Guards of compiled code on types, shapes, strides, dtypes, devices and flags: C++ at a tenth of the cost of Python
# checks. They fail for duplicate tensors, and abort the process at a nested tensor.
CompiledGuards: Callable[..., Any] = TensorGuards

_requires_grad = attrgetter("requires_grad")
_WORD = torch.complex128
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def modes() -> tuple[object, ...]:
    """Return modes that change a call beside its tensors: grad, inference, transformations, tangents."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        forward_ad._current_level,
        torch._C._functorch.peek_interpreter_stack() is None,
    )


def mesh_groups(mesh: Any) -> tuple[str, ...]:
    """Return the names of a mesh's process groups. Equal meshes may have groups of different orders."""
    return tuple(getattr(mesh, "_dim_group_names", ()))


Declared = tuple[list[Any], list[Any]]


def declared_layouts(values: Sequence[Any], known: Declared | None = None) -> Declared:
    """Return the declared layouts of tensors (a DTensor's spec, ``_sharding_info``, or None), and their groups.

    They are ``known`` itself if the same objects declare them again.
    """
    # Every call with a state dict does this: few Python steps a tensor, and none for plain ones.
    public = sys.modules.get("torch.distributed.tensor")
    dtensor = None if public is None else public.DTensor
    declared = [value._spec if type(value) is dtensor else getattr(value, "_sharding_info", None) for value in values]
    if known is not None and len(declared) == len(known[0]) and all(map(is_, declared, known[0])):
        return known
    meshes = [getattr(entry, "mesh", None) for entry in declared if entry is not None]
    groups = {key: mesh_groups(mesh) for key, mesh in dict(zip(map(id, meshes), meshes, strict=True)).items()}
    return declared, list(map(groups.get, map(id, meshes)))


def plain_locals(values: Sequence[Any], detach: bool = False) -> list[torch.Tensor] | None:
    """Return the local tensors of DTensors and plain tensors; with ``detach`` without their graphs.

    None if another kind is among them.
    """
    public = sys.modules.get("torch.distributed.tensor")
    dtensor = None if public is None else public.DTensor
    kinds = set(map(type, values))
    if kinds == {dtensor}:
        values = [value._local_tensor for value in values]
    elif dtensor in kinds:
        values = [value._local_tensor if type(value) is dtensor else value for value in values]
    if not PLAIN_TYPES.issuperset(map(type, values) if dtensor in kinds else kinds):
        return None
    if detach and True in map(_requires_grad, values):
        return [value.detach() if value.requires_grad else value for value in values]
    return list(values)


def dtensor_local(value: Any) -> torch.Tensor | None:
    """Return the local tensor of a DTensor, at a tenth of ``to_local``'s cost. None for anything else."""
    public = sys.modules.get("torch.distributed.tensor")
    if public is None or type(value) is not public.DTensor:
        return None
    local: torch.Tensor = value._local_tensor
    return local


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for an AsyncCollectiveTensor, which has no memory of its own; other tensors pass unchanged."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    # Views of one do not wait; a copy does, and preserves the graph.
    if tensor.requires_grad:
        return tensor.clone()
    done: torch.Tensor = tensor.trigger_wait()
    return done


def tensor_leaves(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to, by its schema."""
    specs = func._schema.arguments
    bound = [(spec, args[at] if at < len(args) else kwargs.get(spec.name)) for at, spec in enumerate(specs)]
    return tensor_leaves([value for spec, value in bound if spec.alias_info is not None and spec.alias_info.is_write])


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, also on meta. Valid while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


def is_transforming() -> bool:
    """Return True under a transformation of torch.func; its tensors have no memory to send."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if a tensor is a dual number of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def register_group(group: dist.ProcessGroup, name: str, backends: str) -> None:
    """Register a group of processes of several jobs, outside the default group, with ``torch.distributed``."""
    _world.pg_map[group] = backends.partition(":")[2], None  # type: ignore[assignment]  # the group owns its store
    _world.pg_names[group] = name  # type: ignore[assignment]  # text, as torch has it
    _world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    _world.pg_backend_config[group] = backends


def unregister_group(group: dist.ProcessGroup) -> None:
    """Take back `register_group`."""
    for table in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
        table.pop(group, None)


def sharded_tensor_types() -> tuple[Any, Any]:
    """Return torch's ``ShardedTensor`` and ``Shard``."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    return ShardedTensor, Shard


def local_of_sharded(value: Any) -> tuple[list[torch.Tensor], Any] | None:
    """Return the local tensors of torch's ShardedTensor, and its metadata. None for anything else."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    if module is None or not isinstance(value, module.ShardedTensor):
        return None
    return [shard.tensor for shard in value.local_shards()], value.metadata()


def flattened(nested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the leaves of nested mappings and lists under DCP's names, as ``state.0.exp_avg``, and their keys."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    leaves, paths = flatten_state_dict(dict(nested))
    return leaves, {name: tuple(path) for name, path in paths.items()}


def unflattened(leaves: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return nested mappings and lists with these leaves, the inverse of `flattened`."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    return unflatten_state_dict(dict(leaves), dict(paths))


def dtensor_maker(like: DTensor) -> Callable[[torch.Tensor], DTensor]:
    """Return a constructor of DTensors like ``like``, at a twentieth of the cost of ``from_local``.

    The constructor spends half of its time in ``__init__``, which only ``torch.export`` needs.
    """
    kind, spec = type(like), like._spec
    new: Callable[..., DTensor] = kind.__new__
    return lambda local: new(kind, local, spec, requires_grad=False)
