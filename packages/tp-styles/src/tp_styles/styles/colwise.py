"""Rows of a linear layer's weight (its output features), columns of an embedding, over the ranks."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tp_styles.legacy.prepare import make_input_replicate_1d, make_sharded_output_tensor
from tp_styles.problems import Problem
from tp_styles.spec import Flow, ModuleInfo, ParameterSpec, StyleSpec
from tp_styles.split import Split
from tp_styles.styles.base import ParallelStyle, PrepareInput, PrepareOutput
from tp_styles.styles.layers import (
    embedding_problems,
    linear_problems,
    linear_shape,
    refuse_mixed,
    single,
    specs,
    wrong_kind,
)


class ColwiseParallel(ParallelStyle):
    """Each rank computes some of the output features of an `nn.Linear` (or `nn.Embedding`).

    Takes the arguments of either era: prepare functions, or layouts. `src_data_rank` is set by `parallelize_module`.

    Args:
        _prepare_input: Makes the input a replicated DTensor.
        _prepare_output: Makes the output DTensor what the next module takes.
        input_layouts: Layout of the input if it is a plain tensor; default `Replicate()`.
        output_layouts: Layout that the output gets; default `Shard(-1)`.
        use_local_output: Whether the output is a plain tensor.

    Raises:
        StyleTypeError: Arguments of both eras, or no placement (also a `TypeError`).
    """

    def __init__(
        self,
        _prepare_input: PrepareInput | None = make_input_replicate_1d,
        _prepare_output: PrepareOutput | None = make_sharded_output_tensor,
        *,
        input_layouts: Placement | tuple[Placement, ...] | None = None,
        output_layouts: Placement | tuple[Placement, ...] | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(_prepare_input, _prepare_output)
        today = {"input_layouts": input_layouts is not None, "output_layouts": output_layouts is not None}
        today["use_local_output"] = not use_local_output
        refuse_mixed(type(self).__name__, self._functions(), (name for name, given in today.items() if given))
        self.input_layouts = (single(input_layouts, Replicate(), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Shard(-1), "output_layouts"),)
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output

    def _functions(self) -> list[str]:
        given = {
            "_prepare_input": self._prepare_input is not make_input_replicate_1d,
            "_prepare_output": self._prepare_output is not make_sharded_output_tensor,
        }
        return [name for name, is_given in given.items() if is_given]

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Output features are split; see `ParallelStyle.spec`."""
        shape = linear_shape(info)
        if shape is not None:
            parameters = [("weight", Split.along(shape.out_dim, shape.out_features))]
            if info.parameter("bias") is not None:
                parameters.append(("bias", Split.along(0, shape.out_features)))
            problems = linear_problems(info, shape)
            features, width = shape.out_features, shape.in_features
            plain = info.kind.forward is nn.Linear.forward
            compute = "column-linear" if plain else "own"
        elif issubclass(info.kind, nn.Embedding):
            features = int(info.size("embedding_dim") or 0)
            width = 0
            parameters = [("weight", Split.along(1, features))]
            problems = embedding_problems(info, by_rows=False)
            compute = "own"
        else:
            return StyleSpec(problems=(wrong_kind(info, type(self).__name__),))
        if self._functions():
            return StyleSpec(compute="dtensor", parameters=specs(**dict(parameters)), problems=tuple(problems))
        output = self.output_layouts[0]
        if isinstance(output, Partial):
            problems.append(_partial(info, "output_layouts"))
        enter = Flow(self.input_layouts[0], Replicate(), gradient=Partial() if width else None, width=width)
        leave = Flow(Shard(-1), output, split=Split.along(0, features), width=features)
        return StyleSpec(
            compute=compute,
            parameters=tuple((name, ParameterSpec(split)) for name, split in parameters),
            inputs=((info.arguments[0], enter),),
            outputs=(leave,),
            local_output=self.use_local_output,
            problems=tuple(problems),
        )

    def _arguments(self) -> dict[str, object]:
        if self._functions():
            return super()._arguments()
        return {
            "input_layouts": self.input_layouts[0],
            "output_layouts": self.output_layouts[0],
            "use_local_output": self.use_local_output,
        }


def _partial(info: ModuleInfo, argument: str) -> Problem:
    return Problem(
        "partial-output",
        info.where(argument),
        found="Partial()",
        hint="the output of a column-wise layer is a shard; ask for Shard(dim) or Replicate()",
    )
