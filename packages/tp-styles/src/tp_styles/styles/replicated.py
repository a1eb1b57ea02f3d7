"""Modules with replicated parameters: computed in full on every rank, or on a shard of the sequence."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from tp_styles.problems import Problem
from tp_styles.styles.base import ParallelStyle
from tp_styles.values.spec import ModuleInfo, ParameterSpec, Redistribution, StyleSpec
from tp_styles.values.split import Split


class NoParallel(ParallelStyle):
    """Replicate a module's parameters (made equal by broadcast) and run its own forward.

    Args:
        sum_gradient: The module is inside a sharded region (a norm of this rank's heads): each rank computes a
            partial gradient of its parameters, and these are summed; dropout draws other numbers on each rank (see
            `tp_rng`). Without it every rank is assumed to compute the full gradient.
    """

    def __init__(self, *, sum_gradient: bool = False) -> None:
        super().__init__(None, None)
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
        super().__init__(None, None)
        self.sequence_dim = sequence_dim
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return replicated parameters with summed gradients; see `ParallelStyle.spec`."""
        if not info.arguments:
            problem = Problem(
                "argument-count", info.where(), found="a forward without arguments", hint="name another module"
            )
            return StyleSpec(problems=(problem,))
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
