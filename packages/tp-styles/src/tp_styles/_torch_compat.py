"""Every name that torch keeps under an underscore and that we use.

Read against torch 2.13.0; the same names stand at the same places in 2.11.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle as TorchParallelStyle
else:
    from torch.distributed.tensor.parallel import ParallelStyle as TorchParallelStyle

__all__ = [
    "TorchParallelStyle",
    "all_gather_into",
    "current_mesh",
    "functional_collectives",
    "is_compiling",
    "local_of",
    "reduce_scatter_into",
    "scale_all_",
    "tree_flatten",
    "tree_map",
    "wrapped_like",
]


def all_gather_into(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All ranks' inputs one after the other along dim 0 (renamed in 2.13)."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, input, group=group)


def reduce_scatter_into(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part along dim 0 of the sum of all inputs (renamed in 2.13)."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, input, group=group)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` block, None outside of one."""
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError:
        return None


def is_compiling() -> bool:
    """Whether this code runs under torch.compile or export."""
    return torch.compiler.is_compiling()


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself, without autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local


def wrapped_like(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor around a local tensor with the `_spec` of another one: a fraction of what `from_local` takes.

    `DTensor.__init__` does nothing, but switches the compiler off and on around it, which takes longer than the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def scale_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors in place, by few kernels."""
    torch._foreach_mul_(tensors, factor)
