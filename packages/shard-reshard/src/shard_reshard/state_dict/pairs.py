"""Quantised weights with their scales: which casts are refused, layouts of scales, and the arithmetic of blocks.

A block is a box of a weight whose elements share one scale: DeepSeek's are 128 x 128, a per-channel scale's one row.
The value of an element is ``quantised * scale``, in every format here; ``weight_scale_inv`` is a factor too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import sub
from typing import NamedTuple, Protocol

import torch
from shard_spec import Box

from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard.layout.boxes import LocalTensor, PieceShardMap
from shard_reshard.layout.shard_map import (
    FLOAT8,
    Index,
    Piece,
    ShardMap,
    by_key,
    dtype_name,
    loses_values,
    torch_dtype,
)

Block = tuple[int | None, ...]  # for each dim of a weight; None: all of the dim


@dataclass(frozen=True)
class Pair:
    """A quantised weight and its scale, which move together.

    ``Pair("*.weight", "*.weight_scale_inv", (128, 128))`` stands for DeepSeek's weights,
    ``Pair("*.weight", "*.weight_scale", (1, None))`` for scales per channel, and
    ``Pair("*_blocks", "*_scales", (1, 1, 1, None))`` for the bytes of GPT-OSS's MXFP4.

    The scale's layout follows from the weight's: a rank gets the scales of all elements that it holds, so that ranks
    whose shards meet in a block both get its scale. Unless ``dequantize`` or ``quantize`` is set, bits do not change.

    Attributes:
        weight: Name of the weight, with one ``*`` for the part that its scale's name shares. Weights without a scale,
            such as those of norms, are moved as any other tensor.
        scale: Name of the scale.
        block: Elements that share a scale, dim by dim; None for all elements of the dim. Fewer entries than dims are
            the last dims', and earlier dims have 1. ``block=None``: one scale for the tensor.
        dequantize: Each receiver multiplies what arrives with its scales, in float32. True: into the dtype of ``out``;
            a dtype where there is no ``out``.
        quantize: Weights without a scale become quantised on each receiver, if ``out`` has a quantised weight and a
            scale. A scale is ``max(abs(block)) / largest number of the dtype``, and 1 for a block of zeros.
    """

    weight: str
    scale: str
    block: Block | None = None
    dequantize: bool | torch.dtype = False
    quantize: bool = False

    def __post_init__(self) -> None:
        if (self.weight.count("*"), self.scale.count("*")) not in ((0, 0), (1, 1)):
            raise refusal(
                "invalid-argument",
                "pairs",
                found=f"{self.weight!r}, {self.scale!r}",
                hint="both names have one '*' at the same part, or none",
            )
        if self.block is not None and any(size is not None and size < 1 for size in self.block):
            raise refusal(
                "invalid-argument",
                "pairs",
                found=f"block={self.block}",
                hint="sizes of a block are 1 or more, or None for all of a dim",
            )
        if self.dequantize and self.quantize:
            raise refusal(
                "conflicting-arguments",
                "pairs",
                found=repr(self),
                hint="a weight is quantised or dequantised: pass two pairs for two sets of weights",
            )
        if isinstance(self.dequantize, torch.dtype) and dtype_name(self.dequantize) not in _PLAIN_FLOATS:
            raise refusal(
                "unsupported-dtype",
                "pairs",
                found=f"{self.dequantize}",
                hint="dequantize to float32, float16, bfloat16 or float64",
            )

    def scale_of(self, name: str) -> str | None:
        """Return the scale's name of the weight ``name``; None for a name that is no weight of this pair."""
        before, star, after = self.weight.partition("*")
        if not star:
            return self.scale if name == self.weight else None
        if not (name.startswith(before) and name.endswith(after) and len(name) >= len(before) + len(after)):
            return None
        return self.scale.replace("*", name[len(before) : len(name) - len(after)])

    def scale_for(self, source: str, target: str) -> str | None:
        """Return the scale's name for the destination ``target`` of the weight ``source``.

        A name of another form, as the ``experts.up`` of ``experts.0.up.weight``, takes the scale's ending.
        """
        own = self.scale_of(source) or ""
        return self.scale_of(target) or (target + own.removeprefix(source) if own.startswith(source) else None)

    def block_of(self, shape: Index) -> Block:
        """Return the size of a block in each dim of a weight of ``shape``."""
        block: Block = (None,) * len(shape) if self.block is None else self.block
        if len(block) > len(shape):
            raise refusal(
                "shape-mismatch",
                self.weight,
                found=f"block={self.block} for a weight of {shape}",
                hint="a block has at most the weight's dims",
            )
        return (1,) * (len(shape) - len(block)) + tuple(block)


_PLAIN_FLOATS = ("float32", "bfloat16", "float16", "float64")


def as_pairs(pairs: Pair | Iterable[Pair]) -> tuple[Pair, ...]:
    """Return pairs as a tuple; one pair may be passed as itself."""
    listed = (pairs,) if isinstance(pairs, Pair) else tuple(pairs)
    for pair in listed:
        if not isinstance(pair, Pair):
            hint = "pass Pair(weight, scale, block), or a list of them"  # type: ignore[unreachable]  # callers are untyped
            raise refusal("wrong-type", "pairs", found=f"{pair!r:.100}", hint=hint)
    return listed


# ---- casts -----------------------------------------------------------------------------------------------------

QUANTISED = FLOAT8 | {"int8", "uint8", "int32"}  # int32 holds packed numbers of 4 bits
_SCALE = re.compile(r"scale|absmax|scb$|quant_state", re.IGNORECASE)
_ZERO_POINT = re.compile(r"zeros?(_?points?)?$", re.IGNORECASE)
_PACKED = re.compile(r"(_blocks|_packed)$")
_COUNTS = re.compile(r"mask|index|position|count|length|ids?$|steps?$", re.IGNORECASE)  # integers that have no scale
_FACTOR = re.compile(f"{_SCALE.pattern}|{_ZERO_POINT.pattern}|g_idx$|quant_map$", re.IGNORECASE)
VALUES = "casts='values' casts the numbers as they are"


class TensorDtype(Protocol):
    """Metadata of a tensor with the name of its dtype."""

    @property
    def dtype(self) -> str: ...


class Scales:
    """Names that look like scales, by module; with ``all_factors`` also zero points and tables of a format.

    A format keeps more than scales beside a weight: zero points, a permutation of columns (GPTQ's ``g_idx``), a table
    of values (bitsandbytes' ``quant_map``). Without any of these the numbers of the weight have another value.
    """

    def __init__(self, names: Iterable[str], all_factors: bool = False) -> None:
        parts = [(name, *name.rpartition(".")[::2]) for name in names]
        pattern = _FACTOR if all_factors else _SCALE
        scales = [(module, name) for name, module, leaf in parts if pattern.search(leaf)]
        outer = [(module.rpartition(".")[0], name) for module, name in scales if "." in module]
        self._by_module, self._by_outer = by_key(scales), by_key(outer)

    def beside(self, name: str) -> list[str]:
        """Return the scales beside a tensor.

        For ``up.weight`` these are ``up.weight.absmax``; else ``up.weight_scale`` and ``up.weight_quantizer._scale``;
        else any scale of the module, as ``up.scale_weight``: formats name their scales in many ways.
        """
        module, _, leaf = name.rpartition(".")
        stem = f"{module}." * bool(module) + _PACKED.sub("", leaf)
        own = [other for other in self._by_module.get(module, ()) if other != name]
        named = [other for other in (*own, *self._by_outer.get(module, ())) if other.startswith(stem)]
        return list(self._by_module.get(name, ())) or named or own


def apart_problems(
    dtypes: Mapping[str, str], moved: Collection[str], left: Collection[str], found: str, hint: str
) -> list[Problem]:
    """Return the problems of quantised tensors and their scales of which one is ``moved`` and the other ``left``.

    ``dtypes`` are those of all tensors of one side by name. The numbers of a checkpoint under the scales of a model, or
    the other way round, are values of neither. A mask of integers beside a ``scale`` is no quantised weight, as its
    name says.
    """
    quantised = [name for name, dtype in dtypes.items() if dtype in QUANTISED] if left else []
    beside, problems = Scales(dtypes if quantised else (), all_factors=True), list[Problem]()
    for name in quantised:
        leaf = name.rpartition(".")[2]
        is_weight = dtypes[name] in FLOAT8 or not _COUNTS.search(leaf)
        for scale in beside.beside(name):
            is_scale = (is_weight and not _FACTOR.search(leaf)) or scale.startswith(name)
            if is_scale and ((name in moved and scale in left) or (scale in moved and name in left)):
                first, second = (name, scale) if name in moved else (scale, name)
                problems.append(
                    Problem("missing-tensor", first, found=f"moved without {second}, {found}", hint=hint % second)
                )
    return problems


def weight_beside(scale: str, dtypes: Mapping[str, TensorDtype]) -> str | None:
    """Return the quantised tensor whose scale the name ``scale`` is: ``up.weight`` for ``up.weight_scale_inv``."""
    module, _, leaf = scale.rpartition(".")
    if (match := _SCALE.search(leaf)) is None:
        return None
    stem = f"{module}." * bool(module) + leaf[: match.start()].rstrip("_")
    names = (stem, f"{stem}_blocks", f"{stem}_packed", module, f"{stem}weight")
    return next((name for name in names if name in dtypes and dtypes[name].dtype in QUANTISED), None)


def cast_problem(name: str, source: str, target: str, scales: Scales, out: str) -> Problem | None:
    """Return the problem of a cast of ``name`` to the dtype of the destination ``out``, or None."""
    if source == target:
        return None
    reason = f"{source} to {target}"
    near = scales.beside(name) if source in QUANTISED else []
    near = near or (scales.beside(out) if QUANTISED & {source, target} else [])
    if near:
        act = "dequantize=True" if source in QUANTISED else "quantize=True"
        return Problem(
            "dtype-mismatch",
            name,
            found=f"{reason} without the scale {near[0]}",
            hint=f"pass pairs=Pair({name!r}, {near[0]!r}, block, {act}); {VALUES}",
        )
    if loses_values(source, target):
        return Problem(
            "dtype-mismatch",
            name,
            found=f"{reason}, which loses most values",
            hint=f"quantise with a scale: pairs=Pair({name!r}, scale, block, quantize=True); {VALUES}",
        )
    return None


# ---- layouts of scales -----------------------------------------------------------------------------------------

Axes = tuple[int | None, ...]  # for each dim of a scale the weight's dim; None for a dim of size 1 of its own


class Matched(NamedTuple):
    """The pair of a source weight."""

    pair: Pair
    scale: str  # name of its scale, which may be in no source: then a receiver makes one
    block: Block


class Scaled(NamedTuple):
    """The weight of a destination scale."""

    weight: str
    pair: Pair
    block: Block
    has_scale: bool  # the source has a scale


def matched_pairs(
    sources: Mapping[str, tuple[Index, str]], pairs: Sequence[Pair], problems: list[Problem]
) -> dict[str, Matched]:
    """Return the pair of each source weight that has a scale, or may get one; ``sources`` are shapes and dtypes."""
    matched: dict[str, Matched] = {}
    for pair in pairs:
        used = False
        for name, (shape, dtype) in sources.items():
            scale = pair.scale_of(name)
            if scale is None or scale == name:
                continue
            try:
                if scale in sources:
                    if name in matched:
                        hint = "write patterns that exclude one another"
                        raise refusal("conflicting-arguments", name, found="a weight of two pairs", hint=hint)
                    block = pair.block_of(shape)
                    used = True
                    scale_axes(scale, shape, block, sources[scale][0])
                    matched[name] = Matched(pair, scale, block)
                elif dtype in FLOAT8 or dtype == "int8":
                    used = True
                    problems.append(
                        Problem(
                            "missing-tensor",
                            scale,
                            found=f"{name} of {dtype} alone",
                            hint="pass its scale too, or a Pair with the scale's name",
                        )
                    )
                elif pair.quantize and dtype in _PLAIN_FLOATS and len(shape) >= len(pair.block or ()):
                    used = True
                    matched.setdefault(name, Matched(pair, scale, pair.block_of(shape)))
            except PlanError as error:
                problems += [p.named(name) for p in error.problems]
        if not used:
            hint = "a Pair names weights and scales of the source, as '*.weight' and '*.weight_scale'; or leave it out"
            reason = f"{pair.weight!r} and {pair.scale!r} match no weight with a scale"
            problems.append(Problem("unknown-name", "pairs", found=reason, hint=hint))
    return matched


def zero_point_problems(names: Iterable[str], matched: Mapping[str, Matched]) -> list[Problem]:
    """Return the problems of weights that a `Pair` dequantises although a zero point stands beside them."""
    zeros = by_key((name.rpartition(".")[0], name) for name in names if _ZERO_POINT.search(name))
    beside = {name: (zeros.get(name) or zeros.get(name.rpartition(".")[0]) or [""])[0] for name in matched}
    return [
        Problem(
            "unsupported-tensor",
            name,
            found=f"the zero point {zero}, which a Pair lacks",
            hint="dequantize it with its own library; "
            f"a zero point that is 0 everywhere is left out: key_map={{{zero!r}: None}}",
        )
        for name, zero in beside.items()
        if zero and matched[name].pair.dequantize
    ]


def grid_of(shape: Index, block: Block) -> Index:
    """Return the number of scales along each dim of a weight."""
    return tuple(1 if size is None else -(-length // size) for length, size in zip(shape, block, strict=True))


def axes_by_dims(name: str, shape: Index, block: Block, dims: int) -> Axes:
    """Return the weight's dim for each dim of a scale of ``dims`` dims."""
    grid = grid_of(shape, block)
    for candidate in (grid, tuple(n for n, size in zip(grid, block, strict=True) if size is not None), (1,) * dims):
        if len(candidate) == dims:
            return scale_axes(name, shape, block, candidate)
    return scale_axes(name, shape, block, (0,) * dims)  # raises


def scale_axes(name: str, shape: Index, block: Block, scale: Index) -> Axes:
    """Return the weight's dim for each dim of a scale of shape ``scale``, or raise: it is not of these blocks."""
    grid = grid_of(shape, block)
    split = tuple(dim for dim, size in enumerate(block) if size is not None)
    if scale == grid:
        return tuple(range(len(shape)))
    if scale == tuple(grid[dim] for dim in split):
        return split
    if not split and prod(scale) == 1:
        return (None,) * len(scale)
    raise refusal(
        "shape-mismatch",
        name,
        found=f"a scale of {scale} for a weight of {shape} in blocks of {block}, which have {grid} scales",
        hint="correct block= of the Pair",
    )


def scale_layout(name: str, layout: ShardMap, block: Block, axes: Axes) -> PieceShardMap:
    """Return the layout of a scale: each rank has the scales of the blocks that its part of the weight meets."""
    shape = tuple(1 if axis is None else grid_of((layout.shape[axis],), (block[axis],))[0] for axis in axes)
    return PieceShardMap(shape, _local_tensors(name, layout, block, axes, grown=False))


def grown_layout(name: str, layout: ShardMap, block: Block) -> ShardMap:
    """Return the layout of a weight with every box grown to full blocks, for quantising on the receiver."""
    dims = tuple(range(len(layout.shape)))
    return PieceShardMap(layout.shape, _local_tensors(name, layout, block, dims, grown=True))


def _local_tensors(
    name: str, layout: ShardMap, block: Block, axes: Axes, grown: bool
) -> dict[int, tuple[LocalTensor, ...]]:
    """Return each rank's local tensors, with pieces in blocks; ``grown``: in elements of full blocks."""
    if layout.num_partials > 1:
        raise refusal(
            "partial-value",
            name,
            found=layout.describe(),
            hint="reduce it first: a sum of quantised numbers has other scales",
        )
    by_rank: dict[int, tuple[LocalTensor, ...]] = {}
    for rank in layout.ranks:
        pieces = by_key((part.tensor, part) for part in layout.local_pieces(rank))
        tensors = []
        for number, shape in enumerate(layout.local_shapes(rank)):
            own = pieces.get(number, [])
            dims = [_spans(name, layout, dim, own, shape, block, grown) for dim in range(len(shape))]
            sizes = tuple(1 if axis is None else dims[axis][1] for axis in axes)
            boxes: dict[tuple[Box, Index], None] = {}
            for at in range(len(own) or 1):
                spans = [(0, 1, 0) if axis is None else dims[axis][0][at] for axis in axes]
                box = Box(tuple(start for start, _, _ in spans), tuple(stop - start for start, stop, _ in spans))
                if box.numel:
                    boxes[box, tuple(local for _, _, local in spans)] = None
            tensors.append((sizes, tuple(boxes)))
        by_rank[rank] = tuple(tensors)
    return by_rank


def _spans(
    name: str, layout: ShardMap, dim: int, pieces: Sequence[Piece], local: Index, block: Block, grown: bool
) -> tuple[list[tuple[int, int, int]], int]:
    """Return (start, stop, local start) of each part along a dim, in blocks or grown, and the local size."""
    length, size = layout.shape[dim], block[dim]
    unit = max(length, 1) if size is None else size
    scaled = unit if grown else 1
    if not pieces and grown and any(each is not None for each in block):  # nothing to quantise, and no scale
        return [(0, 0, 0)], 0
    alike = len({(part.start[dim], part.stop[dim]) for part in pieces}) <= 1
    if size is None and (alike or not grown):  # one block: every rank has its scale, also one with an empty shard
        end = length if grown else 1
        return [(0, end, 0)] * (len(pieces) or 1), end
    if alike:
        low = pieces[0].start[dim] // unit if pieces else 0
        high = -(-pieces[0].stop[dim] // unit) if pieces else 0
        low, high = low * scaled, min(high * scaled, length) if grown else high
        return [(low, high, 0)] * (len(pieces) or 1), high - low
    spans = []
    for part in pieces:  # several in one local tensor: sections of a fused weight, blocks dealt out
        start, stop, at = part.start[dim], part.stop[dim], part.local_start[dim]
        ends = stop % unit == 0 or (stop == length and at + stop - start == local[dim])
        if start % unit or at % unit or not ends:
            raise refusal(
                "does-not-divide",
                name,
                dim,
                found=f"{layout.describe()} joins {start}..{stop} of dim {dim} in one local tensor, "
                f"blocks are of {unit}",
                hint="several boxes of a local tensor begin and end at blocks; use another layout for it",
            )
        spans.append((start, stop, at) if grown else (start // unit, -(-stop // unit), at // unit))
    return spans, local[dim] if grown else -(-local[dim] // unit)


def holds(outer: ShardMap, inner: ShardMap) -> bool:
    """Return True if every rank of ``inner`` has in ``outer`` what it has in ``inner``."""
    for rank in inner.ranks:
        for part in inner.pieces(rank):
            met = [cell for cell in outer.cross(part.start, part.stop) if any(rank in ranks for ranks in cell.owners)]
            if sum(prod(map(sub, cell.stop, cell.start)) for cell in met) < prod(map(sub, part.stop, part.start)):
                return False
    return True


# ---- values ----------------------------------------------------------------------------------------------------


class Conversion(NamedTuple):
    """Arithmetic on a receiver after the move of a weight.

    Attributes:
        scale: Name of the destination scale.
        quantize: True to quantise what arrives; False to multiply it with its scale.
        block: Size of a block in each dim of the destination.
        axes: The weight's dim for each dim of the scale.
        layout: Layout of the result.
        dtype: Dtype of the result.
        scale_layout: Layout of the scale.
        scale_dtype: Dtype of the scale.
    """

    scale: str
    quantize: bool
    block: Block
    axes: Axes
    layout: ShardMap
    dtype: str
    scale_layout: ShardMap
    scale_dtype: str

    def apply(self, rank: int, number: int, weight: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the result for local tensor ``number`` of a rank: the weight, and its scale if it was quantised."""
        pieces = [part for part in self.layout.local_pieces(rank) if part.tensor == number]
        shape = self.layout.local_shapes(rank)[number]
        # Position of the first element in its block, where the local tensor is one box; joined boxes begin at blocks.
        alike = [len({(p.start[d], p.stop[d]) for p in pieces}) == 1 for d in range(len(shape))]
        shifts = [pieces[0].start[d] if alike[d] else 0 for d in range(len(shape))]
        shifts = [at if size is None else at % size for at, size in zip(shifts, self.block, strict=True)]
        if not self.quantize:
            assert scale is not None
            # The scale with the weight's dims, of size 1 where all elements share it.
            by_axis = {axis: size for axis, size in zip(self.axes, scale.shape, strict=True) if axis is not None}
            factors = scale.reshape([by_axis.get(dim, 1) for dim in range(weight.ndim)])
            return [_times(weight, factors, self.block, shifts, torch_dtype(self.dtype))]
        dtype, scale_dtype = torch_dtype(self.dtype), torch_dtype(self.scale_dtype)
        scale_shape = self.scale_layout.local_shapes(rank)[number]
        if not pieces and not prod(scale_shape):
            return [weight.new_empty(shape, dtype=dtype), weight.new_empty(scale_shape, dtype=scale_dtype)]
        quantised, grid = quantised_in_blocks(weight, self.block, dtype, scale_dtype)
        for dim, (shift, size) in enumerate(zip(shifts, shape, strict=True)):
            quantised = quantised.narrow(dim, shift, size)
        return [quantised.contiguous(), grid.reshape(scale_shape)]


_ROWS_BYTES = 64 * 2**20  # float32 numbers of a step


def _times(
    weight: torch.Tensor, scale: torch.Tensor, block: Block, shifts: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Multiply a weight with its scales in float32, some rows at a time, and round once."""
    result, factors = torch.empty(weight.shape, dtype=dtype, device=weight.device), scale.float()
    if not weight.numel():
        return result
    for dim in range(1, weight.ndim):
        factors = _spread(factors, dim, weight.shape[dim], block[dim], shifts[dim])
    if not weight.ndim:
        return result.copy_(weight.float() * factors)
    step = max(1, _ROWS_BYTES // 4 // max(1, prod(weight.shape[1:])))
    for low in range(0, weight.shape[0], step):
        rows = slice(low, min(low + step, weight.shape[0]))
        result[rows].copy_(weight[rows].float() * _spread(factors, 0, rows.stop - low, block[0], shifts[0] + low))
    return result


def _spread(scale: torch.Tensor, dim: int, length: int, size: int | None, shift: int) -> torch.Tensor:
    """Return scales of blocks for each of ``length`` elements, the first at ``shift`` of the first block."""
    if size is None:
        return scale
    return scale.index_select(dim, ((torch.arange(length, device=scale.device) + shift) // size))


def quantised_in_blocks(
    weight: torch.Tensor, block: Block, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor of full blocks (the last ones may be shorter). Return it and the scales of its blocks."""
    sizes = [max(1, length if size is None else size) for length, size in zip(weight.shape, block, strict=True)]
    grid = [-(-length // size) for length, size in zip(weight.shape, sizes, strict=True)]
    padded = torch.zeros([n * size for n, size in zip(grid, sizes, strict=True)], device=weight.device)
    padded[tuple(slice(0, length) for length in weight.shape)] = weight.float()
    tiles = padded.view([n for pair in zip(grid, sizes, strict=True) for n in pair])
    inner = tuple(range(1, 2 * weight.ndim, 2))
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = (tiles.abs().amax(inner, keepdim=True) if weight.numel() else tiles.sum(inner, keepdim=True)) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    if scale_dtype is torch.float8_e8m0fnu:  # powers of two; rounded up, nothing exceeds the dtype
        scale = scale.log2().ceil().exp2()
    stored = scale.to(scale_dtype)
    ratio = tiles / stored.float()
    ratio = (ratio if dtype.is_floating_point else ratio.round()).clamp(-largest, largest)
    numbers = ratio.view(padded.shape)[tuple(slice(0, length) for length in weight.shape)].to(dtype)
    return numbers, stored.reshape(grid)


def convertible(name: str, source: str, target: str) -> Problem | None:
    """Return the problem of arithmetic between a quantised dtype and a float, or None."""
    quantised, plain = (target, source) if source in _PLAIN_FLOATS else (source, target)
    if quantised in FLOAT8 - {"float8_e8m0fnu"} | {"int8"} and plain in _PLAIN_FLOATS:
        return None
    return Problem(
        "unsupported-dtype",
        name,
        found=f"{source} to {target} by a Pair",
        hint="float8 and int8 are converted; move packed numbers as bytes, and unpack them with their own library",
    )
