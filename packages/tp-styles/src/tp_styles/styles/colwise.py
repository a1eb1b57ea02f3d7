"""Shard a linear layer's output features (rows of its weight) or an embedding's columns."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.layers import (
    embedding_problems,
    flow_problems,
    is_conv1d,
    linear_problems,
    linear_shape,
    single,
    specs,
    wrong_kind,
)
from tp_styles.values.spec import ModuleInfo, Redistribution, StyleSpec
from tp_styles.values.split import Split


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
        super().__init__(None, None)
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
            return StyleSpec(problems=(wrong_kind(info, type(self).__name__),))
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
