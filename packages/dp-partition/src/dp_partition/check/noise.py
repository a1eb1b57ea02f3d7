"""Distance between right results of a step: more runs of the reference, each as right as the first.

One in double precision with the same random numbers; three from parameters and inputs that differ in the last bit. A
gradient that is zero but for rounding is a full step under Adam, and here it is one in another direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dp_partition._torch_compat import TorchDispatchMode, pytree
from dp_partition.check.copying import Transform
from dp_partition.ops import draws

_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER: dict[Any, Any] = {**_WIDE, torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_COARSEST = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Recording:
    """Draws of a run, and the coarsest dtype that it computed in."""

    draws: list[Any]
    dtypes: set[torch.dtype]

    @property
    def eps(self) -> float:
        """Rounding of the coarsest dtype."""
        return max((torch.finfo(dtype).eps for dtype in self.dtypes), default=torch.finfo(torch.float64).eps)


class Recorder(TorchDispatchMode):
    """Records the random numbers of a run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording([], set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in _COARSEST:
            self.recording.dtypes.add(result.dtype)
        if draws(func, args, kwargs or {}):
            self.recording.draws.append(pytree.tree_map_only(torch.Tensor, torch.clone, result))
        return result


class InDouble(TorchDispatchMode):
    """Computes everything in double precision, with the random numbers of another run.

    Args:
        recording: That run's.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = iter(recording.draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda dtype: _WIDER.get(dtype, dtype), (args, kwargs or {}))
        if draws(func, args, kwargs):
            return self._replay(func, args, kwargs)
        return pytree.tree_map_only(torch.Tensor, to_double, func(*args, **kwargs))

    def _replay(self, func: Any, args: Any, kwargs: Any) -> Any:
        drawn = next(self.drawn)
        if func is torch.ops.aten.native_dropout.default:
            mask = drawn[1]
            return args[0] * mask / (1 - args[1]) if args[1] < 1 else args[0] * 0, mask
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        if isinstance(drawn, torch.Tensor):
            return to_double(drawn)
        raise NotImplementedError(f"{func} draws and computes at once")


def to_double(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision if it is of floating point."""
    wide = _WIDER.get(tensor.dtype)
    return tensor if wide is None else tensor.to(wide)


def perturbation(recording: Recording, seed: int) -> Transform:
    """A change of each tensor by the rounding of the coarsest dtype, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, torch.float64) * 2 - 1
        by = max(recording.eps, torch.finfo(tensor.dtype).eps)
        return (tensor.double() * (1 + by * signs)).to(tensor.dtype)

    return change


__all__ = ["InDouble", "Recorder", "Recording", "perturbation", "to_double"]
