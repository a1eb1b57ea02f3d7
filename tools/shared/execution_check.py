"""The core of a check by execution: equal random numbers, precision of a run, error measure, counts.

dp-partition compares a graph with the step's own Python, tp-styles a sharded region with the original one. Both start
two runs from the same generators (`RandomState`), record a run's precision (`Precision`), measure
(`relative_error`) and count comparisons (`Compared`).
"""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ._torch_compat import TorchDispatchMode


class RandomState:
    """States of all generators of a run: torch's, Python's, NumPy's and given ones.

    Args:
        generators: Generators beside the default ones.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self.passed = [(generator, generator.get_state()) for generator in generators]
        self.cpu, self.python = torch.get_rng_state(), random.getstate()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        numpy: Any = sys.modules.get("numpy")  # a program without it draws nothing from it
        self.numpy = None if numpy is None else numpy.random.get_state()

    def equals(self, other: RandomState) -> bool:
        """Return True for equal CPU generators. Those of a GPU advance by kernels, which may differ."""
        # Passed generators are left out: a copied run draws from copies of them.
        same = torch.equal(self.cpu, other.cpu) and self.python == other.python
        return same and pickle.dumps(self.numpy) == pickle.dumps(other.numpy)

    def restore(self) -> None:
        """Put every generator back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in self.passed:
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextmanager
def random_state_restored(generators: Iterable[torch.Generator] = ()) -> Iterator[RandomState]:
    """Leave all generators as they were before the block."""
    state = RandomState(generators)
    try:
        yield state
    finally:
        state.restore()


_RATES = ("p", "dropout_p", "dropout")  # an operator with one of these draws nothing at rate 0


def is_random(op: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name in _RATES:
            rate = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return rate is None or bool(rate)
    return True


_NO_ROUNDING = ("clone", "detach", "alias", "lift_fresh", "empty", "zeros", "ones", "full")


class Precision(TorchDispatchMode):
    """Records the coarsest floating dtype in the compute of a block.

    Views, copies in one dtype and widening casts round nothing, so bfloat16 weights cast to float64 before a run
    leave its bounds those of float64.

    Attributes:
        epsilon: Machine epsilon of that dtype; 0 before anything was computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.epsilon = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, result)
        return result

    def note(self, func: Any, args: Any, result: Any) -> None:
        """Note the rounding of an operation that has run."""
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name.startswith(_NO_ROUNDING)):
            source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
            for x in result if isinstance(result, tuple | list) else (result,):
                if not (isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())):
                    continue
                eps = torch.finfo(x.dtype).eps  # coarser than its source: rounded
                if source is None or not source.is_floating_point() or torch.finfo(source.dtype).eps < eps:
                    self.epsilon = max(self.epsilon, eps)


def relative_error(
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    before: torch.Tensor | None = None,
    noise: float = 0.0,
    floor: float = 0.0,
    norm: float = 2,
    any_dtype: bool = False,
) -> float:
    """Return the norm of the difference, relative to ``want`` or its change from ``before``.

    Args:
        got: Any shape and dtype; DTensors are gathered by the caller.
        want: The reference.
        before: Common start of both runs. The error is relative to the change from it, but not below the rounding of
            the value: a small change of a large value cannot be more exact.
        noise: Absolute error from rounding elsewhere; subtracted.
        floor: Smallest scale, for values of zero up to rounding.
        norm: Order of the norm: 2, or ``math.inf`` for the largest element.
        any_dtype: Compare values of different dtypes.

    Returns:
        0 for equal or empty tensors; infinity for another shape or dtype, or different non-finite elements.
    """
    if got.shape != want.shape or (got.dtype != want.dtype and not any_dtype):
        return math.inf
    if not want.numel():
        return 0.0
    one, other = as_double(got), as_double(want).to(got.device)
    odd = ~(one.isfinite() & other.isfinite())  # these must be equal, not close
    if odd.any():
        if not ((one == other) | (one.isnan() & other.isnan()))[odd].all():
            return math.inf
        one, other = one.masked_fill(odd, 0.0), other.masked_fill(odd, 0.0)
    error = float(torch.linalg.vector_norm(one - other, norm))
    scale = float(torch.linalg.vector_norm(other, norm))
    if before is not None and before.shape == want.shape:
        rounding = torch.finfo(want.dtype).eps if want.is_floating_point() or want.is_complex() else 0.0
        noise += rounding * scale
        change = (other - as_double(before).to(other.device)).nan_to_num(0.0, 0.0, 0.0)
        scale = float(torch.linalg.vector_norm(change, norm))
    error, scale = max(0.0, error - noise), max(scale, floor)
    return error / scale if error and scale else math.inf if error else 0.0


def as_double(value: torch.Tensor) -> torch.Tensor:
    """Return a detached real float64 tensor; complex numbers become pairs."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.to(torch.float64)


@dataclass
class Compared:
    """Counts of a check's comparisons. Without any, a check is *unchecked*, not *equal*."""

    tensors: int = 0
    elements: int = 0
    gradients: int = 0

    def add(self, value: torch.Tensor, *, gradient: bool = False) -> None:
        """Count one compared tensor; gradients count apart."""
        self.tensors += not gradient
        self.gradients += gradient
        self.elements += value.numel()

    def __bool__(self) -> bool:
        return self.elements > 0

    def __str__(self) -> str:
        return f"{self.tensors} tensors and {self.gradients} gradients, {self.elements:,} elements"
