"""Plain whole parameters again: for a block of eager code, or for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dp_partition.binding import Binding, local_of, local_part
from dp_partition.capture.retired import retire
from dp_partition.problems import PlanError, Problem


@contextmanager
def unsharded(binding: Binding, writeback: bool) -> Iterator[None]:
    """Within the block the modules hold whole plain parameters; values written to them are kept.

    A block within the block sees the parameters of the outer one, which keeps what is written. Afterwards whoever asks
    for a gradient of these parameters (an optimizer that was made in the block) is told that they are gone.
    """
    if binding.is_unsharded:
        yield
        return
    binding.check_in_place()
    full = {fqn: nn.Parameter(whole(p), p.requires_grad) for fqn, p in binding.params.items()}
    made = list(full.items())
    binding.install_modules(full)
    binding.is_unsharded = True
    try:
        yield
    finally:
        binding.is_unsharded = False
        full |= _module_params(binding)  # load_state_dict(assign=True) puts others in place
        binding.install_modules(binding.params)
        found = "stood in the model within unsharded(), which is over"
        hint = "make lists of parameters, and other optimizers, from model.parameters() anew"
        for fqn, parameter in made:
            retire(parameter, Problem("parameter-replaced", fqn, found=found, hint=hint))
    if writeback:
        _write(binding, full)


def release(binding: Binding) -> None:
    """Plain whole parameters and state in module and optimizers, for good.

    Raises:
        PlanError: ``unsharded-now`` within a block of `unsharded`, whose end would place parameters again.
    """
    if binding.is_unsharded:
        raise PlanError(Problem("unsharded-now", found="release() within unsharded()", hint="leave the block first"))
    plain = {fqn: nn.Parameter(whole(p), p.requires_grad) for fqn, p in binding.params.items()}
    states: list[dict[str, dict[Any, Any]]] = [{} for _ in binding.subject.optimizers]
    for number, fqn, state in binding.states():
        states[number][fqn] = {k: whole(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    binding.install(plain, states)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank; a copy when it was sharded."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _module_params(binding: Binding) -> dict[str, nn.Parameter]:
    """The parameters that the modules hold now, by the name that each is placed under."""
    found: dict[str, nn.Parameter] = {}
    for fqn, module, attribute, is_param in binding.slots:
        param = module._parameters.get(attribute) if is_param else None
        if param is not None:
            found.setdefault(binding.subject.aliases.get(fqn, fqn), param)
    return found


def _write(binding: Binding, full: dict[str, nn.Parameter]) -> None:
    """Put whole values where the placed parameters lie.

    Raises:
        PlanError: ``shape-changed`` for a value of another shape.
    """
    problems = [
        Problem("shape-changed", fqn, found=f"{tuple(full[fqn].shape)} in place of {tuple(param.shape)}")
        for fqn, param in binding.params.items()
        if full[fqn].shape != param.shape
    ]
    if problems:
        raise PlanError(problems)
    with torch.no_grad():
        for fqn, param in binding.params.items():
            part = local_part(full[fqn].data, binding.plan[fqn].param, binding.world, binding.rank)
            local_of(param.data).copy_(part)


__all__ = ["release", "unsharded", "whole"]
