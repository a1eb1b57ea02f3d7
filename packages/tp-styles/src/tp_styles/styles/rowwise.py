"""Shard a linear layer's input features (columns of its weight) or an embedding's rows."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.layers import (
    LinearShape,
    embedding_problems,
    linear_problems,
    linear_shape,
    single,
    wrong_kind,
)
from tp_styles.values.spec import ModuleInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Split


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
        super().__init__(None, None)
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
        return StyleSpec(problems=(wrong_kind(info, type(self).__name__),))

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
        problems = embedding_problems(info, by_rows=True)
        parameters = (("weight", ParameterSpec(Split.along(0, rows))),)
        source = self.input_layouts[0] if self._input_given else Replicate()
        if source in (Shard(-1), Partial()) or isinstance(source, Partial):  # ids have no feature dim
            hint = "every rank looks up all ids: leave input_layouts out, or name the dim that they are split on"
            problems.append(Problem("sharded-input", info.where("input_layouts"), found=repr(source), hint=hint))
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
