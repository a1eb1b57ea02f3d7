"""Placements: the layout of one dim along one mesh axis.

A layout computes with these seven classes, so values and plans work without importing ``torch.distributed.tensor``
(1 to 3 seconds): `ReplicateSpec`, `PartialSpec` and `ShardSpec` become torch's ``Replicate``, ``Partial`` and ``Shard``
on request. `UnevenShard`, `BlockShard`, `InterleavedShard` and `StageShard` have no public name in torch.

A sharding placement applies to this rank's intervals after the axes before it; the result is a list of intervals
``(offset, size)`` of those, in the order of the local tensor. ``str`` of a placement is the text form of
`parse_placement`.

The short text form of placements and layouts is for example ``"dp:S(0), tp:R"``:

==========================  ==========================================================
``R``                       replicate
``S(0)``                    shard dim 0
``P(sum)``, ``P``           partial, to be summed
``U(0, [3, 2, 3])``         uneven shard of dim 0
``B(0, 128)``               blocks of 128 of dim 0; ``B(0, 128, cyclic)`` distributes them in turn
``I(0, [4096, 1024])``      interleaved sections of these sizes; ``I(0, 2)`` two equal sections
``... @ pp:1``              along pp in full at coordinate 1 (the second stage), nothing at the others
``...; order=tp>dp``        if several axes shard one dim: tp first, then dp
==========================  ==========================================================

One placement for each axis is accepted without axis names: ``"S(0), R"``.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from shard_spec._shared.problems import PlanError, Problem, raise_problems

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_TORCH_NAMES = ("Partial", "Placement", "Replicate", "Shard")

# More intervals of one dim on a rank than this are an error: untrusted plans must not take unbounded time.
MAX_INTERVALS = 1 << 20
MAX_SECTIONS = 1 << 16

REDUCE_OPS = ("sum", "avg", "min", "max", "product")

Interval = tuple[int, int]


def chunk(length: int, count: int, index: int) -> Interval:
    """Interval ``index`` of ``torch.chunk``: all but the last have length ``ceil(length / count)``, some are empty."""
    step = -(-length // count)  # rounded up
    start = min(index * step, length)
    return start, min(step, length - start)


@dataclass(frozen=True)
class ReplicateSpec:
    """Every rank along the axis holds the same values."""

    dim = None

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class PartialSpec:
    """The ranks along the axis hold summands (or other operands of ``op``) of one value."""

    op: str
    dim = None

    def __str__(self) -> str:
        return f"P({self.op})"


REPLICATE = ReplicateSpec()


class CuttingPlacement(ABC):
    """A placement that shards ``dim``.

    Attributes:
        dim: The tensor dimension.
        is_chunked: True if the shards are torch's even chunks in rank order (``Shard(dim)``): readers of a layout find
            a rank's interval by division, and need not list it.
    """

    dim: int
    is_chunked: ClassVar[bool] = False

    @abstractmethod
    def cut(self, length: int, count: int, index: int) -> list[Interval]:
        """Return rank ``index``'s intervals of ``length`` indices over ``count`` ranks, without empty ones."""

    def parts(self, length: int, count: int) -> list[int]:
        """Return the local length of each rank along the axis."""
        return [sum(size for _, size in self.cut(length, count, index)) for index in range(count)]

    def lengths(self, length: int, count: int) -> set[int]:
        """Return the distinct local lengths along the axis."""
        return set(self.parts(length, count))

    def misfit(self, length: int) -> str:
        """Return the reason that it cannot shard ``length`` indices, or ``""``."""
        return ""

    def from_front(self, ndim: int) -> Self:
        """Return the same placement with a dim from 0 to ``ndim - 1``."""
        return self if 0 <= self.dim < ndim else replace(self, dim=self.dim % ndim)  # type: ignore[type-var]  # subclasses are dataclasses


@dataclass(frozen=True)
class ShardSpec(CuttingPlacement):
    """Shard like ``torch.chunk``: shards have length ``ceil(length / count)`` until the dim is used up.

    The shard that ends the dim may be shorter and those behind it are empty: 5 over 4 ranks are 2, 2, 1 and 0.
    """

    dim: int
    is_chunked: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"S({self.dim})"

    def cut(self, length: int, count: int, index: int) -> list[Interval]:
        start, size = chunk(length, count, index)
        return [(start, size)] if size else []

    def lengths(self, length: int, count: int) -> set[int]:
        """See `CuttingPlacement.lengths`; from three ranks: the first, the last non-empty one, and the last."""
        step = max(-(-length // count), 1)  # length 0: no division by 0
        return {chunk(length, count, at)[1] for at in (0, min(length // step, count - 1), count - 1)}


@dataclass(frozen=True)
class UnevenShard(CuttingPlacement):
    """Shard ``dim`` into given sizes: rank ``i`` along the axis gets ``sizes[i]`` indices.

    Args:
        dim: Tensor dimension; negative ones count from the end.
        sizes: One size for each rank along the axis, 0 allowed. They have to add up to the length to shard.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _whole_numbers("UnevenShard", "sizes", self.sizes, least=0))
        _check_dim("UnevenShard", self.dim)

    def __str__(self) -> str:
        return f"U({self.dim},{_numbers(self.sizes)})"

    def misfit(self, length: int) -> str:
        """See `CuttingPlacement.misfit`."""
        return _missing("sizes", self.sizes, length)

    def cut(self, length: int, count: int, index: int) -> list[Interval]:
        return [(sum(self.sizes[:index]), self.sizes[index])] if self.sizes[index] else []


@dataclass(frozen=True)
class BlockShard(CuttingPlacement):
    """Shard ``dim`` only at multiples of ``block``: heads, quantization groups and other units stay together.

    The blocks (the last may be short) are distributed like rows in ``torch.chunk``: rank 0 along the axis gets the
    first ``ceil(num_blocks / axis_size)`` blocks, and so on. With ``cyclic`` they are distributed in turn: rank ``i``
    gets blocks ``i``, ``i + axis_size``, ...

    Args:
        dim: Tensor dimension; negative ones count from the end.
        block: Length of a block, at least 1.
        cyclic: Distribute the blocks in turn.
    """

    dim: int
    block: int
    cyclic: bool = False

    def __post_init__(self) -> None:
        _check_dim("BlockShard", self.dim)
        (block,) = _whole_numbers("BlockShard", "block", (self.block,), least=1)
        vars(self).update(
            block=block,
            cyclic=bool(self.cyclic),
        )

    def __str__(self) -> str:
        return f"B({self.dim},{self.block},cyclic)" if self.cyclic else f"B({self.dim},{self.block})"

    def misfit(self, length: int) -> str:
        """See `CuttingPlacement.misfit`."""
        too_many = self.cyclic and length > self.block * MAX_INTERVALS
        return f"more than {MAX_INTERVALS} blocks of {self.block}" if too_many else ""

    def cut(self, length: int, count: int, index: int) -> list[Interval]:
        num_blocks = -(-length // self.block)  # the last may be short
        if self.cyclic:
            starts = (at * self.block for at in range(index, num_blocks, count))
            return [(start, min(self.block, length - start)) for start in starts]
        first, taken = chunk(num_blocks, count, index)
        start = first * self.block
        return [(start, min(taken * self.block, length - start))] if taken else []


@dataclass(frozen=True)
class InterleavedShard(CuttingPlacement):
    """Shard each section of ``dim`` by itself; rank ``i`` gets its shard of every section.

    This is the tensor-parallel layout of a fused weight (q, k and v, or gate and up, in one tensor). The local tensor
    holds the shards in the order of the sections.

    Args:
        dim: Tensor dimension; negative ones count from the end.
        sections: The sizes of the sections, which have to add up to the length to shard; or the number of sections,
            split like ``torch.chunk`` (DTensor's strided shard).
    """

    dim: int
    sections: int | tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dim("InterleavedShard", self.dim)
        if isinstance(self.sections, int):
            _whole_numbers("InterleavedShard", "sections", (self.sections,), least=1)
        else:
            numbers = _whole_numbers("InterleavedShard", "sections", self.sections, least=0)
            object.__setattr__(self, "sections", numbers)

    def __str__(self) -> str:
        numbers = self.sections if isinstance(self.sections, int) else _numbers(self.sections)
        return f"I({self.dim},{numbers})"

    def misfit(self, length: int) -> str:
        """See `CuttingPlacement.misfit`."""
        if isinstance(self.sections, int):
            return f"more than {MAX_SECTIONS} sections" if self.sections > MAX_SECTIONS else ""
        return _missing("sections", self.sections, length)

    def section_intervals(self, length: int) -> list[Interval]:
        """Return the sections of ``length`` indices: of the given sizes, or of ``torch.chunk`` into that many."""
        if isinstance(self.sections, int):
            return [chunk(length, self.sections, at) for at in range(self.sections)]
        return list(zip(accumulate(self.sections, initial=0), self.sections, strict=False))  # the sum starts none

    def cut(self, length: int, count: int, index: int) -> list[Interval]:
        parts = ((start, *chunk(size, count, index)) for start, size in self.section_intervals(length))
        return [(start + offset, size) for start, offset, size in parts if size]


@dataclass(frozen=True)
class StageShard(CuttingPlacement):
    """The tensor lies in full at one coordinate of the axis, and the other ranks hold none of it.

    This is the layout of a layer along an axis of pipeline stages. Text: ``"tp:S(0) @ pp:1"``, the second stage.

    Args:
        stage: The coordinate, from 0.
        dim: The tensor dimension of which the other ranks hold an empty part.
    """

    stage: int
    dim: int = 0

    def __post_init__(self) -> None:
        _check_dim("StageShard", self.dim)
        _whole_numbers("StageShard", "stage", (self.stage,), least=0)

    def __str__(self) -> str:
        return f"@{self.stage}"

    def cut(self, length: int, count: int, index: int) -> list[Interval]:
        return [(0, length)] if index == self.stage and length else []


SpecialShard: TypeAlias = UnevenShard | BlockShard | InterleavedShard | StageShard
AnyShard: TypeAlias = ShardSpec | SpecialShard
PlacementSpec: TypeAlias = ReplicateSpec | PartialSpec | AnyShard
PlacementLike: TypeAlias = "Placement | PlacementSpec | str"


def _numbers(values: Sequence[int]) -> str:
    return "[" + ",".join(map(str, values)) + "]"


def _missing(what: str, values: Sequence[int], length: int) -> str:
    total = sum(values)
    return "" if total == length else f"{what} {list(values)} add up to {total}, there are {length} to share out"


def _check_dim(owner: str, dim: object) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise PlanError(Problem("invalid-layout", owner, found=repr(dim), hint="a dim is an integer"))


def _whole_numbers(owner: str, argument: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    numbers: tuple[Any, ...] = tuple(values)
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int) or each < least for each in numbers):
        raise PlanError(
            Problem(
                "invalid-layout",
                owner,
                found=f"{argument}={values!r}",
                hint=f"one or more integers of at least {least}",
            )
        )
    return numbers


def placement_spec(placement: object) -> PlacementSpec:
    """Return the spec of a placement object, ours or torch's; `parse_placement` reads one from text."""
    if isinstance(placement, ReplicateSpec | PartialSpec | CuttingPlacement):
        return placement  # type: ignore[return-value]  # the union is closed
    types: Any = sys.modules.get("torch.distributed.tensor.placement_types")
    if types is not None:  # else no object can be torch's placement
        if isinstance(placement, types.Replicate):
            return REPLICATE
        if isinstance(placement, types.Partial):
            if type(placement) is not types.Partial or placement.reduce_op not in REDUCE_OPS:
                raise PlanError(
                    Problem(
                        "invalid-argument",
                        found=repr(placement),
                        hint=f"a plain Partial of one of {', '.join(REDUCE_OPS)}",
                    )
                )
            return PartialSpec(placement.reduce_op)
        if isinstance(placement, types.Shard):
            return ShardSpec(placement.dim)
        from shard_spec._torch_compat import strided_shard_factor  # imports torch, as an object of torch has done

        factor = strided_shard_factor(placement)  # _StridedShard is private
        if factor is not None:  # a strided shard
            return InterleavedShard(placement.dim, factor)  # type: ignore[attr-defined]  # a _StridedShard has a dim
    raise PlanError(
        Problem(
            "wrong-type",
            found=f"{placement!r} of type {type(placement).__qualname__}",
            hint="use Replicate(), Shard(dim), Partial(op), UnevenShard, BlockShard, InterleavedShard or their text",
        )
    )


def to_placement(spec: PlacementSpec) -> Placement | SpecialShard:
    """Return the placement object of a spec; imports ``torch.distributed.tensor`` for torch's own."""
    if isinstance(spec, SpecialShard):
        return spec
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    if isinstance(spec, ShardSpec):
        return Shard(spec.dim)
    return Partial(spec.op) if isinstance(spec, PartialSpec) else Replicate()


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        import torch.distributed.tensor.placement_types as types

        return getattr(types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_MAX_TEXT = 1_000_000
_PLACEMENT = re.compile(r"([A-Z]|@\d{1,9})\s*(?:\((.*)\))?", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_.\-]*)\s*:\s*(.+)", re.DOTALL)
_STAGES = re.compile(r"(?:^|\s)@\s+")
_HINT = "write for example 'dp:S(0), tp:R'; placements are R, P(sum), S(0), U(0,[3,5]), B(0,128), I(0,[4,2,2])"


def parse_placement(text: str) -> PlacementSpec:
    """Parse one placement."""
    match = _PLACEMENT.fullmatch(text.strip()) if len(text) <= _MAX_TEXT else None
    kind = match[1] if match else ""
    arguments = split_items(match[2] or "") if match else []
    try:
        if kind == "R" and not arguments:
            return REPLICATE
        if kind.startswith("@") and not arguments:
            return StageShard(int(kind[1:]))
        if kind == "P" and len(arguments) <= 1:
            op = arguments[0] if arguments else "sum"
            if op in REDUCE_OPS:
                return PartialSpec(op)
        elif kind == "S" and len(arguments) == 1:
            return ShardSpec(_integer(arguments[0]))
        elif kind == "U" and len(arguments) == 2:
            return UnevenShard(_integer(arguments[0]), _integers(arguments[1]))
        elif kind == "B" and len(arguments) in (2, 3):
            if len(arguments) == 2 or arguments[2] == "cyclic":
                return BlockShard(_integer(arguments[0]), _integer(arguments[1]), len(arguments) == 3)
        elif kind == "I" and len(arguments) == 2:
            listed = arguments[1].startswith(("[", "("))  # sizes, or a number of sections
            return InterleavedShard(
                _integer(arguments[0]), _integers(arguments[1]) if listed else _integer(arguments[1])
            )
    except ValueError as error:  # not an integer
        if isinstance(error, PlanError):
            raise
    raise PlanError(Problem("invalid-layout", found=repr(text[:200]), hint=_HINT))


def parse_layout(text: str, axis_names: Sequence[str]) -> tuple[dict[str, PlacementSpec], tuple[str, ...]]:
    """Parse a layout: the spec of each named axis, and the order of axes."""
    if len(text) > _MAX_TEXT:
        raise PlanError(Problem("invalid-layout", found=f"a text of {len(text)} characters", hint=_HINT))
    tail = text.partition(";")[2].strip()
    problems: list[Problem] = []
    order: tuple[str, ...] = ()
    if tail:
        key, _, names = map(str.strip, tail.partition("="))
        if key != "order" or not names:
            problems.append(Problem("invalid-layout", found=repr(text), hint="after ';' write order=tp>dp"))
        else:
            order = tuple(name.strip() for name in names.split(">"))
    pairs = layout_items(text)
    nameless = [item for axis, item in pairs if not axis]
    named = [(axis, item) for axis, item in pairs if axis]
    if nameless and any(not item.startswith("@") for _, item in named):
        problems += [Problem("invalid-layout", found=f"{item!r} in {text!r}", hint=_HINT) for item in nameless]
    elif nameless:  # one placement for each other axis, in mesh order
        axis_names = [axis for axis in axis_names if axis not in dict(named)]
        if len(nameless) != len(axis_names):
            problems.append(
                Problem(
                    "argument-count",
                    found=f"{text!r}: {len(nameless)} placements for the axes {', '.join(axis_names)}",
                    hint="one for each axis, or name the axes",
                )
            )
        named = [*zip(axis_names, nameless, strict=False), *named]  # too few or many: already a problem
    specs: dict[str, PlacementSpec] = {}
    for axis, item in named:
        if axis in specs:
            problems.append(Problem("duplicate-name", axis=axis, found=repr(text), hint="name each axis once"))
            continue
        try:
            specs[axis] = parse_placement(item)
        except PlanError as error:
            problems.extend(error.problems)
    raise_problems(problems)
    return specs, order


def layout_items(text: str) -> list[tuple[str, str]]:
    """Split the text of a layout into axis names, ``""`` where there is none, and placements; without the order."""
    body, *stages = _STAGES.split(text.partition(";")[0])
    matches = [(_NAMED.fullmatch(item), item) for item in split_items(body.strip()) if item]
    pairs = [(match[1], match[2]) if match else ("", item) for match, item in matches]
    for item in (item for each in stages for item in split_items(each)):
        axis, _, stage = item.partition(":")
        pairs.append((axis.strip(), f"@{stage.strip()}"))
    return pairs


def split_items(text: str) -> list[str]:
    """Split at the commas outside of parentheses and brackets."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif letter == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    items.append(text[start:].strip())
    return items if any(items) else []


def _integer(text: str) -> int:
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", text):  # 18 digits fit in int64
        raise ValueError(text)
    return int(text)


def _integers(text: str) -> tuple[int, ...]:
    text = text.strip()
    if text[:1] not in ("[", "(") or text[-1:] not in ("]", ")"):
        raise ValueError(text)
    return tuple(_integer(item) for item in text[1:-1].split(",") if item.strip())
