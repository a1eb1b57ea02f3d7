"""Norms and dropout on a shard of the sequence."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.values.spec import ModuleInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Split


class SequenceParallel(ParallelStyle):
    """A module that treats each position alone runs on this rank's positions; its parameters are replicated.

    For `nn.LayerNorm`, RMS norms and dropout. Each rank sees only the gradient of its positions: the gradients of the
    replicated parameters are summed over the ranks. Parameters are made equal by broadcast and stay frozen if they
    were. (The first styles had another class of this name: `tp_styles.PairwiseSequenceParallel`.)

    Args:
        sequence_dim: Dim of the input that is sharded.
        use_local_output: Whether the output is a plain tensor; by default a DTensor sharded on that dim.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(None, None)
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Nothing is split, every parameter's gradient is summed; see `ParallelStyle.spec`."""
        if not info.arguments:
            problem = Problem(
                "argument-count", info.where(), found="a forward without arguments", hint="name another module"
            )
            return StyleSpec(problems=(problem,))
        flow = Redistribution(self.sequence_sharding[0], self.sequence_sharding[0])
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

    def _arguments(self) -> dict[str, object]:
        return {"sequence_dim": self.sequence_sharding[0].dim, "use_local_output": self.use_local_output}
