"""Inputs of a checked call: comparison between ranks, declared shards, copies; constants for random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tp_styles._shared.copying import Copier
from tp_styles._shared.dtensor import as_dtensor
from tp_styles._shared.execution_check import Precision, is_random, relative_error
from tp_styles._torch_compat import group_of, local_of, tree_map
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.parameters import agreed_values
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.runtime.votes import before_collective
from tp_styles.values import normalized

# Of the largest value: kernels may round in another order on each rank.
TOLERANCE = 1e-3

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, slice)
SHARED = (nn.Module, DeviceMesh, dist.ProcessGroup)
FSDP = "torch.distributed.fsdp", "torch.distributed._composable"
# Levels of containers and objects that are opened. A cache holds layers, and these hold tensors.
DEPTH = 6

# True if a module trains, and whether gradients are recorded.
Mode = tuple[bool, bool]


class NotReady(Exception):
    """This call cannot be repeated; a later one may."""


@dataclass(frozen=True)
class Place:
    """Place of a tensor among arguments or outputs. `.name` is of mappings and objects, `[index]` of sequences."""

    path: str
    depth: int

    @property
    def is_state(self) -> bool:
        """True for a key-value cache, passed from call to call. Ranks hold other heads of it."""
        named = "." in self.path and not any(word in self.path for word in ("past", "cache"))
        return self.depth >= 2 and not named


def tensors_in(value: Any, path: str = "", depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[Place, Any]]:
    """Yield tensors within an argument or an output, in mappings, sequences, dataclasses and plain objects."""
    seen = set() if seen is None else seen  # one set for the full walk
    if isinstance(value, torch.Tensor):
        yield Place(path, depth), value
    elif not (isinstance(value, (*PLAIN, *SHARED)) or callable(value) or depth >= DEPTH or id(value) in seen):
        if type(value).__module__.startswith(FSDP):  # its state stands on each unit, and no run of a check changes it
            return
        seen.add(id(value))  # objects may contain themselves
        for key, item in _entries(value):
            yield from tensors_in(item, path + key, depth + 1, seen)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", value[key]) for key in value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))
    else:
        yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())


@dataclass
class Leaf:
    """One tensor among the arguments.

    Attributes:
        value: The tensor as passed.
        place: Its place.
        layout: The declaration of a style on the module; `Replicate()` without one; None for a DTensor.
        is_equal: It has the same values on all ranks.
        shapes: Its shape on each rank.
        agreed: The first rank's values, if all ranks have the same metadata.
    """

    value: torch.Tensor
    place: Place
    layout: Placement | None
    is_equal: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()
    agreed: torch.Tensor | None = None

    @property
    def takes_noise(self) -> bool:
        """True for floats of one value: they hide norms, softmax and order in the results."""
        value = self.value
        plain = value.is_floating_point() and self.layout == Replicate() and "mask" not in self.place.path
        return plain and value.numel() > 1 and bool((value == value.flatten()[0]).all())


class Inputs:
    """The arguments of a call, compared between the ranks; every rank makes one.

    Args:
        args: Positional arguments.
        kwargs: Arguments by name.
        axis: The ranks.
        mode: Mode of the module; it has to be the same on all ranks.
        declared: Argument name -> layout declared by a style.
        names: Names of positional arguments.
        inner_dims: Dims of sharded activations by declaration of styles further inside; if there is one, floats with
            different values on the ranks are shards on it.

    Raises:
        NotReady: The arguments hold a filled cache.
        StyleInputError: Ranks are in different modes; on every rank.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axis: TPGroup,
        mode: Mode,
        declared: Mapping[str, Placement],
        names: tuple[str, ...],
        *,
        inner_dims: tuple[int, ...] = (),
    ) -> None:
        self.axis, self.args, self.kwargs = axis, args, kwargs
        self.leaves: list[Leaf] = []
        named = {names[i] if i < len(names) else f"args[{i}]": value for i, value in enumerate(args)} | kwargs
        seen: set[int] = set()
        for name, argument in named.items():
            for place, value in tensors_in(argument, name):
                if id(value) not in seen:  # once, however often it is passed
                    seen.add(id(value))
                    wanted = declared.get(place.path)
                    layout: Placement | None = Replicate()
                    if isinstance(value, DTensor):
                        layout = None
                    elif wanted is not None:
                        layout = normalized(wanted, value.dim())
                    self.leaves.append(Leaf(value, place, layout))
        self._compare(mode)
        for leaf in self.differ if len(inner_dims) == 1 else ():
            rank = leaf.value.dim()
            if leaf.value.is_floating_point() and -rank <= inner_dims[0] < rank:
                leaf.layout = Shard(inner_dims[0] % rank)

    def _compare(self, mode: Mode) -> None:
        mine = [(tuple(leaf.value.shape), str(leaf.value.dtype), type(leaf.value).__name__) for leaf in self.leaves]
        everyone = self.axis.all_gather_objects((mode, mine), "the check")
        if len({other for other, _ in everyone}) > 1:
            modes = ", ".join(
                f"rank {rank}: training={mode[0]}, gradients={mode[1]}" for rank, (mode, _) in enumerate(everyone)
            )
            raise StyleInputError(
                Problem(
                    "ranks-disagree",
                    "mode",
                    found=modes,
                    hint="call train(), eval() and no_grad() alike on all ranks of a tensor-parallel group",
                )
            )
        if len({len(other) for _, other in everyone}) > 1:  # no comparison by position
            raise NotReady("ranks pass another number of tensors")
        equal = []
        for index, leaf in enumerate(self.leaves):
            kinds = [other[index] for _, other in everyone]
            leaf.shapes = tuple(shape for shape, _, _ in kinds)
            same = len(set(kinds)) == 1
            if same and not isinstance(leaf.value, DTensor):  # same metadata: all ranks broadcast
                leaf.agreed = agreed_values(leaf.value.detach(), self.axis, 0)
                same = is_close(leaf.value.detach(), leaf.agreed)
            equal.append(same)
        verdicts = self.axis.all_gather_objects(equal, "the check")  # one verdict on all ranks
        for index, leaf in enumerate(self.leaves):
            leaf.is_equal = all(verdict[index] for verdict in verdicts)
        for leaf in self.differ:
            if leaf.place.is_state:
                raise NotReady(f"a cache among its arguments is filled ({leaf.place.path})")

    @property
    def differ(self) -> list[Leaf]:
        """Return tensors with different values on the ranks, not declared as shards."""
        return [leaf for leaf in self.leaves if not leaf.is_equal and not isinstance(leaf.layout, Shard | None)]

    @property
    def has_shards(self) -> bool:
        """True if some tensors are shards."""
        return any(isinstance(leaf.layout, Shard) for leaf in self.leaves)

    @property
    def has_noise(self) -> bool:
        """True if copies hold noise in place of constants."""
        return any(leaf.takes_noise for leaf in self.leaves)

    @property
    def is_constant(self) -> bool:
        """True if all inputs are ids of one value: nothing depends on their order."""
        values = [leaf.value for leaf in self.leaves if leaf.value.numel() > 1 and not isinstance(leaf.value, DTensor)]
        return bool(values) and all(not x.is_floating_point() and bool((x == x.flatten()[0]).all()) for x in values)

    def detach(self) -> None:
        """Take copies of all arguments: the forward may write to them before they are used.

        Values that are equal but for rounding become those of the first rank.
        """
        for leaf in self.leaves:
            value = leaf.value.detach()
            if isinstance(value, DTensor):
                leaf.agreed = as_dtensor(
                    local_of(value).clone(), value.device_mesh, value.placements, value.shape, value.stride()
                )
            elif isinstance(leaf.layout, Shard) or leaf.agreed is None or not leaf.is_equal:
                leaf.agreed = value.clone()
            leaf.agreed.requires_grad_(leaf.value.requires_grad)
        self.args, self.kwargs = self._with([leaf.agreed for leaf in self.leaves])
        for leaf in self.leaves:
            assert leaf.agreed is not None
            leaf.value = leaf.agreed

    def copies(self, dtype: torch.dtype | None, *, full: bool, noise: bool) -> Copies:
        """Return copies of detached arguments: this rank's own, or the global ones."""
        leaves: list[torch.Tensor] = []
        for leaf in self.leaves:
            with torch.no_grad():
                value = self._value(leaf, full=full)
                if noise and leaf.takes_noise:
                    value = varied(value) * (value.flatten()[0].abs() or 1.0)
                if dtype is not None and value.is_floating_point():
                    value = value.to(dtype)
            leaves.append(value.detach().requires_grad_(leaf.value.requires_grad))
        # Clones: a forward may write to its input, and autograd protects leaves.
        args, kwargs = self._with([leaf.clone() if leaf.requires_grad else leaf for leaf in leaves])
        return Copies(args, kwargs, leaves, [leaf.layout for leaf in self.leaves])

    def _with(self, values: list[torch.Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of all arguments with other tensors; modules and functions in them are shared."""
        replaced: dict[int, Any] = {id(leaf.value): value for leaf, value in zip(self.leaves, values, strict=True)}
        result: tuple[Any, Any] = Copier(replaced, shared=SHARED).copy((self.args, self.kwargs))
        return result

    def _value(self, leaf: Leaf, *, full: bool) -> torch.Tensor:
        value = leaf.value.detach()
        if isinstance(value, DTensor):
            if full:
                return value.full_tensor().clone()
            local = local_of(value).clone()  # no gradient, no shared memory
            return as_dtensor(local, value.device_mesh, value.placements, value.shape, value.stride())
        if not full or not isinstance(leaf.layout, Shard):
            return value.clone()
        return self.axis.all_gather(value, leaf.layout.dim, [shape[leaf.layout.dim] for shape in leaf.shapes])


@dataclass
class Copies:
    """Arguments of one run, with their leaves and layouts."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor]
    layouts: list[Placement | None]


def is_close(item: torch.Tensor, other: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """True if two tensors of one shape have equal values up to rounding."""
    if not (item.is_floating_point() or item.is_complex()):
        return torch.equal(item, other)  # ids and masks have no rounding
    return relative_error(item, other, norm=float("inf")) <= tolerance


def varied(like: torch.Tensor, phase: float = 0.0) -> torch.Tensor:
    """Return numbers without a pattern, equal on every rank. Drawn ones would be constants here."""
    place = torch.arange(like.shape.numel(), dtype=torch.float64, device="cpu")  # on the CPU: equal for all devices
    return torch.sin(place * place * 0.618 + place * 0.37 + 1.0 + phase).view(like.shape).to(like.device, like.dtype)


CONSTANTS = {"bernoulli": 1.0, "rand": 0.5, "uniform": 0.5, "normal": 0.0, "randn": 0.0, "exponential": 1.0}


class ConstantRandomness(Precision):
    """Mode with constants as results of operations tagged as random; dropout keeps every element.

    A mode instead of `.eval()`: the check compares the computation of training.

    Attributes:
        has_drawn: An operation would have drawn.
    """

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operation's result, or a constant of its shape."""
        kwargs = kwargs or {}
        if (group := group_of(func, args)) is not None:
            before_collective(group, _call_text(func, args))
        if not is_random(func, args, kwargs):
            result = func(*args, **kwargs)
            self.note(func, args, result)
            return result
        self.has_drawn = True
        name = func._schema.name.partition("::")[2]
        if name == "native_dropout":  # the output and its mask
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "rrelu_with_noise":
            x, noise = args[:2]
            slope = sum(args[2:4] or (1 / 8, 1 / 3)) / 2
            noise.copy_(torch.where(x <= 0, slope, 1.0))  # backward multiplies by it
            return x * noise
        args, kwargs, has_rate = _without_rate(func, args, kwargs)
        if has_rate:
            return func(*args, **kwargs)  # without dropout it draws nothing
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices  # distinct indices
        drawn = func(*args, **kwargs)
        if name.startswith("randperm"):
            return drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
        value = 0.0 if name.startswith(("randint", "random")) else CONSTANTS.get(name.strip("_").split("_")[0], 1.0)
        return tree_map(lambda x: x.fill_(value) if isinstance(x, torch.Tensor) else x, drawn)


def _call_text(func: Any, args: tuple[Any, ...]) -> str:
    """Return a collective's name, and size and type of its first tensor: equal on all ranks, but for all-to-alls."""
    name, first = func._schema.name.partition("::")[2], args[0]
    while isinstance(first, list | tuple) and first:
        first = first[0]
    is_uneven = name.replace("_", "").startswith("alltoall")
    return name if is_uneven or not isinstance(first, torch.Tensor) else f"{name} of {first.numel()} {first.dtype}"


def _without_rate(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Return the arguments with dropout switched off, and True if there is such an argument."""
    args, kwargs, has_rate = list(args), dict(kwargs), False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            has_rate = True
            if place < len(args):
                args[place] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    return args, kwargs, has_rate
