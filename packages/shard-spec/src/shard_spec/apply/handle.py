"""ShardHandle: the replaced tensors of a call, and undo; Transaction: an undo log of a call's changes; Sharders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec._shared.consensus import HEADER_BYTES, all_gather_header, all_gather_objects, problems_of
from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._shared.stale_parameters import mark_current, mark_stale
from shard_spec.apply.tensors import ExecutionPlan, TensorAction
from shard_spec.distributed.exchange import gather_shards, on_all_ranks
from shard_spec.layout.layout import Layout


class Transaction:
    """A log of changes. Leaving its block with an error undoes them, last first, and without one keeps them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while self._undo and kind is not None:
            self._undo.pop()()
        self._undo.clear()  # the old tensors can be freed

    def set_tensor(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Replace a registered parameter or buffer; order, kind and persistence of the entry are preserved."""
        table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old = table[name]
        self._undo.append(lambda: table.__setitem__(name, old))
        table[name] = value

    def set_module(self, parent: nn.Module, name: str, value: nn.Module) -> None:
        """Install a submodule."""
        old = parent._modules[name]
        self._undo.append(lambda: parent._modules.__setitem__(name, old))
        parent._modules[name] = value

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> Callable[[], None]:
        """Install a plain attribute of the instance, and return its undo function."""
        before = dict(module.__dict__)

        def undo() -> None:
            if name in before:
                module.__dict__[name] = before[name]
            else:
                module.__dict__.pop(name, None)  # the class attribute again

        self._undo.append(undo)
        module.__dict__[name] = value
        return undo

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``value`` into ``tensor``; equal values need no copy."""
        if torch.equal(tensor.detach(), value):  # no copy to keep
            return
        old = tensor.detach().clone()

        def undo() -> None:
            with torch.no_grad():
                tensor.copy_(old)

        self._undo.append(undo)
        with torch.no_grad():
            tensor.copy_(value)

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Register the undo function of a change by the caller."""
        self._undo.append(undo)


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


def install_module(module: nn.Module, path: str, new: nn.Module, transaction: Transaction) -> None:
    """Replace the module at ``path`` by ``new``, at every place."""
    old = module.get_submodule(path)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is old:
                transaction.set_module(parent, name, new)


def run_sharders(
    module: nn.Module, actions: ExecutionPlan, group: dist.ProcessGroup, transaction: Transaction
) -> dict[str, nn.Module]:
    """Call the Sharders in the order of their FQNs. If one fails on a rank, all ranks raise."""
    if not actions.sharders:
        return {}

    def run() -> dict[str, nn.Module]:
        tensors = {}
        try:
            for path, sharder in actions.sharders.items():
                old = module.get_submodule(path)
                transaction.on_rollback(Snapshot(old).restore)
                new = sharder.shard(old)
                if not isinstance(new, nn.Module):
                    reason = f"{type(sharder).__qualname__}.shard returned {type(new).__qualname__}"
                    raise PlanError(Problem("wrong-type", path, found=reason, hint="return an nn.Module"))
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


@dataclass
class Installed:
    """Changes of one call: tensors in place, removals of its hooks, and checks before an undo."""

    placed: list[Placed] = field(default_factory=list)
    removals: list[Callable[[], None]] = field(default_factory=list)
    checks: list[Callable[[], Problem | None]] = field(default_factory=list)

    def register(self, hook: Any, transaction: Transaction) -> None:
        """Remove a hook of torch at undo, or at a failure of this call."""
        transaction.on_rollback(hook.remove)
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
        on_all_ranks(self._group, "undo", lambda: raise_problems(self._undo_problems()), self._undo_lines)
        full_tensors = [self._whole(placed) for placed in self._installed.placed]
        for removal in reversed(self._installed.removals):
            removal()
        changes = Transaction()
        for placed, value in zip(self._installed.placed, full_tensors, strict=True):
            for module, name, _ in placed.places:
                changes.set_tensor(module, name, value)
            mark_current(value)
            if isinstance(placed.value, nn.Parameter):
                why = "undo() gave the module a full parameter; an optimizer still holds the shard"
                hint = "build the optimizer again"
                mark_stale(placed.value, Problem("parameter-replaced", placed.name, found=why, hint=hint))
        self._undone = True
        self._installed = Installed()  # frees the shards
        return self.module

    def _undo_lines(self, _: None) -> list[str]:
        return [f"undo {placed.name}: {_state(placed.value)}" for placed in self._installed.placed]

    def _undo_problems(self) -> list[Problem]:
        if self._undone:
            return [Problem("already-applied", found="this handle was undone before", hint="shard the module again")]
        problems = [problem for check in self._installed.checks if (problem := check()) is not None]
        for placed in self._installed.placed:
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
    for placed in handle._installed.placed:
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
