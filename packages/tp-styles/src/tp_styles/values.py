"""Plain data: splits of parameters, steps of activations, decisions of styles.

No value holds a process group or a device. The planner prints these values, the runtime executes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from tp_styles._shared.sharding_info import Section as Section
from tp_styles.problems import Problem


@dataclass(frozen=True)
class Split:
    """Split of one dim of a parameter over the ranks; `dim=None` means replicated.

    Args:
        dim: Tensor dim, not negative, or None for a replicated parameter.
        sections: The sections of that dim, in order.
    """

    dim: int | None = None
    sections: tuple[Section, ...] = field(default=())

    def __post_init__(self) -> None:
        if (self.dim is None) != (len(self.sections) == 0):
            raise ValueError(f"{self}: a split has a dim and sections, a replicated parameter neither")
        if self.dim is not None and self.dim < 0:
            raise ValueError(f"{self}: the dim must not be negative")
        for size, unit, copies, _ in self.sections:
            if size < 0 or unit < 1 or copies < 1 or size % unit:
                raise ValueError(f"{self}: a size must be a multiple of its unit, and unit and copies at least 1")

    @classmethod
    def replicated(cls) -> Split:
        """Return the split of a replicated parameter."""
        return cls()

    @classmethod
    def along(cls, dim: int, size: int, *, unit: int = 1, copies: int = 1) -> Split:
        """Return one section of `size` rows along `dim`."""
        return cls(dim, (Section(size, unit, copies),))

    # properties

    @property
    def is_replicated(self) -> bool:
        """True if replicated."""
        return self.dim is None

    @property
    def global_size(self) -> int:
        """Rows of all sections together."""
        return sum(section.size for section in self.sections)

    @property
    def is_single(self) -> bool:
        """True if ranks hold consecutive rows in their order: at most one section, from rank 0 on, and no copies."""
        return len(self.sections) <= 1 and all(section.copies == 1 and not section.first for section in self.sections)

    @property
    def is_on_one_rank(self) -> bool:
        """True if one rank holds all rows, as those of a numbered expert."""
        return [section.unit for section in self.sections] == [self.global_size]

    def is_plain(self, tp_size: int) -> bool:
        """True if DTensor's `Shard(dim)` or `Replicate()` means exactly the same; never for a fused weight."""
        if self.is_replicated:
            return True
        if not self.is_single:
            return False
        (section,) = self.sections
        return section.unit == 1 or section.size // section.unit % tp_size == 0  # even

    def placement(self) -> Placement:
        """Return the nearest placement: exact if `is_plain`, else only the dim is right."""
        return Replicate() if self.dim is None else Shard(self.dim)

    # row indices

    def ranges(self, rank: int, tp_size: int) -> tuple[tuple[int, int], ...]:
        """Return global `(start, stop)` of `rank`'s shard of each section, in order."""
        ranges = []
        offset = 0
        for section in self.sections:
            start, stop = section.bounds(rank, tp_size)
            ranges.append((offset + start, offset + stop))  # offset: earlier sections
            offset += section.size
        return tuple(ranges)

    def local_size(self, rank: int, tp_size: int) -> int:
        """Return the rows of `rank`'s shard."""
        return sum(stop - start for start, stop in self.ranges(rank, tp_size))

    def sizes(self, tp_size: int) -> tuple[int, ...]:
        """Return the rows of each rank's shard."""
        return tuple(self.local_size(rank, tp_size) for rank in range(tp_size))

    def local_shape(self, shape: Sequence[int], rank: int, tp_size: int) -> torch.Size:
        """Return the shape of `rank`'s shard of a tensor of global `shape`."""
        local = list(shape)
        if self.dim is not None:
            local[self.dim] = self.local_size(rank, tp_size)
        return torch.Size(local)

    # operations on tensors, without communication

    def take(self, full: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
        """Return `rank`'s shard of a full tensor, as a contiguous tensor with its own storage."""
        if self.dim is None:
            return full.clone(memory_format=torch.contiguous_format)
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges(rank, tp_size)]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)  # no view: the full tensor can be freed
        return torch.cat(pieces, dim=self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the full tensor from every rank's shard, in rank order."""
        if self.dim is None:
            return parts[0].clone()
        tp_size = len(parts)
        shape = list(parts[0].shape)
        shape[self.dim] = self.global_size
        full = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            offset = 0
            for start, stop in self.ranges(rank, tp_size):
                length = stop - start
                full.narrow(self.dim, start, length).copy_(part.narrow(self.dim, offset, length))
                offset += length
        return full

    def __str__(self) -> str:
        if self.dim is None:
            return "replicated"
        text = f"dim {self.dim}"
        if len(self.sections) > 1:
            text += " in sections " + "+".join(str(section.size) for section in self.sections)
        if any(section.unit > 1 for section in self.sections):
            text += " by " + "/".join(str(section.unit) for section in self.sections)
        if any(section.copies > 1 for section in self.sections):
            text += ", copies " + "/".join(str(section.copies) for section in self.sections)
        if any(section.first for section in self.sections):
            text += ", from rank " + "/".join(str(section.first) for section in self.sections)
        return text


Op = Literal["none", "all_reduce", "all_gather", "reduce_scatter", "slice", "all_to_all"]


@dataclass(frozen=True)
class Step:
    """One movement: `op` along `dim`. An `all_to_all` goes from shards of `source_dim` to shards of `dim`."""

    op: Op = "none"
    dim: int | None = None
    source_dim: int | None = None

    @property
    def communicates(self) -> bool:
        """True if it needs communication."""
        return self.op not in ("none", "slice")

    def __str__(self) -> str:
        if self.source_dim is not None:
            return f"{self.op}({self.source_dim}->{self.dim})"
        return self.op if self.dim is None else f"{self.op}({self.dim})"


@dataclass(frozen=True)
class Transfer:
    """The step of the forward pass and the step of the gradient."""

    forward: Step
    backward: Step


class NoTransfer(ValueError):
    """There is no valid change from one layout to the other."""


def normalized(placement: Placement, ndim: int) -> Placement:
    """Return the placement with its dim counted from the front, of `ndim` dims."""
    if isinstance(placement, Shard):
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < ndim:
            raise NoTransfer(f"{placement} does not fit a tensor with {ndim} dims")
        return Shard(dim)
    return placement


def step(source: Placement, wanted: Placement) -> Step:
    """Return the movement from `source` to `wanted`; dims are compared as written."""
    match source, wanted:
        case Replicate(), Replicate():
            return Step()  # nothing to move
        case Replicate(), Shard():
            return Step("slice", wanted.dim)
        case Shard(), Replicate():
            return Step("all_gather", source.dim)
        case Shard(), Shard() if source.dim == wanted.dim:
            return Step()
        case Shard(), Shard():
            return Step("all_to_all", wanted.dim, source.dim)
        case Partial(), Replicate() if source.reduce_op == "sum":
            return Step("all_reduce")
        case Partial(), Shard() if source.reduce_op == "sum":
            return Step("reduce_scatter", wanted.dim)
        case Partial(), Partial() if source.reduce_op == wanted.reduce_op == "sum":
            return Step()  # reduced later
    raise NoTransfer(f"an activation that is {source} cannot be made {wanted}")


def gradient_layout(placement: Placement) -> Placement:
    """Return the layout of a local tensor's gradient."""
    return placement if isinstance(placement, Shard) else Replicate()  # of a partial sum: full


def transfer(source: Placement, wanted: Placement, gradient: Placement | None = None) -> Transfer:
    """Return both steps of a change of layout.

    Args:
        source: Layout before.
        wanted: Layout after.
        gradient: Layout of the incoming gradient on the wanted side; by default `gradient_layout(wanted)`.

    Raises:
        NoTransfer: There is no such change.
    """
    if gradient is None:
        gradient = gradient_layout(wanted)
    return Transfer(step(source, wanted), step(gradient, gradient_layout(source)))  # backward runs in reverse


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


@dataclass(frozen=True)
class PerRank:
    """Placeholder for a count divided by the number of ranks."""


@dataclass(frozen=True)
class StyleSpec:
    """A style's decision for one module.

    Attributes:
        compute: The forward that replaces the module's: a subclass of `runtime.forwards.Forward`, or the name of one of
            ours (see `runtime.install`); `"hooks"` runs the module's own forward between hooks, `"foreign"` runs the
            style's own `_apply`.
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

    compute: str | type[Any] = "hooks"
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

    def exchanges(self) -> Iterator[tuple[str, str, Step, int]]:
        """Yield what the forward sends beside its flows: place, pass, step, and elements for each token."""
        yield from ()

    def notes(self, tp_size: int) -> Iterator[str]:
        """Yield lines for `explain` beside parameters and collectives."""
        yield from ()

    def flows(self) -> Iterator[tuple[str, Redistribution]]:
        """Yield all flows with a name: the argument's, or `-> i` for output i."""
        yield from self.inputs
        for index, flow in enumerate(self.outputs):
            if flow is not None:
                yield ("->" if len(self.outputs) == 1 else f"-> {index}"), flow
