"""Every private torch name this package uses, and the torch versions they were read against: 2.13.0 (and 2.11.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
import torch.distributed.distributed_c10d as c10d
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "ShapeEnv",
    "TorchDispatchMode",
    "c10d",
    "collectives",
    "current_trace_nodes",
    "decomposition_of",
    "make_fx",
    "new_fake_mode",
    "pytree",
    "storage_key",
    "symbolic_scalar",
    "tensor_metadata",
    "without_onednn",
]

collectives: Any = torch.ops._c10d_functional


def symbolic_scalar(mode: FakeTensorMode, value: float, label: str) -> torch.Tensor:
    """A fake 0-dim float64 CPU tensor whose ``item()`` is a symbol with ``value`` as its hint.

    Args:
        mode: The fake mode, with a shape environment.
        value: The value that conditions on the symbol are decided with; each such decision becomes a guard.
        label: Name of the symbol's source; unique in the mode.
    """
    from torch._dynamo.source import ConstantSource  # imports dynamo, which making an optimizer does as well

    real = torch.tensor(value, dtype=torch.float64)
    return mode.from_tensor(real, source=ConstantSource(label))


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Within the block operators do not choose oneDNN's kernels. ``torch.backends.mkldnn.flags`` warns about TF32."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def new_fake_mode() -> FakeTensorMode:
    """A fake mode whose only symbols are the scalars that the caller makes."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def current_trace_nodes() -> list[str]:
    """Names of the nodes that make_fx has recorded so far."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    return [node.name for node in tracer.graph.nodes] if tracer is not None else []


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors have in common if they share memory, fake ones too; valid while one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def tensor_metadata(tensor: torch.Tensor) -> Any:
    """Shape, dtype and strides as fx records them in ``meta["tensor_meta"]``."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(tensor)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """Torch's own decomposition of an operator, if it has one."""
    from torch._decomp import get_decompositions

    found = get_decompositions([op])
    return found.get(op)
