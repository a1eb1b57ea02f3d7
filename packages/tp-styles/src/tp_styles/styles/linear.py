"""Shard linear layers and embeddings: by output features, by input features, by sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.styles.base import ParallelStyle
from tp_styles.values import ModuleInfo, NoTransfer, ParameterSpec, Redistribution, Section, Split, StyleSpec


@dataclass(frozen=True)
class LinearShape:
    """Sizes of a linear layer and dims of its weight (transposed in GPT-2's `Conv1D`)."""

    in_features: int
    out_features: int
    in_dim: int = 1
    out_dim: int = 0


def is_conv1d(kind: type[nn.Module]) -> bool:
    """True for transformers' `Conv1D`, a linear layer with a transposed weight."""
    # By name: transformers need not be installed.
    return any(base.__name__ == "Conv1D" and base.__module__.startswith("transformers.") for base in kind.__mro__)


def linear_shape(info: ModuleInfo) -> LinearShape | None:
    """Return the layer's global sizes, None for other modules."""
    if issubclass(info.kind, nn.Linear):
        in_features, out_features = info.size("in_features"), info.size("out_features")
        assert isinstance(in_features, int)
        assert isinstance(out_features, int)
        return LinearShape(in_features, out_features)
    weight = info.parameter("weight")
    if is_conv1d(info.kind) and weight is not None:
        in_features, out_features = weight.shape
        return LinearShape(in_features, out_features, in_dim=0, out_dim=1)  # transposed
    return None


def linear_problems(
    info: ModuleInfo, shape: LinearShape, known: tuple[str, ...] = ("weight", "bias")
) -> Iterator[Problem]:
    """Yield reasons not to shard this linear layer."""
    weight = info.parameter("weight")
    expected = [0, 0]
    expected[shape.in_dim], expected[shape.out_dim] = shape.in_features, shape.out_features
    if weight is None or list(weight.shape) != expected:
        yield Problem(
            "shape-mismatch",
            info.where("weight"),
            found="no weight" if weight is None else f"a weight of shape {weight.shape}",
            hint=f"its features need {tuple(expected)}",
        )
    others = [p.name for p in info.parameters if p.name not in known]
    if others:
        yield Problem(
            "unknown-name",
            info.where(),
            found=", ".join(others),
            hint="a linear layer's style handles weight and bias; write a style with spec() for this class",
        )


def embedding_problems(info: ModuleInfo, *, by_rows: bool) -> Iterator[Problem]:
    """Yield reasons not to shard this embedding."""
    if info.size("max_norm") is not None:
        yield Problem(
            "unsupported-option",
            info.where(),
            found=f"max_norm={info.size('max_norm')}",
            hint="renormalising in place needs full rows that are equal on every rank; set max_norm=None",
        )
    if info.size("sparse"):
        yield Problem("sparse-gradient", info.where(), found="sparse=True", hint="use dense gradients: sparse=False")
    if by_rows and info.size("scale_grad_by_freq"):
        yield Problem(
            "unsupported-option",
            info.where(),
            found="scale_grad_by_freq=True",
            hint="a rank that holds some of the rows cannot count the others; use ColwiseParallel",
        )


def wrong_kind(info: ModuleInfo, hint: str) -> Problem:
    """Return the problem of a style on an unsupported kind of module, as `RowwiseParallel` on an nn.Conv2d."""
    return Problem("module-kind", info.where(), found=info.kind.__name__, hint=hint)


# Hint of `wrong_kind`, for the name of a style of linear layers.
_NOT_LINEAR = (
    "{} is for nn.Linear and nn.Embedding; name the layers inside, use a style for this class, or leave it out of the"
    " plan"
)


def single(placement: Placement | tuple[Placement, ...] | None, default: Placement, argument: str) -> Placement:
    """Return the single placement of an argument.

    Raises:
        StyleTypeError: It holds something else, `input_layouts=(Shard(0),)` with two of them for example.
    """
    if placement is None:
        return default
    if isinstance(placement, tuple) and len(placement) == 1:
        placement = placement[0]
    if not isinstance(placement, Placement):
        raise StyleTypeError(
            Problem("wrong-type", argument, found=repr(placement), hint="pass one placement, for example Shard(1)")
        )
    return placement


def specs(splits: Sequence[tuple[str, Split]]) -> tuple[tuple[str, ParameterSpec], ...]:
    """Return parameter specs by name; gradients of copied shards are summed."""
    copied = {name: any(section.copies > 1 for section in split.sections) for name, split in splits}
    return tuple((name, ParameterSpec(split, sum_gradient=copied[name])) for name, split in splits)


def flow_problems(info: ModuleInfo, flows: Iterable[tuple[str, Redistribution]]) -> Iterator[Problem]:
    """Yield flows without a possible transfer, as problems."""
    for name, flow in flows:
        try:
            # With this many dims `Shard(-1)` differs from a dim counted from the front.
            transfer = flow.transfer(PROBE_DIMS)
        except NoTransfer as error:
            yield Problem(
                "invalid-argument", info.where(name), found=str(error), hint="ask for Replicate() or Shard(dim)"
            )
            continue
        steps = (transfer.forward, transfer.backward)
        if (
            flow.split is not None
            and not flow.split.is_single  # they shard contiguous rows
            and any(step.op in ("reduce_scatter", "all_to_all") for step in steps)
        ):
            yield Problem(
                "invalid-sections",
                info.where(name),
                found=f"{flow.src} to {flow.dst} of a last dim {flow.split}",
                hint="a last dim in sections stays a shard of them, or is gathered: Shard(-1) or Replicate()",
            )


PROBE_DIMS = 8


class ColwiseParallel(ParallelStyle):
    """Shard the output features of an `nn.Linear` (or `nn.Embedding`) over the ranks.

    `legacy.ColwiseParallel` takes the prepare functions of torch 2.0. `src_data_rank` is set by `parallelize_module`.

    Args:
        input_layouts: Layout of the input if it is a plain tensor; default `Replicate()`.
        output_layouts: Layout of the output; default `Shard(-1)`.
        use_local_output: Return a plain tensor (default). Given explicitly, it allows shards to leave the model.

    Raises:
        StyleTypeError: A layout is not a placement (also a `TypeError`).
    """

    takes_functions = False

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
        use_local_output: bool | None = None,
    ) -> None:
        self.input_layouts = (single(input_layouts, Replicate(), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Shard(-1), "output_layouts"),)
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output is not False
        self.declares_output = output_layouts is not None or use_local_output is not None

    def features_split(self, info: ModuleInfo, features: int, tp_size: int) -> tuple[Split, list[Problem]]:
        """Return the split of the output features along dim 0, and reasons against it."""
        return Split.along(0, features), []

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return a spec with sharded output features; see `ParallelStyle.spec`."""
        shape = linear_shape(info)
        if shape is not None:
            split, problems = self.features_split(info, shape.out_features, tp_size)
            parameters = [("weight", replace(split, dim=shape.out_dim))]
            # Dory's head has a scale for each output feature beside its weight, which is sharded as the bias.
            shapes = [] if info.kind.forward is nn.Linear.forward else [(shape.out_features,)]
            vectors = [p.name for p in info.parameters if p.name == "bias" or p.shape in shapes]
            parameters += [(name, split) for name in vectors]
            problems += linear_problems(info, shape, ("weight", *vectors))
            width = shape.in_features
            compute = "column-linear" if info.kind.forward is nn.Linear.forward else "module"  # not if overridden
            attributes = (("nf", split),) if is_conv1d(info.kind) else ()  # Conv1D's forward views its output as nf
        elif issubclass(info.kind, nn.Embedding):
            split, problems = self.features_split(info, int(info.size("embedding_dim") or 0), tp_size)
            parameters = [("weight", replace(split, dim=1))]
            problems += embedding_problems(info, by_rows=False)
            width, compute, attributes = 0, "module", ()
        else:
            return StyleSpec(problems=(wrong_kind(info, _NOT_LINEAR.format(type(self).__name__)),))
        # A weight shard gives a partial gradient of the input; an embedding's ids (width 0) have none.
        enter = Redistribution(self.input_layouts[0], Replicate(), gradient=Partial() if width else None, width=width)
        leave = Redistribution(Shard(-1), self.output_layouts[0], split=split, width=split.global_size)
        return StyleSpec(
            compute=compute,
            parameters=specs(parameters),
            inputs=((info.arguments[0], enter),),
            outputs=(leave,),
            local_output=self.use_local_output,
            attributes=attributes,
            problems=(*problems, *flow_problems(info, [("output_layouts", leave), ("input_layouts", enter)])),
        )


class RowwiseParallel(ParallelStyle):
    """Shard the input features of an `nn.Linear` over the ranks; sum the partial outputs.

    On an `nn.Embedding` each rank looks up the ids of its rows, and the lookups are summed. `legacy.RowwiseParallel`
    takes the prepare functions of torch 2.0.

    Args:
        input_layouts: Layout of the input if it is a plain tensor; default `Shard(-1)`, on an embedding `Replicate()`
            (ids have no feature dim to be sharded on).
        output_layouts: Layout of the output; default `Replicate()`.
        use_local_output: Return a plain tensor.
        sum_gradient: The output of a linear layer is used on shards (Mamba's B and C on each rank's channels): each
            rank has a partial gradient of it, and these are summed.

    Raises:
        StyleTypeError: A layout is not a placement (also a `TypeError`).
    """

    takes_functions = False

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
        use_local_output: bool = True,
        sum_gradient: bool = False,
    ) -> None:
        self.input_layouts = (single(input_layouts, Shard(-1), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Replicate(), "output_layouts"),)
        self.use_local_output = use_local_output
        self.sum_gradient = sum_gradient
        self._input_given = input_layouts is not None

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return a spec with sharded input features; see `ParallelStyle.spec`."""
        shape = linear_shape(info)
        if shape is not None:
            return self._linear(info, shape)
        if issubclass(info.kind, nn.Embedding):
            return self._embedding(info)
        return StyleSpec(problems=(wrong_kind(info, _NOT_LINEAR.format(type(self).__name__)),))

    def _linear(self, info: ModuleInfo, shape: LinearShape) -> StyleSpec:
        problems = tuple(linear_problems(info, shape))
        output = self.output_layouts[0]
        parameters = [("weight", ParameterSpec(Split.along(shape.in_dim, shape.in_features)))]
        if info.parameter("bias") is not None:
            # On a sharded output each rank has only its shard's contribution to the bias gradient.
            sharded = not isinstance(output, Replicate)
            parameters.append(("bias", ParameterSpec(Split.replicated(), sum_gradient=sharded)))
        columns = Split.along(0, shape.in_features)  # of the input's last dim
        plain = info.kind.forward is nn.Linear.forward  # else its own forward, without the bias
        return StyleSpec(
            compute="row-linear" if plain else "module-row-linear",
            parameters=tuple(parameters),
            inputs=(
                (
                    info.arguments[0],
                    Redistribution(self.input_layouts[0], Shard(-1), split=columns, width=shape.in_features),
                ),
            ),
            outputs=(
                Redistribution(
                    Partial(),
                    output,
                    gradient=Partial() if self.sum_gradient else None,
                    split=Split.along(0, shape.out_features),
                    width=shape.out_features,
                ),
            ),
            local_output=self.use_local_output,
            problems=problems,
        )

    def _embedding(self, info: ModuleInfo) -> StyleSpec:
        rows, features = int(info.size("num_embeddings") or 0), int(info.size("embedding_dim") or 0)
        problems = [*embedding_problems(info, by_rows=True)]
        parameters = (("weight", ParameterSpec(Split.along(0, rows))),)
        source = self.input_layouts[0] if self._input_given else Replicate()
        if source in (Shard(-1), Partial()) or isinstance(source, Partial):  # ids have no feature dim
            problems.append(
                Problem(
                    "sharded-input",
                    info.where("input_layouts"),
                    found=repr(source),
                    hint="every rank looks up all ids: leave input_layouts out, or name the dim that they are split on",
                )
            )
            source = Replicate()
        plain = info.kind.forward is nn.Embedding.forward
        # An overridden forward gets full lookups and returns a full output.
        produced = Partial() if plain else Replicate()
        columns = Split.along(0, features) if features else None
        output = Redistribution(produced, self.output_layouts[0], split=columns, width=features)
        return StyleSpec(
            compute="row-embedding" if plain else "module-row-embedding",
            parameters=parameters,
            inputs=((info.arguments[0], Redistribution(source, Replicate())),),
            outputs=(output,),
            local_output=self.use_local_output,
            problems=tuple(problems),
        )

    def _arguments(self) -> dict[str, object]:
        return {
            **({"input_layouts": self.input_layouts[0]} if self._input_given else {}),
            "output_layouts": self.output_layouts[0],
            "use_local_output": self.use_local_output,
            **({"sum_gradient": True} if self.sum_gradient else {}),
        }


class FusedColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a weight of several consecutive sections: q, k, v or gate, up.

    Each section is sharded on its own: `chunk` or `split` of the local output gives this rank's shard of each.
    The weight is no plain shard and is never labelled as one: it is a local parameter with `_sharding_info`.

    Args:
        sections: Sizes of the sections in rows, or how many equal ones there are.
        unit: Indivisible rows (the size of a head); one number, or one for each section.
        copies: How many neighbouring ranks hold each shard (few key-value heads over many ranks); one number, or one
            for each section. Their gradients are summed.
        input_layouts: As `ColwiseParallel`.
        output_layouts: `Shard(-1)`, or `Replicate()` for the full output in its usual order.
        use_local_output: Must stay True for a sharded output: a DTensor cannot express sections.

    Raises:
        StyleTypeError: Sections, units or copies are not positive numbers.
    """

    def __init__(
        self,
        sections: int | Sequence[int] = 2,
        *,
        unit: int | Sequence[int] = 1,
        copies: int | Sequence[int] = 1,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
        use_local_output: bool | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.sections = sections if isinstance(sections, int) else tuple(sections)  # as given, for the repr
        self.unit = unit if isinstance(unit, int) else tuple(unit)
        self.copies = copies if isinstance(copies, int) else tuple(copies)
        numbers = self.sections, self.unit, self.copies
        if not all(
            size_or_sizes > 0 if isinstance(size_or_sizes, int) else size_or_sizes and min(size_or_sizes) > 0
            for size_or_sizes in numbers
        ):
            raise StyleTypeError(
                Problem(
                    "invalid-sections",
                    type(self).__name__,
                    found=f"{sections!r}, unit={unit!r}, copies={copies!r}",
                    hint="positive numbers",
                )
            )

    def features_split(self, info: ModuleInfo, features: int, tp_size: int) -> tuple[Split, list[Problem]]:
        """Split each section separately; return reasons against it too."""
        sizes = (features // n,) * n if isinstance(n := self.sections, int) else n
        units = (self.unit,) * len(sizes) if isinstance(self.unit, int) else self.unit
        copies = (self.copies,) * len(sizes) if isinstance(self.copies, int) else self.copies
        where = ""
        if sum(sizes) != features or len(units) != len(sizes) or len(copies) != len(sizes):
            where, reason = "sections", f"{self.sections} (units {self.unit}) for {features} output features"
            hint = "sections add up to the output features, and there is one unit, or one for each"
        elif bad := [pair for pair in zip(sizes, units, strict=True) if pair[0] % pair[1]]:
            where, reason = "unit", ", ".join(f"{size} rows by {unit}" for size, unit in bad)
            hint = "a section must hold full units"
        elif unfit := [count for count in copies if tp_size % count]:
            where, reason = "copies", f"{unfit} copies over {tp_size} ranks"
            hint = "the number of copies divides the tp size"
        if where:
            return Split.along(0, features), [Problem("invalid-sections", info.where(where), found=reason, hint=hint)]
        problems = []
        if not self.use_local_output and (len(sizes) > 1 or max(copies) > 1):
            problems.append(
                Problem(
                    "invalid-argument",
                    info.where("use_local_output"),
                    found="False",
                    hint="a DTensor cannot express sections of its last dim; leave it True",
                )
            )
        sections = tuple(Section(*each) for each in zip(sizes, units, copies, strict=True))
        return Split(0, sections), problems
