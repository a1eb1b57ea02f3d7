"""Placements of a graph node's tensor on the ranks of one mesh axis, and the axes of a mesh.

Vocabulary: a *placement* is torch's ``Shard``, ``Replicate`` or ``Partial``. Two are added: `RankLocal`, a tensor
computed by every rank for itself and without a global meaning (activations under local semantics), and
``Partial("norm<p>")``, reduced to the p-norm of the ranks' values (the partial p-norms of shards).

Parameters are on the last axis of a mesh, replicas along the first of two. Messages to all ranks go over one axis after
the other, the last one first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dp_partition._shared.problems import PlanError, Problem
from dp_partition._torch_compat import uncompiled


class RankLocal(Placement):
    """Unrelated values of the ranks: each one is the result of a rank's own computation."""

    def __repr__(self) -> str:
        return "RankLocal()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankLocal)

    def __hash__(self) -> int:
        return hash(RankLocal)


@dataclass(frozen=True)
class PlacementSpec:
    """Placement of one tensor: the mesh and one for each axis (data parallelism uses one)."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != self.mesh.ndim:
            raise ValueError(f"{len(self.placements)} placements for a mesh with {self.mesh.ndim} axes")

    @property
    def placement(self) -> Placement:
        """Return the placement on the only axis."""
        return self.placements[0]


Outputs = PlacementSpec | tuple["Outputs", ...] | None
"""Spec of a node's value: one tensor, a list of tensors, or no tensor."""


@dataclass(frozen=True)
class PlacementStrategy:
    """One strategy for a node: placements of its value and of its inputs.

    Attributes:
        output_spec: Spec of the value; a tuple for nodes with several outputs.
        input_specs: One entry per ``node.all_input_nodes``, ``None`` for inputs other than tensors (a tuple for an
            input that is itself a list); a single ``None`` for placeholders.
    """

    output_spec: Outputs
    input_specs: tuple[Outputs, ...] | None = None


class DataParallelStrategy:
    """The strategies for one node in a data-parallel graph.

    Args:
        node_type: Role of the node in the train step.
        strategies: The candidates: one, or two as ``[replicated, sharded]``.
        reduction_over_batch: The node's value is a reduction over the batch (a loss, for instance).
    """

    def __init__(
        self, node_type: NodeType, strategies: Sequence[PlacementStrategy], reduction_over_batch: bool = False
    ) -> None:
        self.node_type = node_type
        self.strategies = list(strategies)
        self._mixed: PlacementStrategy | None = None  # where parameters that divide are sharded, others replicated
        self.reduction_over_batch = reduction_over_batch

    def __str__(self) -> str:
        ways = " | ".join(describe(strategy.output_spec) for strategy in self.strategies)
        return f"type: {self.node_type}, [{ways}]"

    __repr__ = __str__


class TupleStrategy:
    """The strategies of a node with several outputs, one child per output."""

    def __init__(self, childs: Sequence[DataParallelStrategy], strategies: Sequence[PlacementStrategy] = ()) -> None:
        self.childs = tuple(childs)  # torch's spelling
        self.strategies = list(strategies)
        self._mixed: PlacementStrategy | None = None

    def __str__(self) -> str:
        return f"TupleStrategy({', '.join(map(str, self.childs))})"

    __repr__ = __str__


StrategyType = DataParallelStrategy | TupleStrategy


def describe(spec: Outputs | Placement) -> str:
    """Return a short name of a spec or placement: ``R``, ``S(0)``, ``P(avg)``, ``local``."""
    if spec is None:
        return "-"
    if isinstance(spec, tuple):
        return "(" + ", ".join(describe(item) for item in spec) + ")"
    if isinstance(spec, PlacementSpec):
        return "x".join(map(describe, spec.placements))  # one for each axis
    if isinstance(spec, RankLocal):  # not one of torch's
        return "local"
    if isinstance(spec, Shard):
        return f"S({spec.dim})"
    return "R" if isinstance(spec, Replicate) else f"P({spec.reduce_op})" if isinstance(spec, Partial) else repr(spec)


class DataParallelStyle(Enum):
    """Placement of parameters, gradients and optimizer state on the data-parallel ranks.

    Attributes:
        DEFAULT: Shard every parameter with a dim 0 divisible by the world size, replicate the others: no padding, and
            a mixture of reduce-scatter and all-reduce.
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
    """Role of a graph node's tensor in the train step.

    Attributes:
        PARAM: A parameter (or buffer), or a function of parameters alone.
        ACT: An activation: any function of the batch.
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
    """Return a style given by name or as an enum member.

    Raises:
        PlanError: The name is no style (code ``invalid-argument``).
    """
    if isinstance(style, DataParallelStyle):
        return style
    names = [member.name.lower() for member in DataParallelStyle]
    if style.lower() not in names:
        raise PlanError(
            Problem(
                "invalid-argument",
                "style",
                found=repr(style),
                hint=f"use one of {', '.join(map(repr, names))} or a DataParallelStyle",
            )
        )
    return DataParallelStyle[style.upper()]


def chunk_bounds(size: int, world: int, rank: int) -> tuple[int, int]:
    """Return start and end of a rank's chunk of a dim, as in ``torch.chunk``."""
    step = -(-size // world)  # rounded up
    return min(rank * step, size), min((rank + 1) * step, size)  # the last chunks may be empty


def local_shape(shape: tuple[int, ...], placement: Placement, world: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard of a tensor of global ``shape``."""
    if not isinstance(placement, Shard):
        return shape
    start, end = chunk_bounds(shape[placement.dim], world, rank)
    return (*shape[: placement.dim], end - start, *shape[placement.dim + 1 :])


def shard_world(mesh: DeviceMesh) -> int:
    return mesh.size(mesh.ndim - 1)


def shard_rank(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank(mesh.ndim - 1)


def warn_on_first(mesh: DeviceMesh, text: str, *, stacklevel: int = 1) -> None:
    """Warn on the first rank of a mesh: one warning a job. ``stacklevel`` as for `warnings.warn`, from the caller."""
    coordinate = mesh.get_coordinate() if hasattr(mesh, "get_coordinate") else None
    if not any(coordinate or ()):
        warnings.warn(text, stacklevel=stacklevel + 1)


def name_of(function: Callable[..., Any]) -> str:
    """Return a step's name, for messages."""
    return getattr(function, "__name__", type(function).__name__)


def without_compiler(function: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """Return the function as it runs: of one under `torch.compile` the original, with a warning."""
    original = uncompiled(function)
    if original is not function:
        warn_on_first(
            mesh, f"{name_of(original)}: of a compiled step the original runs; compile the model", stacklevel=4
        )
    return original


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group(mesh.ndim - 1)  # shards are on the last axis


def num_replicas(mesh: DeviceMesh) -> int:
    """Return the number of replicas; 1 on a mesh of one axis."""
    return 1 if mesh.ndim == 1 else mesh.size(0)


def all_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return a group for every axis, the last axis first."""
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]  # the same order on all ranks


def on_mesh(placement: Placement, mesh: DeviceMesh) -> list[Placement]:
    """Return placements on every axis for a placement on the last one."""
    return [Replicate()] * (mesh.ndim - 1) + [placement]


@dataclass(frozen=True)
class _Ranks:
    """Sizes of a mesh, and one rank of it."""

    sizes: tuple[int, ...]
    rank: int
    device_type: str

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, axis: int | None = None) -> int:
        return math.prod(self.sizes) if axis is None else self.sizes[axis]

    def get_local_rank(self, axis: int | None = None) -> int:
        below = math.prod(self.sizes[(axis or 0) + 1 :])  # ranks are row-major
        return self.rank // below % self.sizes[axis or 0]

    def get_group(self, axis: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(group_name=f"fake{axis or ''}")  # only its name is used, in the graph


def fake_mesh(world: int | tuple[int, ...], rank: int, device: str) -> DeviceMesh:
    """Return a mesh of ``world`` ranks (or sizes by axis), as seen by ``rank``. It cannot communicate."""
    return cast(DeviceMesh, _Ranks((world,) if isinstance(world, int) else world, rank, device))
