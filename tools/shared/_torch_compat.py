"""Private torch names used by the shared sources; read against torch 2.13.0 (and 2.11.0)."""

from __future__ import annotations

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_map as tree_map

without_overrides = torch._C.DisableTorchFunctionSubclass
"""Context in which ``__torch_function__`` of tensor classes is not called; entering it takes 0.2 us."""
UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_  # the search for infinities of torch.amp.GradScaler


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's shard itself: ``to_local()`` makes a view and an autograd node."""
    return tensor._local_tensor


def foreach_norms(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return each tensor's norm, computed in ``dtype``, in one horizontal pass."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def foreach_scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor by ``factor`` in place, in one horizontal pass."""
    torch._foreach_mul_(tensors, factor)
