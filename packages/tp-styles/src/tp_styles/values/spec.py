"""Decision of a style for one module, as values: no process group, no device, no tensor data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from tp_styles.problems import Problem
from tp_styles.values.split import Split
from tp_styles.values.transfer import Transfer, normalized, transfer

# ---------------------------------------------------------------------------------------------- a module's metadata


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of a module: its name below the module and its global metadata."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class ModuleInfo:
    """Metadata of a module; the only input of a style's decision.

    Attributes:
        name: FQN below the model's root, `""` for the root.
        kind: The module's class.
        parameters: Direct and nested parameters, dotted names.
        arguments: Names of `forward`'s positional arguments, in order.
        keyword_only: Names of its keyword-only arguments.
        open_positional: It takes `*args`.
        open_keyword: It takes `**kwargs`.
        sizes: Integer, boolean and None attributes (`in_features`, `num_heads`, `max_norm` ...), sorted by name.
        children: Dotted name and class of every module below it.
    """

    name: str
    kind: type[nn.Module]
    parameters: tuple[ParameterInfo, ...]
    arguments: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    open_positional: bool = False
    open_keyword: bool = False
    sizes: tuple[tuple[str, int | float | None], ...] = ()
    children: tuple[tuple[str, type[nn.Module]], ...] = ()

    def parameter(self, name: str) -> ParameterInfo | None:
        """Return the parameter of that name, None if there is none."""
        return next((info for info in self.parameters if info.name == name), None)

    def size(self, name: str) -> int | float | None:
        """Return the attribute of that name, None if there is none."""
        return dict(self.sizes).get(name)

    def where(self, name: str = "") -> str:
        """Return the FQN of a name below the module, for problems."""
        return ".".join(part for part in (self.name, name) if part)


def describe(module: nn.Module, name: str = "") -> ModuleInfo:
    """Return the metadata of a module for styles.

    Args:
        module: Any module, on any device, the meta device too.
        name: Its FQN.
    """
    parameters = tuple(
        ParameterInfo(fqn, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for fqn, parameter in module.named_parameters(remove_duplicate=False)  # tied: under all names
    )
    plain = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and (value is None or isinstance(value, int | float))  # not tensors
    }
    children = tuple((fqn, type(child)) for fqn, child in module.named_modules(remove_duplicate=False) if fqn)
    kinds = {key: value.kind for key, value in inspect.signature(module.forward).parameters.items()}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return ModuleInfo(
        name,
        type(module),
        parameters,
        arguments=tuple(key for key, kind in kinds.items() if kind in by_position),
        keyword_only=tuple(key for key, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY),
        open_positional=inspect.Parameter.VAR_POSITIONAL in kinds.values(),
        open_keyword=inspect.Parameter.VAR_KEYWORD in kinds.values(),
        sizes=tuple(sorted(plain.items())),  # in one order on all ranks
        children=children,
    )


def names_of_parameters(model: nn.Module) -> list[list[str]]:
    """Return all FQNs of each parameter, in the model's order; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)  # ties by identity
    return list(names.values())


def is_below(name: str, parent: str) -> bool:
    """True if the FQN is the parent's or below it."""
    return not parent or name == parent or name.startswith(f"{parent}.")


# ---------------------------------------------------------------------------------------------- a style's decision


@dataclass(frozen=True)
class Redistribution:
    """One activation at a module's boundary.

    Attributes:
        src: Layout before.
        dst: Layout after.
        gradient: Layout of the incoming gradient on the `dst` side, None for the usual one.
        split: Split of the last dim wherever it is a shard; None if not known, then shards are even.
        width: Global size of the last dim, 0 if not known.
    """

    src: Placement
    dst: Placement
    gradient: Placement | None = None
    split: Split | None = None
    width: int = 0

    def transfer(self, ndim: int) -> Transfer:
        """Return the steps for a tensor of `ndim` dims."""
        gradient = None if self.gradient is None else normalized(self.gradient, ndim)
        return transfer(normalized(self.src, ndim), normalized(self.dst, ndim), gradient)


@dataclass(frozen=True)
class ParameterSpec:
    """Split of one parameter, and the sum of its gradient.

    Attributes:
        split: Split over the ranks.
        sum_gradient: Each rank computes a partial gradient of a replicated parameter, and these are summed.
        divide_by_tp: Every rank adds it before a sum over the ranks: each adds an equal share.
    """

    split: Split
    sum_gradient: bool = False
    divide_by_tp: bool = False

    def gradient_sum(self) -> Redistribution:
        """Return the flow of a parameter's summed gradient, for copies among the rows of the split."""
        return Redistribution(Replicate(), Replicate(), gradient=Partial(), split=self.split)


@dataclass(frozen=True)
class PerRank:
    """Placeholder for a count divided by the number of ranks."""


@dataclass(frozen=True)
class StyleSpec:
    """A style's decision for one module.

    Attributes:
        compute: Name of the forward that replaces the module's (see `runtime.install`); `"hooks"` runs the
            module's own forward between hooks, `"foreign"` runs the style's own `_apply`.
        parameters: Parameter name below the module -> its spec; others are left alone.
        inputs: Argument name -> its flow.
        num_positional: Largest number of positional inputs of a call; None for any number.
        outputs: One flow for each output, None for one to leave alone.
        local_output: Outputs are plain tensors; otherwise DTensors.
        local_input: Inputs are plain tensors inside; otherwise DTensors.
        attributes: Attributes to make local, by dotted name (the number of heads).
        buffers: Buffers to shard, by dotted name, and the dim.
        shards_randomness: Ranks hold different shards: dropout inside draws other numbers on each.
        children: Styles for modules below, by dotted name.
        problems: Reasons against it.
    """

    compute: str = "hooks"
    parameters: tuple[tuple[str, ParameterSpec], ...] = ()
    inputs: tuple[tuple[str, Redistribution], ...] = ()
    num_positional: int | None = None
    outputs: tuple[Redistribution | None, ...] = ()
    local_output: bool = True
    local_input: bool = True
    attributes: tuple[tuple[str, object], ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()
    shards_randomness: bool = False
    children: tuple[tuple[str, object], ...] = ()
    problems: tuple[Problem, ...] = ()

    def flows(self) -> Iterator[tuple[str, Redistribution]]:
        """Yield all flows with a name: the argument's, or `-> i` for output i."""
        yield from self.inputs
        for index, flow in enumerate(self.outputs):
            if flow is not None:
                yield ("->" if len(self.outputs) == 1 else f"-> {index}"), flow
