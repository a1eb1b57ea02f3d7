"""Compare the graph's outcome with the step's: tensor by tensor, relative to the step's changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from dp_partition._shared.execution_check import as_double, relative_error
from dp_partition.check.copying import Transform
from dp_partition.check.reference import Outcome

# A larger error is compared with the spread of right results (`noise`).
SUSPICIOUS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Accepted change of an integer tensor by rounding: a prediction at a near tie.
INTEGERS = 0.01
_ROUNDING = {torch.float64: 2.2e-16}  # float32's otherwise: gradients are computed in it, or cancel alike


@dataclass(frozen=True)
class Difference:
    """One value with a difference.

    Attributes:
        name: Parameter, buffer, state entry or result.
        error: Relative to the step's change; infinite for another shape, dtype or value.
        found: The first different elements, or the values.
        noise: Spread of right results; 0 if not measured.
    """

    name: str
    error: float
    found: str
    noise: float = 0.0

    def __str__(self) -> str:
        size = "" if math.isinf(self.error) else f"by {self.error:.1e} of what the step changes: "
        return f"{size}{self.found}"


def differences(graph: Outcome, reference: Outcome) -> list[Difference]:
    """Return values with differences beyond usual rounding; results first."""
    mismatches: list[Difference] = []
    if len(graph.leaves) != len(reference.leaves):
        counts = f"{len(graph.leaves)} values, expected {len(reference.leaves)}"
        mismatches.append(Difference("result", math.inf, counts))
    for index, (got, want) in enumerate(zip(graph.leaves, reference.leaves, strict=False)):
        name = "result" if len(graph.leaves) == 1 else f"result {index}"
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            error = relative_error(got, want)
            if error > tolerance(want):
                mismatches.append(Difference(name, error, first_difference(got, want)))
        elif not _equal(got, want):
            mismatches.append(Difference(name, _number_error(got, want), f"{got!r:.80}, expected {want!r:.80}"))
    # Most tensors are equal to the last bit, which one kernel tells.
    unequal = {name: want for name, want in reference.tensors.items() if not _is_same(graph.tensors.get(name), want)}
    largest: dict[
        str, float
    ] = {}  # root mean square of the step's changes, by the key of a state entry; "" for parameters
    for name, value in reference.tensors.items() if unequal else ():
        start = reference.before.get(name)
        if value.numel() and value.is_floating_point() and start is not None and start.shape == value.shape:
            change, kind = (value.double() - start.double()).nan_to_num(0.0, 0.0, 0.0), name.partition(" ")[2]
            largest[kind] = max(largest.get(kind, 0.0), float(change.square().mean().sqrt()))
    for name, want in unequal.items():
        if name not in graph.tensors:
            mismatches.append(Difference(name, math.inf, "the graph makes no such state"))
            continue
        got, before = graph.tensors[name], reference.before.get(name)
        # Rounding of other values that cancel to (nearly) nothing here, for example in the gradient of a centred bias.
        typical = largest.get(name.partition(" ")[2], 0.0)
        floor = _ROUNDING.get(want.dtype, 1.2e-7) * typical * math.sqrt(want.numel())
        error = relative_error(got, want, before=before, noise=floor)
        if error > tolerance(want):
            mismatches.append(Difference(name, error, first_difference(got, want)))
    for name, number in reference.numbers.items():
        if name in graph.numbers and not _equal(graph.numbers[name], number):
            mismatches.append(Difference(name, math.inf, f"{graph.numbers[name]!r}, expected {number!r}"))
    return mismatches


def _is_same(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    is_like = got is not None and (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape)
    return is_like and torch.equal(got, want)  # type: ignore[arg-type]


def measure(name: str, one: Outcome, reference: Outcome) -> float:
    """Return the error of one value between two runs from nearly equal tensors."""
    got, want = one.value(name), reference.value(name)
    if got is None or want is None:
        return 0.0
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return _number_error(got, want)
    start, before = one.before.get(name), reference.before.get(name)
    if start is not None and before is not None and got.shape == want.shape and got.is_floating_point():
        got = got.double() - start.double() + before.double()  # without the difference before the run
    return relative_error(got, want, before=before, any_dtype=True)


def tolerance(value: torch.Tensor) -> float:
    """Return the largest relative error without a second look."""
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(value.dtype, value.dtype)
    return SUSPICIOUS.get(real, 0.0 if not value.is_floating_point() else 1e-2)


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Return the element with the largest difference, as text."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}"
    one, other = as_double(got), as_double(want).to(got.device)
    index = int((one - other).abs().nan_to_num(nan=math.inf).reshape(-1).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(index), one.shape)]
    values = one.reshape(-1)[index].item(), other.reshape(-1)[index].item()
    return f"{values[0]:.6g} at {place}, expected {values[1]:.6g}"


def _number_error(got: Any, want: Any) -> float:
    numbers = isinstance(got, int | float) and isinstance(want, int | float)
    if not numbers or isinstance(got, bool) or not math.isfinite(got) or not math.isfinite(want) or not want:
        return math.inf
    return float(abs(got - want) / abs(want))


def _equal(got: Any, want: Any) -> bool:
    if got is want or type(got) is not type(want):
        return got is want or (isinstance(got, int | float) and isinstance(want, int | float) and got == want)
    if isinstance(got, float):
        return got == want or (math.isnan(got) and math.isnan(want)) or _number_error(got, want) <= 2e-5
    if isinstance(got, tuple | list):
        return len(got) == len(want) and all(map(_equal, got, want))
    if isinstance(got, bool | int | str | complex | torch.dtype | torch.device):
        return bool(got == want)
    return True  # other objects are not compared


def perturbation(eps: float, seed: int) -> Transform:
    """Return a change of tensors by one rounding of the coarsest dtype, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, torch.float64) * 2 - 1
        by = max(eps, torch.finfo(tensor.dtype).eps)
        return (tensor.double() * (1 + by * signs)).to(tensor.dtype)

    return change
