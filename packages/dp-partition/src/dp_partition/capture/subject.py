"""What a train step works on: the modules, optimizers and tensors among its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dp_partition._torch_compat import pytree
from dp_partition.capture.attributes import Attributes, Structure
from dp_partition.problems import PlanError, Problem


@dataclass
class Subject:
    """The stateful arguments of a train step.

    Attributes:
        modules: ``(prefix, module)``; the prefix is empty when there is one module.
        optimizers: The optimizers, in argument order.
        params: Unique parameters by FQN, in registration order; a tied parameter stands under its first name.
        buffers: Unique buffers by FQN.
        aliases: Every further name of a tied tensor -> the name it stands under.
    """

    modules: list[tuple[str, nn.Module]]
    optimizers: list[Optimizer]
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _attributes: Attributes | None = None

    @property
    def structure(self) -> Structure:
        """How the modules are built."""
        return self._read_attributes().structure

    def attributes(self) -> tuple[Any, ...]:
        """What the modules keep beside their parameters and buffers: constants of a trace."""
        return self._read_attributes().read()

    def _read_attributes(self) -> Attributes:
        if self._attributes is None:
            self._attributes = Attributes(Structure(root for _, root in self.modules))
        return self._attributes

    def slots(self) -> Iterator[tuple[str, nn.Module, str, bool]]:
        """Every place a tensor is registered in: ``(fqn, owner module, attribute, is it a parameter)``."""
        for prefix, root in self.modules:
            for path, module in root.named_modules(remove_duplicate=True):
                base = ".".join(part for part in (prefix, path) if part)
                for is_param, table in ((True, module._parameters), (False, module._buffers)):
                    for attribute, tensor in table.items():
                        if tensor is not None:
                            yield (f"{base}.{attribute}" if base else attribute), module, attribute, is_param


def find_subject(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """Find the modules and optimizers among the arguments, and the tensors they hold.

    Raises:
        PlanError: When there is no module (code ``no-module``), or an optimizer steps a tensor that no module holds
            (code ``parameter-not-in-module``).
    """
    modules: list[tuple[str, nn.Module]] = []
    optimizers: list[Optimizer] = []
    for name, leaf in _named_leaves(function, args, kwargs):
        if isinstance(leaf, nn.Module) and all(leaf is not known for _, known in modules):
            modules.append((name, leaf))
        if isinstance(leaf, Optimizer) and all(leaf is not known for known in optimizers):
            optimizers.append(leaf)
    if not modules:
        hint = "pass the model as an argument of the train step, not through a closure"
        raise PlanError(
            Problem("no-module", getattr(function, "__name__", "train_step"), found="no nn.Module", hint=hint)
        )
    if len(modules) == 1:
        modules = [("", modules[0][1])]
    subject = Subject(modules, optimizers)
    index_tensors(subject)
    _check_optimizers(subject)
    return subject


def _named_leaves(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {str(index): value for index, value in enumerate(args)} | kwargs
    for name, value in bound.items():
        leaves = pytree.tree_leaves(value)
        for index, leaf in enumerate(leaves):
            yield (name if len(leaves) == 1 else f"{name}.{index}"), leaf


def index_tensors(subject: Subject) -> None:
    first_name: dict[int, str] = {}
    for fqn, module, attribute, is_param in subject.slots():
        tensor = (module._parameters if is_param else module._buffers)[attribute]
        assert tensor is not None
        if id(tensor) in first_name:
            subject.aliases[fqn] = first_name[id(tensor)]
            continue
        first_name[id(tensor)] = fqn
        if isinstance(tensor, nn.Parameter):
            subject.params[fqn] = tensor
        else:
            subject.buffers[fqn] = tensor


def _check_optimizers(subject: Subject) -> None:
    known = {id(param) for param in subject.params.values()}
    problems = []
    for number, optimizer in enumerate(subject.optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if id(param) not in known:
                    problems.append(
                        Problem(
                            "parameter-not-in-module",
                            f"optimizer {number} group {group_index} parameter {index}",
                            found=f"tensor of shape {tuple(param.shape)} that no module argument holds",
                            hint="pass the module that holds it as an argument of the train step",
                        )
                    )
    if problems:
        raise PlanError(problems)
