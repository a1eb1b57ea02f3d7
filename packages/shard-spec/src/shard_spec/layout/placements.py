"""Placements: torch's own, and three that torch has no public name for.

``Shard``, ``Replicate`` and ``Partial`` are torch's classes, never copies. Reaching for them imports
``torch.distributed.tensor``, which takes a second or more; text such as ``"dp:S(0), tp:R"`` says the same without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.intervals import REDUCE_OPS, REPLICATE, PlacementSpec

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_TORCH_NAMES = ("Partial", "Placement", "Replicate", "Shard")


@dataclass(frozen=True)
class UnevenShard:
    """Cut ``dim`` into shards of stated sizes: rank ``i`` along the axis gets ``sizes[i]`` indices.

    Args:
        dim: Tensor dimension; negative ones count from the end.
        sizes: One size for each rank along the axis, 0 allowed. They have to add up to what is there to share out.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _whole_numbers("UnevenShard", "sizes", self.sizes, least=0))
        _check_dim("UnevenShard", self.dim)


@dataclass(frozen=True)
class BlockShard:
    """Cut ``dim`` only at multiples of ``block``: heads, quantization groups and other units stay whole.

    The blocks (the last may be short) are shared out as ``torch.chunk`` shares out rows: rank 0 along the axis gets
    the first ``ceil(num_blocks / axis_size)`` blocks, and so on. With ``cyclic`` they are dealt like cards instead:
    rank ``i`` gets blocks ``i``, ``i + axis_size``, ...

    Args:
        dim: Tensor dimension; negative ones count from the end.
        block: Length of a block, at least 1.
        cyclic: Deal the blocks out in turn.
    """

    dim: int
    block: int
    cyclic: bool = False

    def __post_init__(self) -> None:
        _check_dim("BlockShard", self.dim)
        (block,) = _whole_numbers("BlockShard", "block", (self.block,), least=1)
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "cyclic", bool(self.cyclic))


@dataclass(frozen=True)
class InterleavedShard:
    """Cut each section of ``dim`` on its own and give rank ``i`` its shard of every section.

    This is how a fused weight (q, k and v, or gate and up, in one tensor) lies on tensor-parallel ranks. The local
    tensor holds the shards in the order of the sections.

    Args:
        dim: Tensor dimension; negative ones count from the end.
        sections: The sizes of the sections, which have to add up to what is there to cut; or how many sections there
            are, which are then cut as ``torch.chunk`` does (what DTensor calls a strided shard).
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


PlacementLike: TypeAlias = "Placement | UnevenShard | BlockShard | InterleavedShard | PlacementSpec | str"


def _check_dim(owner: str, dim: object) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise PlanError(Problem("invalid-layout", owner, found=repr(dim), hint="a dim is an integer"))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_numbers(owner: str, argument: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    numbers = tuple(values)
    wrong = [value for value in numbers if not _is_whole(value) or value < least]
    if wrong or not numbers:
        hint = f"one or more integers of at least {least}"
        raise PlanError(Problem("invalid-layout", owner, found=f"{argument}={values!r}", hint=hint))
    return numbers


def placement_spec(placement: object) -> PlacementSpec:
    """Return the spec of a placement object; `text.to_placement_spec` takes text as well.

    Raises:
        PlanError: ``wrong-type`` for what is no placement, ``invalid-argument`` for a partial of an unknown op.
    """
    if isinstance(placement, PlacementSpec):
        return placement
    if isinstance(placement, UnevenShard):
        return PlacementSpec("U", placement.dim, placement.sizes)
    if isinstance(placement, BlockShard):
        return PlacementSpec("B", placement.dim, (placement.block, placement.cyclic))
    if isinstance(placement, InterleavedShard):
        return PlacementSpec("I", placement.dim, placement.sections)
    return _torch_spec(placement)


def _torch_spec(placement: object) -> PlacementSpec:
    types: Any = sys.modules.get("torch.distributed.tensor.placement_types")
    if types is not None:  # an object cannot be torch's placement as long as nobody imported the class
        if isinstance(placement, types.Replicate):
            return REPLICATE
        if isinstance(placement, types.Partial):
            if type(placement) is not types.Partial or placement.reduce_op not in REDUCE_OPS:
                hint = f"a plain Partial of one of {', '.join(REDUCE_OPS)}"
                raise PlanError(Problem("invalid-argument", found=repr(placement), hint=hint))
            return PlacementSpec("P", None, placement.reduce_op)
        if isinstance(placement, types.Shard):
            return PlacementSpec("S", placement.dim)
        factor = _torch_compat.strided_shard_factor(placement)
        if factor is not None:
            return PlacementSpec("I", placement.dim, factor)  # type: ignore[attr-defined]  # a _StridedShard has a dim
    found = f"{placement!r} of type {type(placement).__qualname__}"
    hint = "use Replicate(), Shard(dim), Partial(op), UnevenShard, BlockShard, InterleavedShard or their text"
    raise PlanError(Problem("wrong-type", found=found, hint=hint))


def to_placement(spec: PlacementSpec) -> Placement | UnevenShard | BlockShard | InterleavedShard:
    """The placement object of a spec; imports ``torch.distributed.tensor`` for torch's own."""
    kind, dim, arg = spec
    if kind in "UBI":
        assert dim is not None
        if kind == "U":
            assert isinstance(arg, tuple)
            return UnevenShard(dim, arg)
        if kind == "B":
            assert isinstance(arg, tuple)
            return BlockShard(dim, *arg)
        assert isinstance(arg, int | tuple)
        return InterleavedShard(dim, arg)
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    if kind == "S":
        assert dim is not None
        return Shard(dim)
    return Replicate() if kind == "R" else Partial(str(arg))


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        import torch.distributed.tensor.placement_types as types

        return getattr(types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
