"""Modules around and between column-wise and row-wise layers: replicated ones, blocks, adapters, experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tp_styles.problems import Problem, StyleTypeError
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.linear import ColwiseParallel, FusedColwiseParallel, RowwiseParallel, wrong_kind
from tp_styles.values import (
    ModuleInfo,
    ParameterInfo,
    ParameterSpec,
    PerRank,
    Redistribution,
    Section,
    Split,
    StyleSpec,
)


class NoParallel(ParallelStyle):
    """Replicate a module's parameters (made equal by broadcast) and run its own forward.

    Args:
        sum_gradient: The module is inside a sharded region (a norm of this rank's heads): each rank computes a
            partial gradient of its parameters, and these are summed; dropout draws other numbers on each rank (see
            `tp_rng`). Without it every rank is assumed to compute the full gradient.
    """

    def __init__(self, *, sum_gradient: bool = False) -> None:
        self.sum_gradient = sum_gradient

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return a spec with replicated parameters; see `ParallelStyle.spec`."""
        replicated = ParameterSpec(Split.replicated(), sum_gradient=self.sum_gradient)
        return StyleSpec(
            compute="module",
            parameters=tuple((parameter.name, replicated) for parameter in info.parameters),
            shards_randomness=self.sum_gradient,  # dropout on shards: other draws on each rank
        )


class SequenceParallel(ParallelStyle):
    """Run a position-wise module on this rank's positions, with replicated parameters.

    For `nn.LayerNorm`, RMS norms and dropout. Each rank computes only the gradient of its positions: gradients of the
    replicated parameters are summed over the ranks. Parameters are made equal by broadcast; frozen ones stay frozen.
    (The first styles had another class of this name: `tp_styles.legacy.SequenceParallel`.)

    Args:
        sequence_dim: Dim of the input that is sharded.
        use_local_output: Return a plain tensor; by default a DTensor sharded on that dim.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return replicated parameters with summed gradients; see `ParallelStyle.spec`."""
        if not info.arguments:
            return StyleSpec(
                problems=(
                    Problem(
                        "argument-count", info.where(), found="a forward without arguments", hint="name another module"
                    ),
                )
            )
        flow = Redistribution(self.sequence_sharding[0], self.sequence_sharding[0])  # plain shards do not move
        return StyleSpec(
            compute="module",
            parameters=tuple(
                (parameter.name, ParameterSpec(Split.replicated(), sum_gradient=True)) for parameter in info.parameters
            ),
            inputs=((info.arguments[0], flow),),
            outputs=(flow,),
            local_output=self.use_local_output,
            shards_randomness=True,
        )


class BlockParallel(ParallelStyle):
    """Shard a block's own parameters, buffers and counts, beside the styles of its layers.

    For modules between column-wise and row-wise layers: one decay or sink for each head, slopes of ALiBi, the
    depthwise convolution of Mamba, a scalar gain. The block's forward runs on this rank's shards.

    Args:
        shard: Name of a parameter below the block -> dim along which each rank holds its shard.
        sum_gradient: Names of parameters held in full, or of arguments of the forward equal on all ranks, that are used
            on a rank's shard (rotary positions of its heads): gradients are summed.
        buffers: Name of a buffer outside the state dict (`persistent=False`) -> dim, as `shard`.
        attributes: Names of counts below the block, divided by the number of ranks (`num_heads`,
            `conv.groups`); or name -> value on every rank.
        tp_size: Number of ranks of the plan; by default any.
    """

    def __init__(
        self,
        *,
        shard: Mapping[str, int] | None = None,
        sum_gradient: Sequence[str] = (),
        buffers: Mapping[str, int] | None = None,
        attributes: Mapping[str, int] | Sequence[str] = (),
        tp_size: int | None = None,
    ) -> None:
        self.shard, self.buffers = dict(shard or {}), dict(buffers or {})
        self.sum_gradient = tuple(sum_gradient)
        self.attributes = dict(attributes) if isinstance(attributes, Mapping) else tuple(attributes)
        self.tp_size = tp_size

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        problems = []
        if self.tp_size not in (None, tp_size):  # its counts are for one size
            problems.append(
                Problem(
                    "mesh-mismatch",
                    info.where(),
                    found=f"tp={tp_size}, planned for {self.tp_size}",
                    hint="plan again for this number of ranks",
                )
            )
        parameters, inputs = [], []
        for name in (*self.shard, *self.sum_gradient):
            parameter = info.parameter(name)
            if parameter is None and name in self.sum_gradient and name in info.arguments:
                inputs.append((name, Redistribution(Replicate(), Replicate(), gradient=Partial())))
                continue
            if parameter is None:
                problems.append(Problem("unknown-name", info.where(name), hint="the plan is for another model"))
                continue
            dim = self.shard.get(name)
            split = Split.replicated() if dim is None else Split.along(dim, parameter.shape[dim])
            parameters.append((name, ParameterSpec(split, sum_gradient=dim is None)))
        # Counts are divided when they are set: sizes of modules below are not known here.
        counts = self.attributes if isinstance(self.attributes, dict) else dict.fromkeys(self.attributes, PerRank())
        return StyleSpec(
            compute="module" if parameters else "hooks" if inputs else "none",  # layers have styles of their own
            parameters=tuple(parameters),
            inputs=tuple(inputs),
            buffers=tuple(self.buffers.items()),
            attributes=tuple(counts.items()),
            problems=tuple(problems),
        )


class ColwiseKVReplicated(FusedColwiseParallel):
    """Replicate a column-wise layer; each rank computes only the rows of its heads.

    For key-value projections with fewer heads than ranks, if a plan keeps them replicated. Gradients are summed.
    `GQAParallel(kv_replicate=True)` holds only the rows needed by a rank.

    Args:
        rows: Output features.
        unit: Rows of a head.
        copies: How many neighbouring ranks compute the same head.
    """

    def __init__(self, rows: int, *, unit: int, copies: int) -> None:
        super().__init__((rows,), unit=unit, copies=copies)
        self.rows = rows

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        spec = super().spec(info, tp_size)  # its split gives each rank's rows
        problems = spec.problems
        if spec.compute != "column-linear" and not problems:
            problems = (
                wrong_kind(
                    info, "rows are picked of an nn.Linear; use GQAParallel(kv_replicate=True), or a smaller tp size"
                ),
            )
        replicated = ParameterSpec(Split.replicated(), sum_gradient=True)
        return StyleSpec(
            compute="picked-column-linear",
            parameters=tuple((name, replicated) for name, _ in spec.parameters),
            inputs=spec.inputs,
            outputs=spec.outputs,
            problems=problems,
        )


class LoRAParallel(ParallelStyle):
    """Shard a linear layer together with its low-rank update `B(A(x))` (peft's `lora.Linear`).

    By columns, A is replicated and B is split with the base layer's output; by rows, A is split with its input, the
    small product is summed over the ranks, and B is replicated. The result has the layout of the base layer's.

    Args:
        style: How the base layer is split: `"column"`, `"row"`, or its style (sections, a gathered output, a full
            input of a row-wise layer).
        base: Name of the base layer.
        a: Name of A: a linear layer, or a dict of them.
        b: Name of B, likewise.
        dropout: Name of the dropout before A; by rows it draws other numbers on each rank.
    """

    def __init__(
        self,
        style: Literal["column", "row"] | ColwiseParallel | RowwiseParallel,
        *,
        base: str = "base_layer",
        a: str = "lora_A",
        b: str = "lora_B",
        dropout: str = "lora_dropout",
    ) -> None:
        if style not in ("column", "row") and not isinstance(style, ColwiseParallel | RowwiseParallel):
            raise StyleTypeError(
                Problem(
                    "invalid-argument",
                    "style",
                    found=repr(style),
                    hint='"column", "row", or the base layer\'s ColwiseParallel or RowwiseParallel',
                )
            )
        self.style, self.base, self.a, self.b, self.dropout = style, base, a, b, dropout

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the styles of the layers below; see `ParallelStyle.spec`."""
        linears = {name: _below(info, name, nn.Linear) for name in (self.base, self.a, self.b)}
        missing = [name for name, layers in linears.items() if not layers]
        if missing:
            reason, hint = f"no linear layer {', '.join(missing)}", "pass the names of the base layer, A and B"
            if self.base not in missing:  # IA3, OFT, VeRA, AdaLoRA
                reason = f"this adapter is not supported: {info.kind.__module__}.{info.kind.__name__} has {reason}"
                hint = (
                    "of peft's adapters LoRA is; merge others (merge_and_unload) before the plan, or leave the layer"
                    " out of it; for LoRA under other names pass a= and b="
                )
            return StyleSpec(problems=(Problem("lora-mismatch", info.where(), found=reason, hint=hint),))
        named: dict[object, ColwiseParallel | RowwiseParallel] = {"column": ColwiseParallel(), "row": RowwiseParallel()}
        base = named[self.style] if isinstance(self.style, str) else self.style
        column, enters = isinstance(base, ColwiseParallel), base.input_layouts[0]
        # A and B see what the base layer sees and give: of sequence shards neither has a meaning.
        is_known = enters == Replicate() if column else enters in (Replicate(), Shard(-1))
        if not is_known or (not column and base.output_layouts[0] != Replicate()) or not base.use_local_output:
            return StyleSpec(
                problems=(
                    Problem(
                        "lora-mismatch",
                        info.where(),
                        found=repr(base),
                        hint="beside a low-rank update a layer takes and gives full local tensors, or shards of its"
                        " features",
                    ),
                )
            )
        first: ParallelStyle = NoParallel() if column else RowwiseParallel(input_layouts=enters)
        second: ParallelStyle = base if column else NoParallel()
        children: list[tuple[str, object]] = [(name, base) for name in linears[self.base]]
        children += [(name, first) for name in linears[self.a]] + [(name, second) for name in linears[self.b]]
        if not column and enters == Shard(-1):
            children += [(name, NoParallel(sum_gradient=True)) for name in _below(info, self.dropout, nn.Dropout)]
        problems = [  # other parameters, like DoRA's magnitude
            Problem(
                "lora-mismatch", info.where(p.name), found=str(p.shape), hint="only A and B are known beside the base"
            )
            for p in info.parameters
            if not any(p.name.startswith(name + ".") for names in linears.values() for name in names)
        ]
        return StyleSpec(compute="none", children=tuple(children), problems=tuple(problems))


def _below(info: ModuleInfo, name: str, kind: type[nn.Module]) -> list[str]:
    return [
        child
        for child, inner in info.children
        if (child == name or child.startswith(name + ".")) and issubclass(inner, kind)
    ]


class ParametersParallel(ParallelStyle):
    """Shard a module's own parameters by the style names of Hugging Face's plans.

    Args:
        parameters: Name of a parameter of the module -> `"colwise"`, `"rowwise"`, `"packed_colwise"`,
            `"packed_rowwise"` or `"replicate"`. Rows are the last dim but one, columns the last.
        role: `"experts"`: every rank runs its shard of every expert, and the outputs are summed; gradients of the
            tokens and of the routing weights are summed too. `"sum"`: the output is a partial sum. `"local"`: neither.
    """

    def __init__(self, parameters: Mapping[str, str], *, role: str = "local") -> None:
        self.parameters = dict(parameters)
        self.role = role

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        problems = []
        parameters = []
        for name, kind in self.parameters.items():
            parameter = info.parameter(name)
            if parameter is None:
                problems.append(Problem("unknown-name", info.where(name), hint="the plan is for another model"))
                continue
            split, problem = _split(info, parameter, kind, tp_size)
            problems += [problem] if problem is not None else []
            summed = split.is_replicated and self.role != "local"  # each rank uses it on its own shard
            # Every rank would add the full bias of the down projection before the sum.
            divide_by_tp = summed and kind == "rowwise" and name.endswith("bias")
            parameters.append((name, ParameterSpec(split, sum_gradient=summed, divide_by_tp=divide_by_tp)))
        if self.role == "local":
            return StyleSpec(compute="module", parameters=tuple(parameters), problems=tuple(problems))
        # Experts: tokens and routing weights, without indices. In a partial sum every input's gradient is partial.
        copied = info.arguments if self.role == "sum" else info.arguments[:1] + info.arguments[2:3]
        flow = Redistribution(Replicate(), Replicate(), gradient=Partial())
        return StyleSpec(
            compute="module",
            parameters=tuple(parameters),
            inputs=tuple((name, flow) for name in copied),
            outputs=(Redistribution(Partial(), Replicate()),),
            problems=tuple(problems),
        )


class IdentityExpert(ParallelStyle):
    """Identity inside summed experts: every rank divides its input by the number of ranks."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        return StyleSpec(compute="divided-input")


class LatentKVParallel(ParallelStyle):
    """Latent key-value projection: sums the gradient of its last features, used directly by every head.

    Args:
        rope_features: How many features at the end bypass the second projection.
    """

    def __init__(self, rope_features: int) -> None:
        self.rope_features = rope_features

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        features = info.size("out_features")
        problems = []
        if not isinstance(features, int) or not 0 < self.rope_features < features:
            problems.append(
                Problem(
                    "shape-mismatch",
                    info.where(),
                    found=f"{self.rope_features} of {features}",
                    hint="the latent projection has more output features than those that bypass",
                )
            )
        # The other features go through a column-wise layer, which sums their gradient itself.
        flow = Redistribution(Replicate(), Replicate(), gradient=Partial(), width=self.rope_features)
        return StyleSpec(compute="latent-kv", outputs=(flow,), problems=tuple(problems))


def _split(info: ModuleInfo, parameter: ParameterInfo, kind: str, tp_size: int) -> tuple[Split, Problem | None]:
    shape = parameter.shape
    last = len(shape) - 1
    if kind.startswith("replicate") or (
        kind.endswith("rowwise") and (len(shape) == 1 or parameter.name.endswith("bias"))  # no input dim
    ):
        return Split.replicated(), None
    dim = last if kind.endswith("rowwise") or len(shape) == 1 else last - 1
    if kind.endswith("colwise") and parameter.name.endswith("bias"):
        dim = last  # biases of experts: [experts, features]
    if not kind.startswith("packed"):
        return Split.along(dim, shape[dim]), None
    if shape[dim] % 2:
        return Split.replicated(), Problem(
            "invalid-sections",
            info.where(parameter.name),
            dim=dim,
            found=str(shape),
            hint="a packed weight holds two sections of the same size",
        )
    return Split(dim, (Section(shape[dim] // 2),) * 2), None
