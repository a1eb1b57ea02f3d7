"""TP blocks of the recognisers: groups of parameters that are sharded together.

Vocabulary of this folder. A *column* linear is sharded along its outputs and needs no communication before it; a
*row* linear is sharded along its inputs, and its outputs are summed. Between them lies the *region*: every rank works
on its own slice of the channels (heads, for attention). A *unit* is a region with its columns and rows. A unit is
right if row inputs of slice ``r`` depend on column outputs of slice ``r`` and of no other slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal

from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.layout.placements import AnyShard, ShardSpec
from shard_spec.planners.modules.block_simulator import LinearView

# In names of tables without a vocabulary.
POSITION_WORDS = ("pos", "wpe", "token_type", "segment", "relative", "bucket")


class TPBlockKind(StrEnum):
    """Kinds of units."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "head"


class Evidence(StrEnum):
    """Evidence that a unit may be sharded.

    ``LIBRARY``: a class of torch or transformers of known arrangement. ``PROBED``: its forward was run on small
    random tensors, and no slice depended on another. ``NAMED``: names and shapes only, the forward could not be run.
    ``BY_NATURE``: sharding rows of a vocabulary needs no evidence. ``USER_SPECIFIED``: the caller's `fused=`.
    """

    LIBRARY = "library"
    PROBED = "probed"
    NAMED = "named"
    BY_NATURE = "by-nature"
    USER_SPECIFIED = "user-specified"


@dataclass(frozen=True)
class Cut:
    """One parameter and its placement on the tensor-parallel axis, for example ``ShardSpec(0)``."""

    name: str
    placement: AnyShard


@dataclass(frozen=True)
class TPBlock:
    """A region with its columns and rows."""

    kind: TPBlockKind
    name: str  # FQN of the smallest module around all of it
    columns: tuple[Cut, ...]  # weights and biases of the linears before the region
    rows: tuple[Cut, ...]  # weights of the linears after the region; their outputs are summed
    inner: tuple[Cut, ...] = ()  # parameters inside, sharded with it (one entry per head or channel)
    # Inside: each rank computes its slice's share of their gradient, which the executor of the plan has to sum.
    replicated: tuple[str, ...] = ()
    row_biases: tuple[str, ...] = ()  # added once, after the sum
    num_pieces: int = 1  # equal units to distribute (heads, channels, rows of the vocabulary)
    evidence: Evidence = Evidence.LIBRARY  # reason to believe that the sharding is right

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every sharded parameter."""
        return (*self.columns, *self.inner, *self.rows)


@dataclass(frozen=True)
class Found:
    """Finding of one recogniser at one place: a unit, or the reason for replication, and remarks."""

    unit: TPBlock | None = None  # if it may be sharded
    left_whole: tuple[tuple[str, Problem], ...] = ()  # FQNs of recognised parameters that stay replicated
    notes: tuple[Problem, ...] = ()  # remarks besides refusals


@dataclass(frozen=True, eq=False)
class Region:
    """The linears around a region: columns before it, a row after it, in the module `scope`."""

    columns: tuple[LinearView, ...]
    row: LinearView
    scope: str

    @property
    def linears(self) -> tuple[LinearView, ...]:
        """Columns and row."""
        return (*self.columns, self.row)

    @property
    def fused(self) -> bool:
        """True if several projections come out of one linear."""
        raise NotImplementedError

    def block(
        self,
        kind: TPBlockKind,
        columns: tuple[Cut, ...],
        num_pieces: int,
        evidence: Evidence,
        inner: tuple[Cut, ...] = (),
        replicated: tuple[str, ...] = (),
    ) -> TPBlock:
        """Return the block that shards the region."""
        rows = (Cut(self.row.weight_name, ShardSpec(self.row.in_dim)),)
        return TPBlock(kind, self.scope, columns, rows, inner, replicated, self.row.biases, num_pieces, evidence)

    def left_whole(self, problem: Problem) -> Found:
        """Report the linears as replicated, with the reason."""
        return Found(left_whole=tuple((name, problem) for view in self.linears for name in view.parameters))


FusedOrder = Literal["sections", "heads", "groups", "pairs"]


@dataclass(frozen=True)
class Options:
    """Settings of the planner for its recognisers (see `MegatronPlanner`)."""

    tp_size: int
    kv_replicate: bool = False
    fused: FusedOrder | None = None
    probe: bool = True


@dataclass
class Context:
    """One model under analysis; `claimed` holds the ids of modules that a recogniser has handled."""

    root: nn.Module
    options: Options
    claimed: set[int] = field(default_factory=set)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Return every module by FQN; shared modules once, under their first name."""
        return dict(self.root.named_modules())

    def chain(self, name: str) -> Iterator[nn.Module]:
        """Yield the module called `name`, then the modules around it up to the root."""
        while True:
            yield self.modules[name]
            if not name:
                return
            name = parent(name)

    def claim(self, *views: LinearView) -> None:
        """Mark linears as handled."""
        self.claimed.update(id(view.module) for view in views)

    def free(self, views: dict[str, LinearView]) -> dict[str, LinearView]:
        """Filter the linears that no recogniser has handled."""
        return {name: view for name, view in views.items() if id(view.module) not in self.claimed}


def parent(name: str) -> str:
    """Return the FQN of the module around `name`."""
    return name.rpartition(".")[0]


def leaf(name: str) -> str:
    """Return the last component of an FQN."""
    return name.rpartition(".")[2]
