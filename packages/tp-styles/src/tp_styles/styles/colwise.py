"""Rows of a linear layer's weight (its output features), columns of an embedding, over the ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tp_styles.legacy.prepare import make_input_replicate_1d, make_sharded_output_tensor
from tp_styles.problems import Problem
from tp_styles.spec import Flow, ModuleInfo, StyleSpec
from tp_styles.split import Split
from tp_styles.styles.base import ParallelStyle, PrepareInput, PrepareOutput
from tp_styles.styles.layers import (
    embedding_problems,
    flow_problems,
    is_conv1d,
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
        use_local_output: Whether the output is a plain tensor; the default. Written out (as `output_layouts`) it says
            that shards may leave the model.

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
        use_local_output: bool | None = None,
    ) -> None:
        super().__init__(_prepare_input, _prepare_output)
        today = {"input_layouts": input_layouts is not None, "output_layouts": output_layouts is not None}
        today["use_local_output"] = use_local_output is False
        refuse_mixed(type(self).__name__, self._functions(), (name for name, given in today.items() if given))
        self.input_layouts = (single(input_layouts, Replicate(), "input_layouts"),)
        self.output_layouts = (single(output_layouts, Shard(-1), "output_layouts"),)
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output is not False
        self.declares_output = output_layouts is not None or use_local_output is not None

    def _functions(self) -> list[str]:
        given = {
            "_prepare_input": self._prepare_input is not make_input_replicate_1d,
            "_prepare_output": self._prepare_output is not make_sharded_output_tensor,
        }
        return [name for name, is_given in given.items() if is_given]

    def features_split(self, info: ModuleInfo, features: int, tp_size: int) -> tuple[Split, list[Problem]]:
        """How the output features are divided, along dim 0, and what speaks against it."""
        return Split.along(0, features), []

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Output features are split; see `ParallelStyle.spec`."""
        shape = linear_shape(info)
        if shape is not None:
            split, problems = self.features_split(info, shape.out_features, tp_size)
            parameters = [("weight", replace(split, dim=shape.out_dim))]
            if info.parameter("bias") is not None:
                parameters.append(("bias", split))
            problems += linear_problems(info, shape)
            width = shape.in_features
            compute = "column-linear" if info.kind.forward is nn.Linear.forward else "own"
            attributes = (("nf", split),) if is_conv1d(info.kind) else ()
        elif issubclass(info.kind, nn.Embedding):
            split, problems = self.features_split(info, int(info.size("embedding_dim") or 0), tp_size)
            parameters = [("weight", replace(split, dim=1))]
            problems += embedding_problems(info, by_rows=False)
            width, compute, attributes = 0, "own", ()
        else:
            return StyleSpec(problems=(wrong_kind(info, type(self).__name__),))
        if self._functions():
            return StyleSpec(compute="dtensor", parameters=specs(parameters), problems=tuple(problems))
        enter = Flow(self.input_layouts[0], Replicate(), gradient=Partial() if width else None, width=width)
        leave = Flow(Shard(-1), self.output_layouts[0], split=split, width=split.global_size)
        return StyleSpec(
            compute=compute,
            parameters=specs(parameters),
            inputs=((info.arguments[0], enter),),
            outputs=(leave,),
            local_output=self.use_local_output,
            attributes=attributes,
            problems=(*problems, *flow_problems(info, [("output_layouts", leave), ("input_layouts", enter)])),
        )

    def _arguments(self) -> dict[str, object]:
        if self._functions():
            return super()._arguments()
        return {
            "input_layouts": self.input_layouts[0],
            "output_layouts": self.output_layouts[0],
            "use_local_output": self.use_local_output,
        }
