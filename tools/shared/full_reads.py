"""Functions that read a weight as if it were full: on one rank's shard they are refused, all in one list.

Of a shard `weight.norm()`, `weight.std()`, `torch.linalg.svdvals(weight)` and the bound of `nn.init.xavier_uniform_`
are other numbers on each rank, without an error. A reduction that leaves the sharded dim alone (the norm of each row,
where rows are sharded) is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Names = dict[Callable[..., Any], str]


def named(names: str, *places: Any) -> Names:
    """Return the functions of these names in any of the places, with their names."""
    return {getattr(place, name): name for name in names.split() for place in places if hasattr(place, name)}


REDUCTIONS = (
    named("sum nansum mean nanmean std var std_mean var_mean prod norm", torch, torch.Tensor)
    | named("max min amax amin aminmax argmax argmin median nanmedian mode", torch, torch.Tensor)
    | named("quantile nanquantile kthvalue topk sort argsort msort unique", torch, torch.Tensor)
    | named("logsumexp softmax log_softmax softmin normalize", torch, torch.Tensor, F)
    | named("cumsum cumprod cummax cummin logcumsumexp count_nonzero all any", torch, torch.Tensor)
    | named("unique_consecutive flip roll", torch, torch.Tensor)
    | named("vector_norm", torch.linalg)
)
"""Function -> name; right if they name dims, and not the sharded one."""

FULL_READS = (
    named(" ".join(name for name, value in vars(torch.linalg).items() if inspect.isbuiltin(value)), torch.linalg)
    | REDUCTIONS
    | named("svd qr det logdet slogdet inverse pinverse matrix_power renorm", torch, torch.Tensor)
    | named("matrix_exp trace histc cosine_similarity cov corrcoef cdist pdist", torch, torch.Tensor, F)
    | named("rot90 dot vdot inner", torch, torch.Tensor)
    | named(" ".join(name for name, value in vars(torch.fft).items() if inspect.isbuiltin(value)), torch.fft)
    | named("uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_", torch.Tensor)
    # Functions of `nn.init` with overrides of their own; others end in one of these.
    | named("uniform_ normal_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_", nn.init)
    | {torch.eye: "eye", torch.Tensor.__setitem__: "a write by index"}
    # These three write by functions and by index, past the other names; they are its only callers in torch.
    | {torch.Tensor.ndimension: "nn.init's orthogonal_, eye_ or dirac_"}
    | named("_foreach_norm _foreach_max", torch)  # of lists; `nn.utils.get_total_norm` ends there
)
"""Function -> name of all that see a full weight."""

THIRD = ("norm", "vector_norm", "normalize", "quantile", "nanquantile", "kthvalue", "topk", "roll")
"""Reductions with `dim` as their third argument; the others have it as their second."""


def full_read(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dim: int, ndim: int) -> str:
    """Return the name of a function that would take a shard for the full weight, `""` for any other.

    Args:
        func: The function, as `__torch_function__` gets it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        dim: The sharded dim, from 0.
        ndim: Dims of the weight.
    """
    name = FULL_READS.get(func, "")
    if not name or func not in REDUCTIONS:
        return name
    if name in ("max", "min") and any(isinstance(x, torch.Tensor) for x in (*args[1:2], kwargs.get("other"))):
        return ""  # of two tensors, element by element
    place = 2 if name in THIRD else 1
    default = 1 if name == "normalize" else None
    given = args[place] if place < len(args) else default
    given = args[1:] if name == "flip" and len(args) > 2 else given  # flip(0, 1)
    dims = next((kwargs[key] for key in ("dim", "axis", "dims") if key in kwargs), given)
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if isinstance(dims, list | tuple) and dims and all(isinstance(d, int) and d % ndim != dim for d in dims):
        return ""
    return name
