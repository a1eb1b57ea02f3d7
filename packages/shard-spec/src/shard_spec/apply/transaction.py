"""Transaction: an undo log of a call's changes to a module, and Sharders within one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shard_spec._shared.consensus import HEADER_BYTES, all_gather_header, all_gather_objects, problems_of
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.execution_plan import ExecutionPlan
from shard_spec.distributed.mesh_cache import on_all_ranks


class Transaction:
    """A log of changes; leaving its block with an error undoes them, last first, and without one keeps them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while self._undo and kind is not None:
            self._undo.pop()()
        self._undo.clear()  # the old tensors can be freed

    def set_tensor(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Install a parameter or buffer of ``module``."""
        put_tensor(module, name, value, self._undo)

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


def put_tensor(module: nn.Module, name: str, value: torch.Tensor, log: list[Callable[[], None]] | None = None) -> None:
    """Replace a registered parameter or buffer; order, kind and persistence of the entry are preserved."""
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    old = table[name]
    if log is not None:
        log.append(lambda: table.__setitem__(name, old))
    table[name] = value


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
    """Call the Sharders in the order of their FQNs; if one fails on a rank, all ranks raise."""
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

    def lines(made: dict[str, nn.Module]) -> list[str]:
        return [f"{path}: {type(new).__qualname__}" for path, new in made.items()]

    return on_all_ranks(group, "a Sharder failed", run, lines)


def _await_peers(group: dist.ProcessGroup, problems: tuple[Problem, ...]) -> None:
    """Join comparisons of ranks inside a Sharder until every rank has left its Sharders.

    A Sharder may call ``shard_module``: if this rank's failed before that, its peers wait in the comparison.
    """
    subject = "Sharders"
    done = subject.encode().ljust(HEADER_BYTES, b"\0")
    while set(all_gather_header(group, done, subject)) != {done}:
        all_gather_objects(group, (subject, (), problems), subject)
