"""Every private torch name this plugin uses.

Read against torch 2.13.0 (CPU build); the names used here exist in 2.11 with the same meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import ProcessGroup as ProcessGroup
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import Work as Work
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

#: Every collective, point-to-point call and barrier passes through an operator of this namespace: `ProcessGroup`'s
#: methods call it, and its kernels call the backend (gloo, NCCL). Python, DDP's C++ reducer and functional
#: collectives all come by here.
NAMESPACE = "c10d"


@functools.cache
def collective_schemas() -> dict[str, list[str]]:
    """Operator name -> names of its arguments, for every c10d operator with a group."""
    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        arguments = [argument.name for argument in schema.arguments]
        if namespace == NAMESPACE and "process_group" in arguments:
            schemas[name] = arguments
    return schemas


@functools.cache
def schema_defaults(name: str) -> dict[str, Any]:
    """Default values of a c10d operator's arguments."""
    schema = torch._C._get_schema(f"{NAMESPACE}::{name}", "")
    return {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}


def put_before_backends(name: str, kernel: Callable[..., Any]) -> Any:
    """Register `kernel(keyset, *args)` of a c10d operator, before any backend's kernel.

    BackendSelect is the one dispatch key that every thread includes by default and that stands directly before the
    device's key. Returns the registration, which lasts as long as the object.
    """
    library: Any = torch.library.Library
    registration = library(NAMESPACE, "IMPL")
    registration.impl(name, kernel, "BackendSelect", with_keyset=True)
    return registration


def go_on(name: str, keyset: Any, *args: Any) -> Any:
    """Call the device's own kernel.

    `redispatch` releases the GIL; calling the kernel object of `torch.library.get_kernel` would not, and deadlocks
    with gloo's worker threads, which take the GIL to free a tensor while they hold the queue's lock.
    """
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args)


def keyset_of(device: torch.device) -> Any:
    """The dispatch keys of a plain tensor on a device."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device.type)))


def use_cuda(device: torch.device) -> None:
    """Make a CUDA device current, and CUDA initialised, so that nothing later picks another one."""
    cuda: Any = torch.cuda
    cuda.set_device(device)
    cuda.init()


def unbox_group(boxed: Any) -> Any:
    """The Python ProcessGroup inside the script object that a c10d kernel receives."""
    return boxed if isinstance(boxed, ProcessGroup) else ProcessGroup.unbox(boxed)


def unbox_work(boxed: Any) -> Any:
    """The Python Work inside the script object that a c10d kernel returns."""
    return boxed if isinstance(boxed, Work) else Work.unbox(boxed)


def box_work(work: Any) -> Any:
    """The script object that a c10d kernel returns for a Work. Keep the Work: C++ holds only its C++ half."""
    return work.boxed()


def is_gloo(group: Any, device: torch.device) -> bool:
    """Tell whether gloo serves a group's tensors on a device; NCCL serves those on CUDA."""
    return str(group._get_backend(device).name()) == "gloo"


def group_label(group: Any) -> str:
    """A group's description if it was given one ("default_pg", "mesh_tp"), else its name."""
    description = str(group.group_desc)
    return str(group.group_name) if description in ("", "undefined") else description


def fake_tensor_mode() -> Any:
    """A FakeTensorMode that takes no real tensors in."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def real_tensors() -> Any:
    """A context in which tensors are real ones again, under no dispatch mode at all."""
    return _disable_current_modes()


def _renamed(module: Any, new: str, old: str) -> Any:
    """A function by its name in 2.13, or by its older one."""
    return getattr(module, new) if hasattr(module, new) else getattr(module, old)


functional = torch.distributed._functional_collectives
all_gather_single = _renamed(torch.distributed, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _renamed(torch.distributed, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather_single = _renamed(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter_single = _renamed(functional, "reduce_scatter_single", "reduce_scatter_tensor")
