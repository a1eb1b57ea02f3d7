"""Plans for many tensors: each rank's metadata, and the common list of moves."""

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
from shard_reshard.layout.shard_map import ShardMap, human
from shard_reshard.plan.schedule import all_ranks_copies
from shard_reshard.planning import ReshardPlan


class Part(NamedTuple):
    """Destination of a tensor, or of a span of one, in a tensor of another name: a value of ``key_map``.

    ``{"q.weight": Part("qkv.weight", start=0), "k.weight": Part("qkv.weight", start=4096)}`` fuses;
    ``{"qkv.weight": [Part("q.weight", size=4096), Part("k.weight", source_start=4096, size=1024)]}`` splits;
    ``{f"experts.{n}.w1": Part("experts.w1", stack=n) for n in range(8)}`` stacks.
    Together the sources of a destination fill it: an element without a source is a problem.

    Attributes:
        name: FQN of the destination.
        start: First index in the destination, along its dim for ``dim``.
        dim: Tensor dim of the source.
        source_start: First index along ``dim`` of the source.
        size: Number of indices; None: all of the source from ``source_start`` on.
        fill: Value of the destination's elements without a source (padding). None: there are none.
        stack: Index in a leading dim of the destination that the source lacks. None: they have the same dims.
        dims: The source's dims in the destination's order, as in ``torch.permute``. None: the same order.
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
    """Metadata of one tensor on a rank; plain data, sent between ranks."""

    shape: tuple[int, ...]
    dtype: str
    layout: ShardMap | None  # None for a plain tensor
    tied_to: str  # first name with the same memory, perhaps its own
    on_meta: bool = False  # without values


@dataclass(frozen=True)
class RankMeta:
    """Metadata of all tensors of one rank."""

    sources: dict[str, TensorMeta]
    outs: dict[str, TensorMeta]
    problems: tuple[Problem, ...] = ()
    elsewhere: tuple[str, ...] = ()  # names of ``src_layouts`` missing on this rank


class TensorMove(NamedTuple):
    """One tensor, or a span of one, and its plan."""

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
        moves: Every move, in execution order.
        buckets: For each collective, the positions of its moves.
        targets: Layout and dtype of every destination tensor.
        aliases: Destination names tied to another destination, which is moved for both.
        fills: Destination names with elements without a source, and the value of these; None: they stay unchanged.
    """

    moves: tuple[TensorMove, ...]
    buckets: tuple[tuple[int, ...], ...]
    targets: Mapping[str, tuple[ShardMap, str]]
    aliases: Mapping[str, str]
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
        """Minimum bytes for any algorithm."""
        return sum(move.plan.lower_bound for move in self.moves)

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        moves = [(move.source, move.target, move.plan.digest) for move in self.moves]
        facts = [moves, self.buckets, dict(self.aliases), dict(self.fills)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def lines(self) -> list[str]:
        """One line for each move, for comparison between ranks."""
        return [
            f"{_title(move)}: {move.plan.dtype} {move.plan.shape} from {move.plan.src.describe()} to "
            f"{move.plan.dst.describe()}, plan {move.plan.digest[:12]}"
            for move in self.moves
        ]

    def explain(self, name: str | None = None) -> str:
        """Describe the plan of tensor ``name`` (source or target), or each tensor in a line."""
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
