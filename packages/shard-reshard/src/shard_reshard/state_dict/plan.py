"""Plans for many tensors: what each rank knows of its tensors, and the moves that all ranks agree on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from shard_reshard._shared.problems import Problem
from shard_reshard.layout.boxes import ShardMapView
from shard_reshard.layout.parse import LayoutLike
from shard_reshard.layout.shard_map import ShardMap
from shard_reshard.plan.schedule import all_ranks_copies
from shard_reshard.planning.analyze import ReshardPlan, human


class Part(NamedTuple):
    """Destination of a tensor, or of a span of one, in a tensor of another name: a value of ``key_map``.

    ``{"q.weight": Part("qkv.weight", start=0), "k.weight": Part("qkv.weight", start=4096)}`` fuses;
    ``{"qkv.weight": [Part("q.weight", size=4096), Part("k.weight", source_start=4096, size=1024)]}`` takes apart;
    ``{f"experts.{n}.w1": Part("experts.w1", stack=n) for n in range(8)}`` stacks.
    Together the parts of a destination fill it: an element without a source is a problem.

    Attributes:
        name: FQN of the destination.
        start: First index in the destination, along the dim that ``dim`` becomes there.
        dim: Tensor dim of the source.
        source_start: First index along ``dim`` of the source.
        size: How many indices; None: all that the source has from ``source_start`` on.
        fill: Value of the destination's elements that have no source (padding). None: there are none.
        stack: Index in a leading dim that the destination has and the source lacks. None: they have the same dims.
        dims: The source's dims in the destination's order, as ``torch.permute`` takes them. None: the same order.
    """

    name: str
    start: int = 0
    dim: int = 0
    source_start: int = 0
    size: int | None = None
    fill: float | None = None
    stack: int | None = None
    dims: tuple[int, ...] | None = None


KeyMap = Mapping[str, "str | Part | Sequence[Part] | None"]
DstLayouts = Mapping[str, LayoutLike] | Callable[[str, tuple[int, ...]], LayoutLike] | LayoutLike | None


class TensorMeta(NamedTuple):
    """Metadata of one tensor on a rank; plain data that travels between ranks."""

    shape: tuple[int, ...]
    dtype: str
    layout: ShardMap | None  # None for a plain tensor that says nothing of ranks
    tied_to: str  # first name with the same memory, its own where there is none
    on_meta: bool = False  # has no values


@dataclass(frozen=True)
class RankMeta:
    """Metadata of all tensors of one rank."""

    sources: dict[str, TensorMeta]
    outs: dict[str, TensorMeta]
    problems: tuple[Problem, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()  # names of ``outs`` that are one memory here, whatever they declare
    elsewhere: tuple[str, ...] = ()  # names of ``src_layouts`` that another rank has


class TensorMove(NamedTuple):
    """One tensor, or a part of one, and its plan."""

    source: str
    target: str
    plan: ReshardPlan

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a local source tensor with its dims in the destination's order."""
        dims = self.plan.src.dims if isinstance(self.plan.src, ShardMapView) else None
        if dims is None:
            return tensor
        view = tensor.permute([dim for dim in dims if dim is not None])
        for at in (at for at, dim in enumerate(dims) if dim is None):
            view = view.unsqueeze(at)
        return view


@dataclass(frozen=True)
class StateDictPlan:
    """Plan of all tensors of a state dict.

    Attributes:
        moves: Every move, in the order in which they are made.
        buckets: For each collective, the positions of its moves.
        targets: Layout and dtype of every destination tensor.
        aliases: Destination names that are tied to another destination, which is moved for both.
        tied: Destination names that are one memory with others on some rank, and not at the source: their values are
            compared between ranks when they have arrived.
        fills: Destination names with elements that no source has, and the value of these; None: they stay as they are.
    """

    moves: tuple[TensorMove, ...]
    buckets: tuple[tuple[int, ...], ...]
    targets: Mapping[str, tuple[ShardMap, str]]
    aliases: Mapping[str, str]
    tied: frozenset[str] = frozenset()
    fills: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def wire_bytes(self) -> int:
        """All bytes on the wire, with the padding of messages of several dtypes."""
        total = 0
        for bucket in self.buckets:
            plans = [self.moves[at].plan for at in bucket]
            padding = max(plan.itemsize for plan in plans) if len({plan.itemsize for plan in plans}) > 1 else 1
            messages: Counter[tuple[int, int, int]] = Counter()  # bytes by stage and pair of ranks
            for plan in plans if padding > 1 else ():
                for copy in all_ranks_copies(plan):
                    if copy.src_rank != copy.dst_rank:
                        messages[copy.stage, copy.src_rank, copy.dst_rank] += copy.numel * plan.itemsize
            total += sum(-(-size // padding) * padding for size in messages.values())
            total += sum(plan.wire_bytes for plan in plans) if padding == 1 else 0
        return total

    @property
    def lower_bound(self) -> int:
        """The fewest bytes that any algorithm needs."""
        return sum(move.plan.lower_bound for move in self.moves)

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        moves = [(move.source, move.target, move.plan.digest) for move in self.moves]
        facts = [moves, self.buckets, dict(self.aliases), sorted(self.tied), dict(self.fills)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def lines(self) -> list[str]:
        """A line for each move, for ranks to compare."""
        return [
            f"{_title(move)}: {move.plan.dtype} {move.plan.shape} from {move.plan.src.describe()} to "
            f"{move.plan.dst.describe()}, plan {move.plan.digest[:12]}"
            for move in self.moves
        ]

    def explain(self, name: str | None = None) -> str:
        """The plan of the tensor called ``name`` (source or target), or a line for each tensor."""
        chosen = [move for move in self.moves if name in (None, move.source, move.target)]
        if name is not None:
            return "\n".join(move.plan.explain(_title(move)) for move in chosen)
        lines = [
            f"{len(self.moves)} moves in {len(self.buckets)} collectives, {human(self.wire_bytes)} on the wire, "
            f"lower bound {human(self.lower_bound)}"
        ]
        for move in chosen:
            size = human(move.plan.wire_bytes)
            lines.append(f"  {_title(move)}: {move.plan.src.describe()} -> {move.plan.dst.describe()}, {size}")
        return "\n".join(lines)


def _title(move: TensorMove) -> str:
    return move.source if move.source == move.target else f"{move.source} -> {move.target}"
