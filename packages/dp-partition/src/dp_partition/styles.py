"""The words of a data-parallel plan: styles and node types."""

from __future__ import annotations

from enum import Enum

from dp_partition.problems import PlanError, Problem


class DataParallelStyle(Enum):
    """How the parameters, gradients and optimizer state of a model lie on the data-parallel ranks.

    Attributes:
        DEFAULT: Shard every parameter whose dim 0 the world size divides, replicate the others: no padding, and a
            mixture of reduce-scatter and all-reduce.
        REPLICATE: Every rank holds everything, as under DistributedDataParallel.
        FULLY_SHARD: Everything is sharded on dim 0, uneven parameters too, as under FSDP (ZeRO-3).
        ZERO1: Parameters replicated, optimizer state sharded; gradients are all-reduced.
        ZERO2: Parameters replicated, optimizer state sharded; gradients are reduce-scattered.
        HYBRID: As FULLY_SHARD over the last axis of a mesh of two, and replicated along the first (HSDP).
    """

    DEFAULT = 0
    REPLICATE = 1
    FULLY_SHARD = 2
    ZERO1 = 3
    ZERO2 = 4
    HYBRID = 5


class NodeType(Enum):
    """What the tensor of a graph node is to the train step.

    Attributes:
        PARAM: A parameter (or buffer), or something computed from parameters alone.
        ACT: An activation: anything that depends on the batch.
        GRAD: A parameter's gradient, before or after its reduction.
        STATE: Optimizer state.
        NON_TENSOR: No tensor: the graph's output, scalars, tuples of different things.
    """

    PARAM = 0
    ACT = 1
    GRAD = 2
    STATE = 3
    NON_TENSOR = 4


def parse_style(style: str | DataParallelStyle) -> DataParallelStyle:
    """Read a style given by name or as an enum member.

    Raises:
        PlanError: For a name that is no style (code ``unknown-style``).
    """
    if isinstance(style, DataParallelStyle):
        return style
    names = [member.name.lower() for member in DataParallelStyle]
    if style.lower() not in names:
        hint = f"use one of {', '.join(map(repr, names))} or a DataParallelStyle"
        raise PlanError(Problem("unknown-style", "style", found=repr(style), hint=hint))
    return DataParallelStyle[style.upper()]
