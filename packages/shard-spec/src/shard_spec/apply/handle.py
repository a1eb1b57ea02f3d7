"""ShardHandle: the replaced tensors of a call, and undo."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec._shared.stale_parameters import mark_current, mark_stale
from shard_spec.apply.tensors import TensorAction
from shard_spec.apply.transaction import Transaction, put_tensor
from shard_spec.distributed.exchange import gather_shards
from shard_spec.distributed.mesh_cache import on_all_ranks
from shard_spec.layout.layout import Layout


@dataclass
class Placed:
    """One replaced tensor.

    Attributes:
        places: ``(module, name, FQN)`` of every entry that holds it; several if it is tied.
        value: The current value.
        before: The previous value, while other objects still hold it.
        layout: Layout of its shards.
        shape: Global shape.
    """

    places: tuple[tuple[nn.Module, str, str], ...]
    value: torch.Tensor
    before: weakref.ref[torch.Tensor]
    layout: Layout | None
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """First FQN."""
        return self.places[0][2]


class ShardHandle:
    """Handle returned by ``shard_module``, ``shard_parameter`` and ``plan.apply``.

    Attributes:
        plan: The applied plan.
        actions: The actions, tensor by tensor: ``explain()``, ``to_json()``, ``digest``.
        module: The sharded module.
    """

    def __init__(
        self,
        plan: Any,
        actions: Any,
        module: nn.Module,
        group: dist.ProcessGroup,
        placed: list[Placed],
        removals: list[Callable[[], None]],
        checks: list[Callable[[], Problem | None]],
    ) -> None:
        self.plan = plan
        self.actions = actions
        self.module = module
        self._group = group
        self._placed = placed
        self._removals = removals
        self._checks = checks
        self._undone = False

    def __repr__(self) -> str:
        state = "undone" if self._undone else f"{len(self._placed)} tensors"
        return f"ShardHandle({type(self.module).__name__}, {state})"

    def undo(self) -> nn.Module:
        """Unshard the module, with its current values and gradients; a collective.

        Parameters that other objects still hold, such as an optimizer built before, come back as the same objects;
        others as new ones. Tensors overwritten with the source's values keep these.

        Raises:
            PlanError: On every rank, without changes: ``already-applied``; ``model-changed`` if a tensor or a forward
                was replaced after the call (undo later calls first); ``sharder-nesting``.
        """
        on_all_ranks(self._group, "undo", lambda: raise_problems(self._undo_problems()), self._undo_lines)
        full_tensors = [self._whole(placed) for placed in self._placed]
        for removal in reversed(self._removals):
            removal()
        for placed, value in zip(self._placed, full_tensors, strict=True):
            for module, name, _ in placed.places:
                put_tensor(module, name, value)
            mark_current(value)
            if isinstance(placed.value, nn.Parameter):
                why = "undo() gave the module a full parameter; an optimizer still holds the shard"
                hint = "build the optimizer again"
                mark_stale(placed.value, Problem("parameter-replaced", placed.name, found=why, hint=hint))
        self._undone = True
        self._placed, self._removals, self._checks = [], [], []  # frees the shards
        return self.module

    def _undo_lines(self, _: None) -> list[str]:
        return [f"undo {placed.name}: {_state(placed.value)}" for placed in self._placed]

    def _undo_problems(self) -> list[Problem]:
        if self._undone:
            return [Problem("already-applied", found="this handle was undone before", hint="shard the module again")]
        problems = [problem for check in self._checks if (problem := check()) is not None]
        for placed in self._placed:
            for module, name, fqn in placed.places:
                now = module._parameters.get(name, module._buffers.get(name))
                if now is not placed.value:
                    reason = "another tensor has replaced the sharded one"
                    hint = "undo later calls first, or put the sharded tensor back"
                    problems.append(Problem("model-changed", fqn, found=reason, hint=hint))
        return problems

    def _whole(self, placed: Placed) -> torch.Tensor:
        """Return the full tensor with its gradient; a collective."""
        value = self._gathered(placed.value, placed)
        grad = placed.value.grad
        held = placed.before()
        if held is not None and not held.is_meta:  # the same object: its optimizer holds it
            with torch.no_grad():
                held.copy_(value)
            restored = held.requires_grad_(placed.value.requires_grad)
        elif isinstance(placed.value, nn.Parameter):
            restored = nn.Parameter(value, requires_grad=placed.value.requires_grad)
            restored.__dict__.update(user_attributes(placed.value))
        else:
            restored = value
        if grad is not None:
            restored.grad = self._gathered(grad, placed).to(restored.device)
        return restored

    def _gathered(self, tensor: torch.Tensor, placed: Placed) -> torch.Tensor:
        """Gather a tensor of the layout of ``placed``; any dtype, unlike ``full_tensor``."""
        if isinstance(tensor, DTensor):
            assert isinstance(placed.value, DTensor)
            with torch.no_grad():
                tensor = tensor.redistribute(placements=placed.value.placements).to_local()
        assert placed.layout is not None
        return gather_shards(tensor, placed.layout, placed.shape, self._group)


def place(
    module: nn.Module, action: TensorAction, old: torch.Tensor, value: torch.Tensor, transaction: Transaction
) -> Placed:
    """Put ``value`` in place of ``old``, under each of its names, with the user's attributes."""
    value.__dict__.update(user_attributes(old))  # e.g. weight-decay flags
    places = []
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        owner = module.get_submodule(path)
        transaction.set_tensor(owner, name, value)
        places.append((owner, name, fqn))
    return Placed(tuple(places), value, weakref.ref(old), action.layout, action.shape)


def _state(value: torch.Tensor) -> str:
    """Describe the properties that ranks compare before they gather a tensor and its gradient."""
    dtype = str(value.dtype).removeprefix("torch.")
    if value.grad is None:
        return f"{dtype}, no gradient"
    return f"{dtype}, with a gradient of {str(value.grad.dtype).removeprefix('torch.')}"


def mark_replaced_stale(handle: ShardHandle) -> ShardHandle:
    """Mark replaced parameters as stale, so that an optimizer that still trains them raises."""
    for placed in handle._placed:
        original = placed.before()
        if isinstance(original, nn.Parameter):
            reason = "an optimizer, or another module, still holds the full parameter; the module trains its shard"
            hint = "build the optimizer after the module is sharded; shard a module that holds all ties"
            mark_stale(original, Problem("parameter-replaced", placed.name, found=reason, hint=hint))
    return handle


# Attributes of a parameter that torch and this repository write themselves.
_OWN_ATTRIBUTES = {"_sharding_info", "_is_param", "_local_tensor", "_spec", "_stale_problem", "_stale_successor"}


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the user's attributes of a parameter, for the tensor that replaces it."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


def irreversible(path: str, sharder: object) -> Callable[[], Problem]:
    """Return a check that always fails: a Sharder's change cannot be undone."""
    reason = f"{type(sharder).__qualname__} replaced this module; its weights may have changed since"
    problem = Problem("sharder-nesting", path, found=reason, hint="keep a copy of the module to go back to")
    return lambda: problem


def still_ours(module: nn.Module, attribute: str, value: object, path: str) -> Callable[[], Problem | None]:
    """Return a check that an instance attribute is still the installed one."""

    def check() -> Problem | None:
        if module.__dict__.get(attribute) is value:
            return None
        reason, hint = f"its {attribute} was replaced after this call", "undo later calls first"
        return Problem("model-changed", path, found=reason, hint=hint)

    return check
