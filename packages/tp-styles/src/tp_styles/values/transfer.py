"""Steps of an activation's change of layout on the tensor-parallel axis, forward and backward.

The runtime executes exactly these steps and `explain` prints them, so predictions and execution agree.

The gradient of a local tensor has a layout of its own: full on every rank for a replicated activation, a shard for a
sharded one, full again for a partial sum. A consumer with a shard of the weights returns only a partial gradient of a
replicated input; `gradient=Partial()` stands for this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

Op = Literal["none", "all_reduce", "all_gather", "reduce_scatter", "slice", "all_to_all"]


@dataclass(frozen=True)
class Step:
    """One movement: `op` along `dim`; an `all_to_all` goes from shards of `source_dim` to shards of `dim`."""

    op: Op = "none"
    dim: int | None = None
    source_dim: int | None = None

    @property
    def communicates(self) -> bool:
        """True if it needs communication."""
        return self.op not in ("none", "slice")

    def __str__(self) -> str:
        if self.source_dim is not None:
            return f"{self.op}({self.source_dim}->{self.dim})"
        return self.op if self.dim is None else f"{self.op}({self.dim})"


@dataclass(frozen=True)
class Transfer:
    """The step of the forward pass and the step of the gradient."""

    forward: Step
    backward: Step


class NoTransfer(ValueError):
    """There is no valid change from one layout to the other."""


def normalized(placement: Placement, ndim: int) -> Placement:
    """Return the placement with its dim counted from the front for a tensor of `ndim` dims."""
    if isinstance(placement, Shard):
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < ndim:
            raise NoTransfer(f"{placement} does not fit a tensor with {ndim} dims")
        return Shard(dim)
    return placement


def step(source: Placement, wanted: Placement) -> Step:
    """Return the movement from `source` to `wanted`; dims are compared as written."""
    match source, wanted:
        case Replicate(), Replicate():
            return Step()  # nothing to move
        case Replicate(), Shard():
            return Step("slice", wanted.dim)
        case Shard(), Replicate():
            return Step("all_gather", source.dim)
        case Shard(), Shard() if source.dim == wanted.dim:
            return Step()
        case Shard(), Shard():
            return Step("all_to_all", wanted.dim, source.dim)
        case Partial(), Replicate() if source.reduce_op == "sum":
            return Step("all_reduce")
        case Partial(), Shard() if source.reduce_op == "sum":
            return Step("reduce_scatter", wanted.dim)
        case Partial(), Partial() if source.reduce_op == wanted.reduce_op == "sum":
            return Step()  # reduced later
    raise NoTransfer(f"an activation that is {source} cannot be made {wanted}")


def gradient_layout(placement: Placement) -> Placement:
    """Return the layout of a local tensor's gradient."""
    return placement if isinstance(placement, Shard) else Replicate()  # of a partial sum: full


def transfer(source: Placement, wanted: Placement, gradient: Placement | None = None) -> Transfer:
    """Return both steps of a change of layout.

    Args:
        source: Layout before.
        wanted: Layout after.
        gradient: Layout of the incoming gradient on the wanted side; by default `gradient_layout(wanted)`.

    Raises:
        NoTransfer: There is no such change.
    """
    if gradient is None:
        gradient = gradient_layout(wanted)
    return Transfer(step(source, wanted), step(gradient, gradient_layout(source)))  # backward runs in reverse
