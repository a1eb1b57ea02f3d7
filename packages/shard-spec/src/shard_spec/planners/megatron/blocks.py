"""Units of the recognisers: groups of parameters that are sharded together.

Vocabulary of this folder. A *column* linear is cut along its outputs and needs no communication before it; a *row*
linear is cut along its inputs and its outputs are summed. Between them lies the *region*, where every rank works on
its own slice of the channels (heads, for attention). A *unit* is a region with its columns and rows. A unit is right
if slice ``r`` of what the rows read depends on slice ``r`` of what the columns wrote, and on nothing else of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal

from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.planners.megatron.linear import LinearView


class TPBlockKind(StrEnum):
    """Kind of a unit."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "head"


class Evidence(StrEnum):
    """Why we believe that a unit may be cut.

    ``LIBRARY``: a class of torch or transformers whose arrangement is known. ``PROBED``: its forward was run on small
    random tensors, and no slice depended on another. ``NAMED``: names and shapes only, the forward could not be run.
    ``BY_NATURE``: cutting rows of a vocabulary needs no evidence. ``USER_SPECIFIED``: the caller said so.
    """

    LIBRARY = "library"
    PROBED = "probed"
    NAMED = "named"
    BY_NATURE = "by-nature"
    USER_SPECIFIED = "user-specified"


@dataclass(frozen=True)
class Cut:
    """One parameter and the text of its placement on the tensor-parallel axis: ``S(0)``, ``I(0, [8, 8, 8])``."""

    name: str
    placement: str


@dataclass(frozen=True)
class TPBlock:
    """A region with its columns and rows.

    Attributes:
        kind: what it is.
        name: FQN of the smallest module that holds all of it.
        columns: parameters that produce the region's slices (weights and biases).
        rows: weights that read them; their outputs are summed.
        inner: parameters inside the region that are cut with it (one entry per head or channel).
        replicated: parameters inside the region that every rank holds whole. Each rank computes only its slice's part
            of their gradient: whoever executes the plan has to sum it over the axis.
        row_biases: biases added once, after the sum.
        num_pieces: how many equal pieces there are to share out (heads, channels, rows of the vocabulary).
        evidence: why cutting is right.
    """

    kind: TPBlockKind
    name: str
    columns: tuple[Cut, ...]
    rows: tuple[Cut, ...]
    inner: tuple[Cut, ...] = ()
    replicated: tuple[str, ...] = ()
    row_biases: tuple[str, ...] = ()
    num_pieces: int = 1
    evidence: Evidence = Evidence.LIBRARY

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every parameter that is cut."""
        return (*self.columns, *self.inner, *self.rows)


@dataclass(frozen=True)
class Found:
    """Finding of one recogniser at one place: a unit, or why the parameters stay replicated, and remarks.

    Attributes:
        unit: the unit, if it may be cut.
        left_whole: FQNs of parameters that were understood and are not cut, with the reason as a `Problem`.
        notes: remarks that concern no refusal.
    """

    unit: TPBlock | None = None
    left_whole: tuple[tuple[str, Problem], ...] = ()
    notes: tuple[Problem, ...] = ()


FusedOrder = Literal["sections", "heads", "groups", "pairs"]


@dataclass(frozen=True)
class Options:
    """The planner's settings that recognisers read (see `MegatronPlanner`)."""

    tp_size: int
    kv_replicate: bool = False
    fused: FusedOrder | None = None
    probe: bool = True


@dataclass
class Context:
    """One model under analysis. `claimed` holds the modules that some recogniser has dealt with."""

    root: nn.Module
    options: Options
    claimed: set[int] = field(default_factory=set)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by FQN; shared modules once, under their first name."""
        return dict(self.root.named_modules())

    def chain(self, name: str) -> Iterator[nn.Module]:
        """The module called `name`, then the modules around it up to the root."""
        while True:
            yield self.modules[name]
            if not name:
                return
            name = parent(name)

    def claim(self, *views: LinearView) -> None:
        """Marks linears as dealt with."""
        self.claimed.update(id(view.module) for view in views)

    def free(self, views: dict[str, LinearView]) -> dict[str, LinearView]:
        """Those that nobody has dealt with."""
        return {name: view for name, view in views.items() if id(view.module) not in self.claimed}


def parent(name: str) -> str:
    """FQN of the module around `name`."""
    return name.rpartition(".")[0]


def leaf(name: str) -> str:
    """Last part of an FQN."""
    return name.rpartition(".")[2]
