"""Columns of a linear layer's weight (its input features), rows of an embedding, over the ranks."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tp_styles.legacy.prepare import make_input_shard_1d_last_dim, make_output_tensor
from tp_styles.problems import Problem
from tp_styles.spec import Flow, ModuleInfo, ParameterSpec, StyleSpec
from tp_styles.split import Split
from tp_styles.styles.base import ParallelStyle, PrepareInput, PrepareOutput
from tp_styles.styles.layers import (
    LinearShape,
    embedding_problems,
    linear_problems,
    linear_shape,
    refuse_mixed,
    single,
    wrong_kind,
)


class RowwiseParallel(ParallelStyle):
    """Each rank computes its part of every output feature from some of the input features; the parts are summed.

    On an `nn.Embedding` each rank looks up the ids of its rows, and the lookups are summed. Takes the arguments of
    either era: prepare functions, or layouts.

    Args:
        _prepare_input: Makes the input a DTensor sharded on the last dim.
        _prepare_output: Makes the output DTensor, a partial sum, what the next module takes.
        input_layouts: Layout of the input if it is a plain tensor; default `Shard(-1)`, on an embedding `Replicate()`
            (ids have no feature dim to be sharded on).
        output_layouts: Layout that the output gets; default `Replicate()`.
        use_local_output: Whether the output is a plain tensor.

    Raises:
        StyleTypeError: Arguments of both eras, or no placement (also a `TypeError`).
    """

    def __init__(
        self,
        _prepare_input: PrepareInput | None = make_input_shard_1d_last_dim,
        _prepare_output: PrepareOutput | None = make_output_tensor,
        *,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(_prepare_input, _prepare_output)
        today = {"input_layouts": input_layouts is not None, "output_layouts": output_layouts is not None}
        today["use_local_output"] = not use_local_output
        refuse_mixed(type(self).__name__, self._functions(), (name for name, given in today.items() if given))
        self.input_layouts = (single(input_layouts, Shard(-1), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Replicate(), "output_layouts"),)
        self.use_local_output = use_local_output
        self._input_given = input_layouts is not None

    def _functions(self) -> list[str]:
        given = {
            "_prepare_input": self._prepare_input is not make_input_shard_1d_last_dim,
            "_prepare_output": self._prepare_output is not make_output_tensor,
        }
        return [name for name, is_given in given.items() if is_given]

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Input features are split; see `ParallelStyle.spec`."""
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
            # Ranks that hold different parts of the output each see a part of the bias's gradient.
            sharded = not isinstance(output, Replicate)
            parameters.append(("bias", ParameterSpec(Split.replicated(), sum_gradient=sharded)))
        if self._functions():
            return StyleSpec(compute="dtensor", parameters=tuple(parameters), problems=problems)
        columns = Split.along(0, shape.in_features)
        plain = info.kind.forward is nn.Linear.forward
        return StyleSpec(
            compute="row-linear" if plain else "own-row-linear",
            parameters=tuple(parameters),
            inputs=(
                (info.arguments[0], Flow(self.input_layouts[0], Shard(-1), split=columns, width=shape.in_features)),
            ),
            outputs=(Flow(Partial(), output, split=Split.along(0, shape.out_features), width=shape.out_features),),
            local_output=self.use_local_output,
            problems=problems,
        )

    def _embedding(self, info: ModuleInfo) -> StyleSpec:
        rows, features = int(info.size("num_embeddings") or 0), int(info.size("embedding_dim") or 0)
        problems = embedding_problems(info, by_rows=True)
        parameters = (("weight", ParameterSpec(Split.along(0, rows))),)
        if self._functions():
            return StyleSpec(compute="dtensor", parameters=parameters, problems=tuple(problems))
        source = self.input_layouts[0] if self._input_given else Replicate()
        if source in (Shard(-1), Partial()) or isinstance(source, Partial):
            problems.append(
                Problem(
                    "sharded-ids",
                    info.where("input_layouts"),
                    found=repr(source),
                    hint="every rank looks up all ids: leave input_layouts out, or name the dim that they are split on",
                )
            )
            source = Replicate()
        plain = info.kind.forward is nn.Embedding.forward
        # A forward of its own sees whole lookups, and gives a whole output.
        produced = Partial() if plain else Replicate()
        columns = Split.along(0, features) if features else None
        output = Flow(produced, self.output_layouts[0], split=columns, width=features)
        return StyleSpec(
            compute="row-embedding" if plain else "own-row-embedding",
            parameters=parameters,
            inputs=((info.arguments[0], Flow(source, Replicate())),),
            outputs=(output,),
            local_output=self.use_local_output,
            problems=tuple(problems),
        )

    def _arguments(self) -> dict[str, object]:
        if self._functions():
            return super()._arguments()
        return {
            **({"input_layouts": self.input_layouts[0]} if self._input_given else {}),
            "output_layouts": self.output_layouts[0],
            "use_local_output": self.use_local_output,
        }
