"""The moving of a planned state dict: an exchange for each bucket, then delivery under the destination's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shard_reshard.agreement import agree
from shard_reshard.bind import LayoutLike
from shard_reshard.dtypes import torch_dtype
from shard_reshard.local_tensors import local_problems
from shard_reshard.members import Members
from shard_reshard.mover import Mover
from shard_reshard.problems import Problem
from shard_reshard.state_dict_facts import local_tensor
from shard_reshard.state_dict_plan import DstLayouts, StateDictPlan, given_layout


class Progress(NamedTuple):
    """Told to ``progress`` after each tensor's arrival."""

    name: str
    done: int
    total: int
    done_bytes: int
    total_bytes: int


class MovedStateDict(dict[str, Any]):
    """Name -> tensor on this rank, in the destination layout: a DTensor where the layout was a DeviceMesh's.

    Attributes:
        plan: What was moved how.
        version: The stamp that the senders gave, None without one.
    """

    plan: StateDictPlan
    version: int | None

    def explain(self, name: str | None = None) -> str:
        """What was moved, see `StateDictPlan.explain`."""
        return self.plan.explain(name)


class Arriving:
    """The destination tensors of this rank: those of ``outs`` where they are filled directly, else fresh ones."""

    def __init__(self, plan: StateDictPlan, rank: int, outs: Mapping[str, Any] | None, device: torch.device) -> None:
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.fresh = not outs
        self.in_place: set[str] = set()  # names that are filled where the caller has them
        for name, (layout, dtype) in plan.targets.items():
            if name in plan.aliases:
                continue
            shapes = layout.local_shapes(rank)
            if outs and name in outs and len(shapes) == 1:
                self.tensors[name] = [local_tensor(outs[name])]
                self.in_place.add(name)
            else:
                self.tensors[name] = [torch.empty(s, dtype=torch_dtype(dtype), device=device) for s in shapes]


def move_buckets(
    plan: StateDictPlan,
    members: Members,
    movers: list[Mover],
    sources: Mapping[str, torch.Tensor],
    arriving: Arriving,
    progress: Callable[[Progress], None] | None,
    check: str,
) -> None:
    calls: list[tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]] = []
    problems: list[Problem] = []
    for mover, bucket in zip(movers, plan.buckets, strict=True):
        moves = [plan.moves[at] for at in bucket]
        given = [
            [sources[m.source]] if m.source in sources and m.plan.src.local_shapes(members.rank) else [] for m in moves
        ]
        outs = [arriving.tensors[m.target] for m in moves]
        calls.append((given, outs))
        wrong = mover.problems(given, None if arriving.fresh else outs)
        named = _named_problems(mover, given, outs, [m.source for m in moves]) if wrong else ()
        for problem, name in named:
            problems.append(Problem(problem.code, f"{name}: {problem.name}", found=problem.found, hint=problem.hint))
    agree(members, f"tensors of state dict plan {plan.digest}", problems, check)
    done_bytes = done = 0
    total_bytes = 0 if progress is None else sum(size_of(move.plan) for move in plan.moves)
    for mover, bucket, (given, outs) in zip(movers, plan.buckets, calls, strict=True):
        flat_given, flat_outs = [t for ts in given for t in ts], [t for ts in outs for t in ts]
        mover.start(flat_given, flat_outs, async_op=False, fresh_outs=arriving.fresh)
        for at in bucket if progress is not None else ():
            done += 1
            done_bytes += size_of(plan.moves[at].plan)
            if progress is not None:
                progress(Progress(plan.moves[at].source, done, len(plan.moves), done_bytes, total_bytes))


def _named_problems(
    mover: Mover, given: list[list[torch.Tensor]], outs: list[list[torch.Tensor]], names: list[str]
) -> Iterator[tuple[Problem, str]]:
    """The problems of a bucket's tensors, each with its tensor's name."""
    rank = mover.members.rank
    for plan, sources, targets, name in zip(mover.plans, given, outs, names, strict=True):
        for problem in (*local_problems(plan, rank, sources), *local_problems(plan, rank, targets, "dst")):
            yield problem, name


def size_of(plan: Any) -> int:
    size = plan.itemsize
    for length in plan.shape:
        size *= length
    return int(size)


_movers: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Mover]] = WeakKeyDictionary()


def mover_for_bucket(members: Members, plan: StateDictPlan, bucket: tuple[int, ...], check: str, keep: bool) -> Mover:
    key = (tuple(plan.moves[at].plan for at in bucket), check, keep)
    movers = _movers.setdefault(members.group, {})
    if key not in movers:
        movers[key] = Mover(key[0], members, keep_workspace=keep, check=check)
        while len(movers) > 1024:
            movers.pop(next(iter(movers)))
    return movers[key]


def deliver(
    plan: StateDictPlan, arriving: Arriving, outs: Mapping[str, Any], dst_layouts: DstLayouts
) -> MovedStateDict:
    """The answer of this rank; fills ``outs`` where tensors arrived beside them."""
    result = MovedStateDict()
    for name, (layout, _) in plan.targets.items():  # in the order of their names
        if name in arriving.in_place:
            result[name] = outs[name]
            continue
        tensors = arriving.tensors[plan.aliases.get(name, name)]
        if not tensors:
            continue
        if name in outs:
            target = local_tensor(outs[name])
            if target.data_ptr() != tensors[0].data_ptr() or target.shape != tensors[0].shape:
                target.copy_(tensors[0])
            result[name] = outs[name]
        else:
            result[name] = _as_asked(tensors, given_layout(name, layout.shape, dst_layouts), layout.shape)
    return result


def _as_asked(tensors: list[torch.Tensor], layout: LayoutLike, shape: tuple[int, ...]) -> Any:
    """A DTensor where a DeviceMesh was given, else the local tensor or tensors."""
    if isinstance(layout, tuple) and len(layout) == 2:
        from torch.distributed.tensor import Placement

        if all(isinstance(placement, Placement) for placement in layout[1]):
            from shard_reshard.dtensors import as_dtensor

            return as_dtensor(tensors[0], layout[0], tuple(layout[1]), shape)
    return tensors[0] if len(tensors) == 1 else tensors
