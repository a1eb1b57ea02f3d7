"""Casts of ``torch.autocast``, which has no rules for the meta device: they are made before each function is called."""

from __future__ import annotations

from typing import Any

import torch

from shard_spec._torch_compat import memory_of
from shard_spec.estimate.fully_shard import mapped

# torch/csrc/autocast_mode.h of 2.13: products in the lower dtype on every device; the rest differs.
_LOWER = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "mv"}
_LOWER |= {f"conv{kind}{dim}d" for kind in ("", "_transpose") for dim in (1, 2, 3)}
_LOWER |= {"scaled_dot_product_attention", "prelu", "chain_matmul", "multi_dot"}
_FULL_CUDA = {
    "softmax",
    "log_softmax",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "norm",
    "cross_entropy",
    "nll_loss",
    "sum",
}
_FULL_CUDA |= {"cumsum", "cumprod", "prod", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "rsqrt"}
_FULL_CUDA |= {
    "softplus",
    "reciprocal",
    "cosine_similarity",
    "logsumexp",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "cdist",
}
_FULL_CPU = {"mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy", "prod", "cumprod", "kl_div", "huber_loss"}


class Autocast:
    """Autocast of one step: the option's, or that which the forward enters itself.

    Args:
        dtype: Lower dtype of the option; None: only where the forward enters ``torch.autocast``.
        device: Device type whose rules hold: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, dtype: torch.dtype | None, device: str) -> None:
        self._dtype, self.device = dtype, device
        self._weights: dict[int, torch.Tensor] = {}  # memory of a weight -> its cast, kept until autocast ends

    def end(self) -> None:
        """Forget the casts of weights: autograd alone keeps them from here on."""
        self._weights.clear()

    def arguments(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the function called ``name`` as autocast casts them."""
        dtype = self._dtype
        entered = [each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)]
        if entered:
            dtype = torch.get_autocast_dtype(entered[0])
        elif dtype is None:
            self._weights.clear()
            return args, kwargs
        full = _FULL_CPU if (entered or [self.device])[0] == "cpu" else _FULL_CUDA
        wanted = dtype if name in _LOWER else torch.float32 if name in full else None
        if wanted is None:
            return args, kwargs

        def cast(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return mapped(value, cast)
            if not value.is_floating_point() or value.dtype in (wanted, torch.float64):
                return value
            if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
                return value.to(wanted)
            key = memory_of(value)
            if key not in self._weights:
                self._weights[key] = value.to(wanted)
            return self._weights[key]

        return cast(args), cast(kwargs)
