"""Handle of a model with an applied plan, for undo."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._shared.consensus import assert_consistent
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._shared.stale_parameters import mark_stale
from tp_styles.check.checker import Checker
from tp_styles.plan.planned import TPPlan
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.changes import ModuleChange, take_back
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.parameters import full_tensor, split_of
from tp_styles.values.split import Split


class TPHandle:
    """A model with an applied plan.

    Attributes:
        plan: The applied plan.
        model: The model.
        mesh: The 1-D mesh.
    """

    def __init__(
        self, model: nn.Module, plan: TPPlan, axis: TPGroup, changes: list[ModuleChange], checker: Checker | None
    ) -> None:
        self.model = model
        self.plan = plan
        self.mesh = axis.mesh
        self._axis = axis
        self._changes = changes
        self._checker = checker

    def report(self, path: str | None = None) -> str:
        """Return plan and checked calls as text; with `path` also write it there."""
        checked = self._checker.report() if self._checker is not None else []
        text = "\n".join([self.plan.explain(), *checked])
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def undo(self) -> nn.Module:
        """Restore full parameters (with their present values and gradients) and the model's own forwards.

        Every rank calls it: shards are gathered. The parameters are new objects.

        Returns:
            The model.

        Raises:
            PlanError: It was undone before, on this rank or on another; or another rank has other parameters in place.
        """
        fault = None
        if self.plan.modules and not self._changes:
            hint = "apply the plan again first"
            fault = PlanError(Problem("already-applied", found="undo() a second time", hint=hint))
        same = "every rank needs the same parameters in the same places"
        assert_consistent(self._axis.group, "undo", self._parts(), fault, hint=same)
        full: dict[int, nn.Parameter] = {}
        restored = [
            (
                change.module,
                name,
                _whole(change.module._parameters.get(name), change.splits.get(name), self._axis, full),
            )
            for change in self._changes
            for name in change.replaced
        ]
        names = {module: name for name, module in self.model.named_modules()}
        for module, name, parameter in restored:  # no communication from here on
            part, path = module._parameters.get(name), names.get(module, "")
            module._parameters[name] = parameter
            if part is not None:
                reason = "undo() gave the module a full parameter; an optimizer still holds the shard"
                fqn = f"{path}.{name}" if path else name
                mark_stale(part, Problem("parameter-replaced", fqn, found=reason, hint="build the optimizer again"))
        take_back(self._changes)
        self._changes = []  # a second undo() raises
        return self.model

    def _parts(self) -> list[str]:
        """List the shards to gather, one a line."""
        names = {module: name for name, module in self.model.named_modules()}
        return [
            f"{names.get(change.module, '')}.{name}: ".lstrip(".")
            + _gathering(change.module._parameters.get(name), change.splits.get(name))
            for change in self._changes
            for name in change.replaced
        ]


def _gathering(current: nn.Parameter | None, split: Split | None) -> str:
    """Return metadata to compare before gathering a parameter and its gradient; nothing of a single rank."""
    if current is None:
        return "none"
    if split is not None and split.is_replicated:
        return "whole"
    gradient = "with" if current.grad is not None else "without"
    return f"{type(current).__name__}, {current.dtype}, {gradient} a gradient"


def _whole(
    current: nn.Parameter | None, split: Split | None, axis: TPGroup, memo: dict[int, nn.Parameter]
) -> nn.Parameter | None:
    if current is None:
        return None
    if id(current) not in memo:
        parameter = nn.Parameter(_gathered(current, split, axis), current.requires_grad)
        attributes = {key: value for key, value in vars(current).items() if key != "_sharding_info"}  # full now
        parameter.__dict__.update(attributes)
        if current.grad is not None:
            parameter.grad = _gathered(current.grad, split, axis)
        memo[id(current)] = parameter
    return memo[id(current)]


def _gathered(value: torch.Tensor, split: Split | None, axis: TPGroup) -> torch.Tensor:
    if split is not None:
        return full_tensor(value, axis, split)
    if isinstance(value, DTensor):
        return cast(DTensor, value.detach()).full_tensor()
    info = sharding_info_of(value)
    return full_tensor(value, axis, split_of(info)) if info is not None else value.detach().clone()
