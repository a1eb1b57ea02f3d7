"""Private names of torch in use here.

Read against torch 2.13.0; they have the same names and places in 2.11.0.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle as TorchParallelStyle
else:
    from torch.distributed.tensor.parallel import ParallelStyle as TorchParallelStyle

# Names of torch that are handed on.
__all__ = ["TorchDispatchMode", "TorchParallelStyle", "dispatch_modes", "functional_collectives", "tree_map"]
__all__ += ["without_dispatch_modes"]


def all_gather_into(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate all ranks' inputs along dim 0 (renamed in 2.13)."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, input, group=group)


def reduce_scatter_into(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's rows of the sum of all inputs (renamed in 2.13)."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, input, group=group)


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost `with mesh:` block, None outside of one."""
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError:
        return None


# True under torch.compile or export. Torch's own function: a forward calls it a dozen times, and each frame costs.
is_compiling: Callable[[], bool] = torch.compiler.is_compiling


@functools.cache
def _place_of_group(operator: Any) -> int | None:
    """Return the place of the group among a collective's arguments; None for an operator that is no collective.

    Sends and receives are none: two ranks make them without the others.
    """
    namespace, _, name = operator._schema.name.partition("::")
    if namespace not in ("c10d", "_c10d_functional") or name.startswith(("send", "recv")):
        return None
    names = [argument.name for argument in operator._schema.arguments]
    return next((place for place, name in enumerate(names) if name in ("process_group", "group_name")), None)


def group_of(operator: Any, args: tuple[Any, ...]) -> Any:
    """Return the process group of a collective's operator, None for any other operator."""
    place = _place_of_group(operator)
    if place is None or place >= len(args):
        return None
    group: Any = args[place]
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]  # a class of str in annotations alone
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def is_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor has no values: fake, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def is_transformed() -> bool:
    """True if transforms of `torch.func`, or forward-mode differentiation, are active."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def in_backward() -> bool:
    """True while autograd runs: an activation checkpoint repeats forwards there."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def variable_length_operators() -> list[Any]:
    """Return the operators of `torch.nn.attention.varlen`, as a function mode sees them."""
    import torch.nn.attention.varlen  # registers them

    packet = torch.ops.torch_attn._varlen_attn
    return [packet, packet.default]


def active_ddp() -> Any:
    """Return the `DistributedDataParallel` whose forward runs, None outside of one."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


# The local tensor itself, without autograd; no frame of Python, since each forward reads every weight.
local_of: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")


class GradientDTensor(DTensor):
    """A gradient on its way into a parameter's `.grad`, where it becomes an ordinary DTensor.

    Autograd takes a gradient over by `detach`; for a DTensor this goes through its full dispatch, here it does not.
    Every other operation is the DTensor's, and gives DTensors.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as DTensor's
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run as a DTensor's, except for `detach`."""
        if func is _DETACH:
            gradient = args[0]
            # Of autograd's own call nobody keeps the gradient: it becomes the DTensor itself, without a second wrapper.
            # A user's `detach` of a result of `torch.autograd.grad` gives another object, as detach does.
            if _graph_task() == -1:
                return _arrived(gradient)
            gradient.__class__ = DTensor
            return gradient
        args, kwargs = tree_map(_arrived, (args, kwargs or {}))  # plain DTensors from here on
        return func(*args, **kwargs)


_DETACH = torch.ops.aten.detach.default
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def _arrived(x: Any) -> Any:
    if type(x) is GradientDTensor:
        return DTensor.__new__(DTensor, x._local_tensor, x._spec, requires_grad=False)  # the same memory
    return x


# A local gradient as a DTensor with a parameter's `_spec`: much faster than `from_local`, and no frame of Python.
# `DTensor.__init__` is empty, but switches the compiler off and on around it: the slowest step.
gradient_like: Callable[[torch.Tensor, Any], DTensor] = partial(DTensor.__new__, GradientDTensor, requires_grad=False)


def without_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile runs as it is: the graph breaks around it. torch.compiler is loaded late."""
    wrapped: Callable[..., Any] = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # private
    return wrapped


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which would import all of torch._dynamo to set this mark."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def replicate(module: Any, mesh: Any, ignored: set[Any]) -> None:
    """Average gradients over a 1-D mesh, in place, except ignored ones. Parameters may be DTensors on another axis."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate

    torch_replicate(module, mesh=mesh, ignored_params=ignored or None)
