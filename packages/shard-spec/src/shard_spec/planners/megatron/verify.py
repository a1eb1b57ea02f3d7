"""Executes a model to check that its units may be cut as planned.

For each rank, the rows' weights of all units are set to zero outside of the rank's slice: what remains are the rank's
summands. Then the columns outside of its slices are replaced by other numbers. If the model's output moves, some
summand needs channels that the rank does not have, and training with the plan would be wrong; which unit's, is found
by replacing the columns of one unit at a time. Everything is done in one process, on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shard_spec._shared.problems import Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.planners.megatron.blocks import Cut, TPBlock


def verify_units(
    module: nn.Module, units: tuple[TPBlock, ...], tp_size: int, call: Callable[[nn.Module], Tensor]
) -> tuple[Problem, ...]:
    """Every unit whose summands mix slices, or that the call does not exercise; empty if all is well.

    Use a small model with random weights, in float64 if you can: it is run once per unit and rank, and a few times
    more.

    Args:
        module: the model, materialised; it is not changed.
        units: what `MegatronPlanner.analyse(module)` found; vocabulary units have nothing between and are skipped.
        tp_size: number of tensor-parallel ranks.
        call: runs a model and returns one output tensor; deterministic (dropout off).
    """
    regions = tuple(unit for unit in units if unit.rows and unit.columns)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        found = [_Rank(twin, regions, rank, tp_size, call).problems() for rank in range(tp_size)]
    return tuple(problem for problems in found for problem in problems)


class _Rank:
    """One rank's summands. The model's rows are cut for as long as `problems` runs."""

    def __init__(
        self, twin: nn.Module, units: tuple[TPBlock, ...], rank: int, tp_size: int, call: Callable[[nn.Module], Tensor]
    ) -> None:
        self._units, self._rank, self._tp_size = units, rank, tp_size
        self._run: Callable[[], Tensor] = lambda: call(twin)
        self._parameters = dict(twin.named_parameters(remove_duplicate=False))

    def problems(self) -> list[Problem]:
        rows = [cut for unit in self._units for cut in unit.rows]
        kept = {cut.name: self._parameters[cut.name].clone() for cut in rows}
        try:
            for cut in rows:
                self._parameters[cut.name].mul_(self._mask(cut))
            return self._mixing() + self._idle()
        finally:
            for name, value in kept.items():
                self._parameters[name].copy_(value)

    def _mixing(self) -> list[Problem]:
        """Units that need what other ranks hold."""
        alone = self._run()
        if _same(alone, self._with_other_columns(self._units, own=False)):
            return []
        problems = []
        for unit in self._units:
            moved_by = _distance(alone, self._with_other_columns((unit,), own=False))
            if not _close(moved_by, alone):
                found = (
                    f"rank {self._rank} of {self._tp_size} needs other ranks' channels (output moves by {moved_by:.2g})"
                )
                problems.append(Problem("slices-mix", unit.name, found=found, hint="do not cut this block"))
        return problems or [Problem("slices-mix", found="several units together need other ranks' channels")]

    def _idle(self) -> list[Problem]:
        """Units that the call does not reach: nothing was learnt about them."""
        alone = self._run()
        return [
            Problem(
                "unverified",
                unit.name,
                found=f"the output does not depend on rank {self._rank}'s slice",
                hint="pass a call that runs this block on inputs that matter",
            )
            for unit in self._units
            if _same(alone, self._with_other_columns((unit,), own=True))
        ]

    def _with_other_columns(self, units: tuple[TPBlock, ...], own: bool) -> Tensor:
        """The output after the rank's own columns of `units`, or all the others', were replaced."""
        cuts = [cut for unit in units for cut in (*unit.columns, *unit.inner)]
        kept = {cut.name: self._parameters[cut.name].clone() for cut in cuts}
        try:
            for cut in cuts:
                replaced = self._mask(cut) if own else ~self._mask(cut)
                value = kept[cut.name]
                self._parameters[cut.name].copy_(torch.where(replaced, _other(value), value))
            return self._run()
        finally:
            for name, value in kept.items():
                self._parameters[name].copy_(value)

    def _mask(self, cut: Cut) -> Tensor:
        """True where the rank holds the parameter."""
        parameter = self._parameters[cut.name]
        layout = Layout(MeshSpec({"tp": self._tp_size}), {"tp": cut.placement})
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        for box in layout.boxes(self._rank, tuple(parameter.shape)):
            mask[box.slices()] = True
        return mask


def _other(value: Tensor) -> Tensor:
    """Numbers of the same size that are not `value`."""
    generator = torch.Generator().manual_seed(value.numel())
    scale = float(value.abs().mean()) or 0.02
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * scale * 3
    return value + noise.to(value.dtype).to(value.device)


def _same(one: Tensor, other: Tensor) -> bool:
    return _close(_distance(one, other), one)


def _close(distance: float, output: Tensor) -> bool:
    """Rounding of the output's dtype, not more."""
    return distance <= (1e-9 if output.dtype == torch.float64 else 1e-4)


def _distance(one: Tensor, other: Tensor) -> float:
    """Greatest difference, as a share of the greatest value."""
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
