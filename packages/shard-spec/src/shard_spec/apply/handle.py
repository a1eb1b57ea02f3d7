"""ShardHandle: the replaced tensors of a call, and undo; the log of a call's changes; Sharders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec._shared.consensus import HEADER_BYTES, all_gather_header, all_gather_objects, problems_of
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._shared.stale_parameters import mark_current, mark_stale
from shard_spec.apply.tensors import ExecutionPlan, TensorAction
from shard_spec.distributed import gather_shards, on_all_ranks
from shard_spec.layout.layout import Layout

Undo: TypeAlias = Callable[[], object]
UndoLog: TypeAlias = list[Undo]


@contextmanager
def undone_on_failure() -> Iterator[UndoLog]:
    """Yield a log of changes. If the block raises, they are undone, last first."""
    log: UndoLog = []
    try:
        yield log
    except BaseException:
        while log:
            log.pop()()
        raise
    log.clear()  # the old tensors can be freed


def put(table: dict[str, Any], key: str, value: object, log: UndoLog) -> Undo:
    """Set an entry of a module's table, in its place, and log and return the way back."""
    before = {key: table[key]} if key in table else {}

    def undo() -> None:
        table.update(before) if before else table.pop(key, None)

    log.append(undo)
    table[key] = value
    return undo


class Snapshot:
    """Registered state of a module and its submodules, to restore if a Sharder fails."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        attributes = [vars(each) for each in (*module.modules(), *tensors)]
        inner = [value for table in attributes for value in table.values() if isinstance(value, dict)]
        # A shard_module within the Sharder adds hooks on gradients of replicated parameters.
        self._hooks = [(tensor, tensor._backward_hooks) for tensor in tensors]
        hooked = [hooks for _, hooks in self._hooks if hooks is not None]
        self._tables = [(table, table.copy()) for table in (*attributes, *inner, *hooked)]

    def restore(self) -> None:
        """Restore every attribute, table and gradient hook; in-place writes to values are not undone."""
        for table, items in self._tables:
            table.clear()
            table.update(items)
        for tensor, hooks in self._hooks:
            tensor._backward_hooks = hooks


def run_sharders(
    module: nn.Module, actions: ExecutionPlan, group: dist.ProcessGroup, log: UndoLog
) -> dict[str, nn.Module]:
    """Call the Sharders in the order of their FQNs. If one fails on a rank, all ranks raise."""

    def run() -> dict[str, nn.Module]:
        tensors = {}
        try:
            for path, sharder in actions.sharders.items():
                old = module.get_submodule(path)
                log.append(Snapshot(old).restore)
                new = sharder.shard(old)
                if not isinstance(new, nn.Module):
                    raise PlanError(
                        Problem(
                            "wrong-type",
                            path,
                            found=f"{type(sharder).__qualname__}.shard returned {type(new).__qualname__}",
                            hint="return an nn.Module",
                        )
                    )
                tensors[path] = new
        except Exception as error:
            _await_peers(group, problems_of(error))
            raise
        _await_peers(group, ())
        return tensors

    def lines(sharded: dict[str, nn.Module]) -> list[str]:
        return [f"{path}: {type(new).__qualname__}" for path, new in sharded.items()]

    return on_all_ranks(group, "a Sharder failed", run, lines)


def _await_peers(group: dist.ProcessGroup, problems: tuple[Problem, ...]) -> None:
    """Join comparisons of ranks inside a Sharder until every rank has left its Sharders.

    A Sharder may call ``shard_module``: if this rank's failed before that, its peers wait in the comparison.
    """
    subject = "Sharders"
    done = subject.encode().ljust(HEADER_BYTES, b"\0")
    while set(all_gather_header(group, done, subject)) != {done}:
        all_gather_objects(group, (subject, (), problems), subject)


@dataclass
class Placed:
    """One replaced tensor."""

    places: tuple[tuple[dict[str, Any], str, str], ...]  # (table of a module, name, FQN); several if it is tied
    value: torch.Tensor
    before: weakref.ref[torch.Tensor]  # the previous value, while other objects still hold it
    layout: Layout | None
    shape: tuple[int, ...]  # global

    @property
    def name(self) -> str:
        """First FQN."""
        return self.places[0][2]


@dataclass
class Installed:
    """Changes of one call."""

    placed: list[Placed] = field(default_factory=list)
    removals: UndoLog = field(default_factory=list)  # of its hooks and forwards
    forwards: dict[str, tuple[nn.Module, object]] = field(default_factory=dict)  # as they have to be at an undo
    final: list[Problem] = field(default_factory=list)  # changes that cannot be undone

    def register(self, hook: Any, log: UndoLog) -> None:
        """Remove a hook of torch at undo, or at a failure of this call."""
        log.append(hook.remove)
        self.removals.append(hook.remove)


class ShardHandle:
    """Handle returned by ``shard_module``, ``shard_parameter`` and ``plan.apply``.

    Attributes:
        plan: The applied plan.
        actions: The actions, tensor by tensor: ``explain()``, ``to_json()``, ``digest``.
        module: The sharded module.
    """

    def __init__(
        self, plan: Any, actions: Any, module: nn.Module, group: dist.ProcessGroup, installed: Installed
    ) -> None:
        self.plan = plan
        self.actions = actions
        self.module = module
        self._group = group
        self._installed = installed
        self._undone = False
        # An optimizer that still trains a replaced parameter raises.
        reason = "an optimizer, or another module, still holds the full parameter; the module trains its shard"
        hint = "build the optimizer after the module is sharded; shard a module that holds all ties"
        for placed in installed.placed:
            if isinstance(original := placed.before(), nn.Parameter):
                mark_stale(original, Problem("parameter-replaced", placed.name, found=reason, hint=hint))

    def __repr__(self) -> str:
        state = "undone" if self._undone else f"{len(self._installed.placed)} tensors"
        return f"ShardHandle({type(self.module).__name__}, {state})"

    def undo(self) -> nn.Module:
        """Unshard the module, with its current values and gradients; a collective.

        Parameters that other objects still hold, such as an optimizer built before, come back as the same objects;
        others as new ones. Tensors overwritten with the source's values keep these.

        Raises:
            PlanError: On every rank, without changes: ``already-applied``; ``model-changed`` if a tensor or a forward
                was replaced after the call (undo later calls first); ``sharder-nesting``.
        """
        on_all_ranks(self._group, "undo", self._check_undo, list)
        full_tensors = [self._whole(placed) for placed in self._installed.placed]
        for removal in reversed(self._installed.removals):
            removal()
        for placed, value in zip(self._installed.placed, full_tensors, strict=True):
            for table, name, _ in placed.places:
                table[name] = value
            mark_current(value)
            if isinstance(placed.value, nn.Parameter):
                mark_stale(
                    placed.value,
                    Problem(
                        "parameter-replaced",
                        placed.name,
                        found="undo() gave the module a full parameter; an optimizer still holds the shard",
                        hint="build the optimizer again",
                    ),
                )
        self._undone = True
        self._installed = Installed()  # frees the shards
        return self.module

    def _check_undo(self) -> list[str]:
        """Raise if this rank cannot undo the call; return what ranks compare before they gather."""
        if self._undone:
            raise PlanError(
                Problem("already-applied", found="this handle was undone before", hint="shard the module again")
            )
        problems = list(self._installed.final)
        for path, (module, forward) in self._installed.forwards.items():
            if module.__dict__.get("forward") is not forward:
                problems.append(
                    Problem(
                        "model-changed",
                        path,
                        found="its forward was replaced after this call",
                        hint="undo later calls first",
                    )
                )
        lines = []
        for placed in self._installed.placed:
            for table, name, fqn in placed.places:
                if table.get(name) is not placed.value:
                    problems.append(
                        Problem(
                            "model-changed",
                            fqn,
                            found="another tensor has replaced the sharded one",
                            hint="undo later calls first, or put the sharded tensor back",
                        )
                    )
            grad = "no gradient" if placed.value.grad is None else f"with a gradient of {placed.value.grad.dtype}"
            lines.append(f"undo {placed.name}: {placed.value.dtype}, {grad}".replace("torch.", ""))
        raise_problems(problems)
        return lines

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


def place(module: nn.Module, action: TensorAction, old: torch.Tensor, value: torch.Tensor, log: UndoLog) -> Placed:
    """Put ``value`` in place of ``old``, under each of its names, with the user's attributes."""
    value.__dict__.update(user_attributes(old))  # e.g. weight-decay flags
    places = []
    for fqn in action.names:
        path, _, name = fqn.rpartition(".")
        owner = module.get_submodule(path)
        table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
        put(table, name, value, log)
        places.append((table, name, fqn))
    return Placed(tuple(places), value, weakref.ref(old), action.layout, action.shape)


# Attributes of a parameter that torch and this repository write themselves.
_OWN_ATTRIBUTES = {"_sharding_info", "_is_param", "_local_tensor", "_spec", "_stale_problem", "_stale_successor"}


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the user's attributes of a parameter, for the tensor that replaces it."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}
