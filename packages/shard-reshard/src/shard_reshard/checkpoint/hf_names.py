"""Names and shapes of transformers 5: experts are stacked in its models, and one tensor each in the hub's files.

transformers lists its conversions by model type, as operations on tensors. Here they run on `Sketch`es, which record
where each element of a file ends up in the model; the result is a ``key_map`` of `Part`s, and no tensor is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shard_reshard._shared.problems import refusal
from shard_reshard.layout.shard_map import Index
from shard_reshard.state_dict.plan import KeyMap, Part

Shapes = Mapping[str, Index]


def hf_key_map(model: Any, *, saving: bool = False) -> Callable[[Shapes], KeyMap]:
    """Return the ``key_map`` between a transformers model and folders in the hub's names.

    ``load_safetensors(folder, out=model, key_map=hf_key_map(model))`` reads a Mixtral, Qwen3-MoE, OLMoE or DeepSeek
    folder with one tensor an expert into the model's stacked experts, and
    ``save_safetensors(model, folder, key_map=hf_key_map(model, saving=True))`` writes such a folder. The conversions
    are those of the installed transformers for this model.

    Args:
        model: A ``PreTrainedModel``, on meta or sharded: its config and names are read.
        saving: False for ``load_safetensors``, True for ``save_safetensors`` and ``reshard_state_dict`` to hub names.

    Returns:
        A function of the sources' global shapes by name, as ``key_map`` takes it.

    Raises:
        PlanError: ``missing-dependency`` without transformers 5. The function raises ``unsupported-tensor`` for an
            operation that mixes elements, such as an interleaving, and the loader raises it on all ranks.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
    except ImportError as error:
        raise refusal(
            "missing-dependency", "hf_key_map", found=str(error), hint="pip install 'transformers>=5'"
        ) from None
    transforms = list(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model))
    if saving:
        transforms = [each.reverse_transform() for each in transforms[::-1] if not isinstance(each, PrefixChange)]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    names = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    direction = _saved if saving else _loaded
    return lambda shapes: direction(shapes, renamings, converters, names, model.base_model_prefix)


def _loaded(
    shapes: Shapes, renamings: Sequence[Any], converters: Sequence[Any], names: Shapes, prefix: str
) -> dict[str, list[Part]]:
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    by_target: dict[str, dict[str, list[Sketch]]] = {}
    used: dict[str, Any] = {}
    for name in sorted(
        shapes, key=dot_natural_key
    ):  # experts in the order of their numbers, as transformers stacks them
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if target not in names:
            if name in names:  # of a folder in the model's own names
                continue
            target, pattern = rename_source_key(name, [], [], prefix, names)
        if target not in names or (pattern is None and target == name):
            continue
        by_target.setdefault(target, {}).setdefault(pattern or "", []).append(Sketch.of(name, shapes[name]))
        used[target] = next((each for each in converters if pattern in each.source_patterns), None)
    keys: dict[str, list[Part]] = {}
    for target, collected in by_target.items():
        converter = used[target]
        results = {target: collected[""][0]} if converter is None else _run(converter, collected, target, names)
        for name, sketch in results.items():
            for source, part in sketch.as_parts(name):
                keys.setdefault(source, []).append(part)
    return keys


def _saved(
    shapes: Shapes, renamings: Sequence[Any], converters: Sequence[Any], names: Shapes, prefix: str
) -> dict[str, list[Part]]:
    from transformers.core_model_loading import apply_converters, apply_renamings

    keys: dict[str, list[Part]] = {}
    for name, shape in shapes.items():
        target, pattern = apply_converters(name, converters)
        sketch = Sketch.of(name, shape)
        if pattern is None:
            results = {target: sketch}
        else:
            converter = next(each for each in converters if pattern in each.source_patterns)
            results = _run(converter, {pattern: [sketch]}, target, shapes)
        for to, result in results.items():
            keys[name] = [*keys.get(name, ()), *(part for _, part in result.as_parts(apply_renamings(to, renamings)))]
    return keys


def _run(converter: Any, collected: dict[str, list[Sketch]], target: str, names: Shapes) -> dict[str, Sketch]:
    """Run a converter's operations on sketches; return the results by full name."""
    tensors: dict[str, Any] = {p: each if len(each) > 1 else each[0] for p, each in collected.items()}
    stacks = any(type(op).__name__ == "MergeModulelist" for op in converter.operations)
    if stacks:  # a list of one expert is a list
        tensors = dict(collected)
    tensors = {pattern: tensors[pattern] for pattern in converter.source_patterns if pattern in tensors}
    for op in converter.operations:
        kind = type(op).__name__
        if kind == "MergeModulelist" and op.dim == 0:
            _assert_complete(target, tensors)
            tensors = {pattern: stacked(each) for pattern, each in tensors.items()}
        elif kind == "Concatenate" and op.num_shards_attribute is None:
            listed = [each for value in tensors.values() for each in (value if isinstance(value, list) else [value])]
            tensors = {converter.target_patterns[0]: concatenated(listed, op.dim)}
        elif kind == "Chunk" and op.num_shards_attribute is None:
            (sketch,) = tensors.values()
            tensors = dict(
                zip(converter.target_patterns, sketch.chunks(len(converter.target_patterns), op.dim), strict=True)
            )
        elif kind == "SplitModulelist" and op.dim == 0:
            if len(tensors) == 1:
                tensors = dict(zip(converter.target_patterns, tensors.values(), strict=True))
            tensors = {
                pattern.replace("*", str(at)): each
                for pattern, sketch in tensors.items()
                for at, each in enumerate(sketch.unstacked())
            }
        elif kind == "Transpose" and len(tensors) == 1:
            (sketch,) = tensors.values()
            same = op.check_dims and sketch.shape == names.get(target)
            if same and sketch.shape[op.dim0] == sketch.shape[op.dim1]:
                raise refusal(
                    "unsupported-tensor",
                    target,
                    found=f"{sketch.shape} is the shape before and after dims {op.dim0} and {op.dim1} are exchanged",
                    hint="name it in a key_map by hand, with Part(..., dims=) if it is transposed",
                )
            tensors = {converter.target_patterns[0]: sketch if same else sketch.transposed(op.dim0, op.dim1)}
        else:
            raise refusal(
                "unsupported-tensor",
                target,
                found=f"transformers converts it by {op!r}",
                hint="load the folder with transformers and save it in the model's names, or write key_map by hand",
            )
    if len(tensors) == 1 and len(converter.target_patterns) == 1 and "*" not in converter.target_patterns[0]:
        tensors = {converter.target_patterns[0]: next(iter(tensors.values()))}
    # A pattern stands in place of the first target pattern in the full name.
    before, matched, after = target.partition(converter.target_patterns[0])
    if not matched:
        raise refusal("unsupported-tensor", target, found=f"not named by {converter.target_patterns[0]!r}")
    return {before + pattern + after: sketch for pattern, sketch in tensors.items()}


def _assert_complete(target: str, stacks: Mapping[str, Sequence[Sketch]]) -> None:
    """Refuse a stack whose names do not count from 0: without expert 5 all later ones would move up by one."""
    for sketches in stacks.values():
        sources = [sketch.pieces[0].source for sketch in sketches]
        numbers = zip(*(map(int, re.findall(r"\d+", source)) for source in sources), strict=False)
        if list(range(len(sources))) not in map(list, numbers):
            raise refusal(
                "missing-tensor",
                target,
                found=f"stacked from {len(sources)} tensors, {sources[0]} to {sources[-1]}, "
                "which are not counted from 0",
                hint="pass all experts, or renumber those that are left",
            )


@dataclass(frozen=True)
class Piece:
    """A window of a source at its place in a sketched tensor.

    Attributes:
        source: Name of the source.
        dims: For each dim of the tensor the source's dim; None for a new one.
        start: First index in the tensor.
        window: Dim, first index and size of the window in the source; None for all of it.
        unstack: Index in the source's first dim, which the tensor lacks.
    """

    source: str
    dims: tuple[int | None, ...]
    start: Index
    window: tuple[int, int, int] | None = None
    unstack: int | None = None


@dataclass(frozen=True)
class Sketch:
    """A tensor's shape, and the sources of its elements."""

    shape: Index
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, name: str, shape: Index) -> Sketch:
        """Return the sketch of a source."""
        return cls(tuple(shape), (Piece(name, tuple(range(len(shape))), (0,) * len(shape)),))

    def transposed(self, first: int, second: int) -> Sketch:
        """Exchange two dims."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]

        def turned(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[dim] for dim in order)

        pieces = [replace(entry, dims=turned(entry.dims), start=turned(entry.start)) for entry in self.pieces]
        return Sketch(turned(self.shape), tuple(pieces))

    def chunks(self, count: int, dim: int) -> list[Sketch]:
        """Cut a source into equal parts along a dim."""
        (entry,), dim = self.pieces, dim % len(self.shape)
        step, sketches = -(-self.shape[dim] // count), []
        for low in range(0, self.shape[dim], step):
            size = min(step, self.shape[dim] - low)
            cut = replace(entry, window=(_known(entry.dims[dim]), low, size))
            sketches.append(Sketch((*self.shape[:dim], size, *self.shape[dim + 1 :]), (cut,)))
        return sketches

    def unstacked(self) -> list[Sketch]:
        """Cut a source into the tensors that were stacked."""
        (entry,) = self.pieces
        alone = replace(entry, dims=entry.dims[1:], start=entry.start[1:])
        return [Sketch(self.shape[1:], (replace(alone, unstack=at),)) for at in range(self.shape[0])]

    def as_parts(self, target: str) -> list[tuple[str, Part]]:
        """Return each source with its part of ``target``."""
        return [(entry.source, _as_part(entry, target)) for entry in self.pieces]


def _as_part(entry: Piece, target: str) -> Part:
    stacked = entry.dims[:1] == (None,)
    dims = [_known(dim) for dim in entry.dims[1 if stacked else 0 :]]
    starts = entry.start[1 if stacked else 0 :]
    cut: dict[int, tuple[int, int, int | None]] = {
        dim: (start, 0, None) for dim, start in zip(dims, starts, strict=True) if start
    }
    if entry.window is not None:
        dim, low, size = entry.window
        cut[dim] = cut.get(dim, (0, 0, None))[0], low, size
    if len(cut) > 1 or (entry.unstack is not None and dims != sorted(dims)):
        raise refusal(
            "unsupported-tensor",
            target,
            found=f"{entry.source} is cut along two dims",
            hint="load the folder with transformers and save it in the model's names",
        )
    at, window = next(iter(cut.items()), (0, (0, 0, None)))
    turned, stack = tuple(dims) if dims != sorted(dims) else None, entry.start[0] if stacked else None
    return Part(target, window[0], at, window[1], window[2], None, stack, turned, entry.unstack)


def _known(dim: int | None) -> int:
    assert dim is not None, "only the first dim of a stack is new"
    return dim


def stacked(sketches: Sequence[Sketch]) -> Sketch:
    """Stack tensors along a new first dim."""
    pieces = [
        replace(entry, dims=(None, *entry.dims), start=(at, *entry.start))
        for at, sketch in enumerate(sketches)
        for entry in sketch.pieces
    ]
    return Sketch((len(sketches), *sketches[0].shape), tuple(pieces))


def concatenated(sketches: Sequence[Sketch], dim: int) -> Sketch:
    """Join tensors along a dim."""
    dim %= len(sketches[0].shape)
    end, pieces = 0, list[Piece]()
    for sketch in sketches:
        for entry in sketch.pieces:
            start = (*entry.start[:dim], entry.start[dim] + end, *entry.start[dim + 1 :])
            pieces.append(replace(entry, start=start))
        end += sketch.shape[dim]
    shape = sketches[0].shape
    return Sketch((*shape[:dim], end, *shape[dim + 1 :]), tuple(pieces))
