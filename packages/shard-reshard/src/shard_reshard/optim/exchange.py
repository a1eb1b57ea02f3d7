"""Moves between parameters in their layouts and matrices on their owners: one all-to-all for each chunk."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from shard_reshard._shared.problems import PlanError, Problem, raise_problems
from shard_reshard._shared.sharding_info import ATTRIBUTE, sharding_info_of
from shard_reshard.execution.mover import Finish, Mover
from shard_reshard.group import GroupInfo
from shard_reshard.layout.boxes import BoxShardMap
from shard_reshard.layout.parse import LayoutLike
from shard_reshard.layout.shard_map import ShardMap, by_key
from shard_reshard.optim.plan import Matrix, OwnerPlan, Owners, assign, matrices_of
from shard_reshard.plan import group_problems
from shard_reshard.state_dict.agreement import (
    PLAIN,
    collect_metadata,
    differing,
    plain_checksums,
    plan_of_all,
)
from shard_reshard.state_dict.plan import KeyMap, Part, RankMeta, StateDictPlan, TensorMeta, TensorMove, plan_state_dict

T = TypeVar("T")
_ONE_EXCHANGE = 1 << 62  # chunks are planned here: `plan_state_dict` is not to bound its exchanges


class Metadata(NamedTuple):
    """Metadata of one rank's parameters; plain data, sent between ranks."""

    facts: RankMeta
    checksums: Mapping[str, bytes]  # of plain tensors, which are equal on all ranks
    sections: Mapping[str, tuple[tuple[int, ...], int]]  # sizes of a fused parameter's sections, and their dim
    kinds: Mapping[str, str]  # optimizer and use of each parameter: parameters of one kind share chunks


class Planned(NamedTuple):
    """The plan that all ranks have compared, and the moves that carry it out."""

    owners: OwnerPlan
    there: StateDictPlan  # from the parameters' layouts to the owners
    back: StateDictPlan


def metadata_of(
    parameters: Mapping[str, nn.Parameter],
    kinds: Mapping[str, str],
    layouts: Mapping[str, LayoutLike],
    shapes: Mapping[str, Any],
    members: GroupInfo,
) -> Metadata:
    """Collect shapes, dtypes and layouts of this rank's parameters, and their problems."""
    facts = collect_metadata(parameters, {}, layouts, shapes, members)
    sections: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, parameter in parameters.items():
        info = None if hasattr(parameter, "device_mesh") else sharding_info_of(parameter)
        if info is not None and len(info.sections) > 1:
            sections[name] = tuple(section.size for section in info.sections), info.section_axis()[1]
    return Metadata(facts, plain_checksums(facts, parameters), sections, kinds)


def plan_together(
    members: GroupInfo, mine: Metadata, owners: Owners, bucket_bytes: int, together: Sequence[str]
) -> Planned:
    """Plan owners and moves from the metadata of all ranks, or raise the problems of all on all; a collective."""

    def make(everyone: list[Any], problems: list[Problem]) -> tuple[Planned, list[str]]:
        planned = _planned(everyone, problems, members, owners, bucket_bytes, together)
        return planned, [f"owners={owners!r} together={together!r}", f"owners' plan {planned.owners.digest}"]

    return plan_of_all(members, "WholeMatrices", mine, make)


def _planned(
    everyone: Sequence[Metadata],
    problems: list[Problem],
    members: GroupInfo,
    owners: Owners,
    bucket_bytes: int,
    together: Sequence[str],
) -> Planned:
    problems += differing([metadata.checksums for metadata in everyone], *PLAIN)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if list(other.kinds.items()) != list(first.kinds.items()) and not any(o.facts.problems for o in everyone):
            names = sorted(dict(set(other.kinds.items()) ^ set(first.kinds.items()))) or ["their order"]
            problems.append(
                Problem(
                    "ranks-disagree",
                    "parameters",
                    found=f"rank {rank}: {names[0]}",
                    hint="pass the same parameters on every rank of group=; for pipeline stages the group of one stage",
                )
            )
            break
    problems += [
        Problem(
            "tied-weights",
            name,
            found=f"the memory of {meta.tied_to}",
            hint="pass one of them: an optimizer would update their memory twice",
        )
        for name, meta in first.facts.sources.items()
        if meta.tied_to != name
    ]
    facts = [metadata.facts for metadata in everyone]
    raise_problems([*problems, *(p for fact in facts for p in fact.problems)])
    layouts = {move.source: move.plan for move in plan_state_dict(facts, "rank 0", None, _ONE_EXCHANGE).moves}
    raise_problems(group_problems(layouts.values(), members.size))
    sections = {name: entry for metadata in everyone for name, entry in metadata.sections.items()}
    matrices: list[Matrix] = []
    for name in first.kinds:
        plan = layouts[name]
        matrices += matrices_of(name, plan.shape, plan.dtype, *sections.get(name, ((), 0)), together)
    maps = [layouts[matrix.parameter].src for matrix in matrices]
    kinds = [first.kinds[matrix.parameter] for matrix in matrices]
    owner_plan = assign(matrices, maps, members.size, owners, bucket_bytes, kinds)
    return Planned(owner_plan, moves_there(owner_plan, facts), _moves_back(owner_plan, facts))


def moves_there(owners: OwnerPlan, facts: Sequence[RankMeta]) -> StateDictPlan:
    """Plan the moves of tensors with the parameters' names to the owners; pure."""
    present = {name for fact in facts for name in fact.sources}
    keys = by_key(
        (matrix.parameter, Part(matrix.name, 0, matrix.dim, matrix.start, matrix.size, unstack=matrix.expert))
        for matrix in owners.matrices
        if matrix.parameter in present
    )
    layouts = {part.name: f"rank {owners.owner[part.name]}" for parts in keys.values() for part in parts}
    return plan_state_dict(facts, layouts, keys, _ONE_EXCHANGE)


def _moves_back(owners: OwnerPlan, facts: Sequence[RankMeta]) -> StateDictPlan:
    keys: KeyMap = {
        matrix.name: Part(
            matrix.parameter,
            matrix.start,
            matrix.dim - (matrix.expert is not None and matrix.dim > 0),
            stack=matrix.expert,
        )
        for matrix in owners.matrices
    }
    full: dict[object, ShardMap] = {}
    held: list[dict[str, TensorMeta]] = [{} for _ in facts]
    for matrix, rank in zip(owners.matrices, owners.owners, strict=True):
        layout = full.setdefault((matrix.shape, rank), BoxShardMap.whole(matrix.shape, rank))
        held[rank][matrix.name] = TensorMeta(matrix.shape, matrix.dtype, layout, matrix.name)
    everyone = [RankMeta(own, fact.sources) for own, fact in zip(held, facts, strict=True)]
    return plan_state_dict(everyone, None, keys, _ONE_EXCHANGE, casts="values")


class Leg:
    """One direction of the exchange: from layouts to owners, or back; with a mover for each chunk.

    ``of_source`` is True if a matrix is the source of its move: on the way back, where parameters are written late,
    once all ranks have all values.
    """

    def __init__(self, members: GroupInfo, owners: OwnerPlan, plan: StateDictPlan, of_source: bool) -> None:
        self.members, self.plan, self.of_source = members, plan, of_source
        by_matrix = {move.source if of_source else move.target: move for move in plan.moves}
        names = [matrix.name for matrix in owners.matrices]
        self.chunks = [[(names[at], by_matrix.get(names[at])) for at in chunk] for chunk in owners.chunks]
        self._movers: dict[tuple[int, frozenset[str]], tuple[list[TensorMove], Mover]] = {}

    def replaced(self, plan: StateDictPlan) -> Leg:
        """Return this leg with the moves of another plan in place of those to the same matrices."""
        moves = {move.target: move for move in plan.moves}
        leg = copy.copy(self)
        leg._movers = {}
        leg.chunks = [[(name, moves.get(name, move)) for name, move in chunk] for chunk in self.chunks]
        return leg

    def _mover(self, chunk: int, wanted: frozenset[str]) -> tuple[list[TensorMove], Mover]:
        """Return moves and mover of the wanted matrices of a chunk; those of recent steps are kept."""
        key = chunk, wanted
        if key not in self._movers:
            if len(self._movers) >= _MOST_MOVERS:
                self._movers.pop(next(iter(self._movers)))
            moves = [move for name, move in self.chunks[chunk] if name in wanted and move is not None]
            self._movers[key] = moves, Mover([move.plan for move in moves], self.members, late=self.of_source)
        return self._movers[key]

    def relayed(self, chunk: int, wanted: frozenset[str]) -> set[str]:
        """Return the targets of a chunk on the way back that are written as values arrive, and passed on from there."""
        moves, mover = self._mover(chunk, wanted)
        return set() if mover.exchange.late else {move.target for move in moves}

    def start(
        self,
        chunk: int,
        wanted: frozenset[str],
        sources: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
    ) -> Finish | None:
        """Post a chunk's all-to-all; return what waits for it and unpacks, or None if nothing travels.

        Args:
            chunk: Number of the chunk.
            wanted: Names of its matrices that move, the same on every rank.
            sources: This rank's local tensors by name: of parameters, or of matrices on the way back.
            targets: Tensors to fill by name: of matrices, or of parameters on the way back.
        """
        moves, mover = self._mover(chunk, wanted)
        rank = self.members.rank
        flat = [move.view(sources[move.source]) for move in moves if move.plan.src.local_shapes(rank)]
        outs = [
            tensor.unsqueeze(0) if move.unstacked else tensor
            for move in moves
            if move.plan.dst.local_shapes(rank)
            for tensor in (targets[move.target],)
        ]
        return mover.start(flat, outs, True)[1]


class Exchange:
    """Both directions, and which matrices move for some parameters.

    Attributes:
        members: The group.
        planned: Owners and moves.
        there: Moves to the owners.
        back: Moves to the parameters.
        unlike: Moves of gradients in other layouts than their parameters', by these layouts.
    """

    def __init__(self, members: GroupInfo, planned: Planned) -> None:
        self.members, self.planned = members, planned
        self.there = Leg(members, planned.owners, planned.there, False)
        self.back = Leg(members, planned.owners, planned.back, True)
        self.unlike: dict[tuple[Any, ...], Leg] = {}
        matrices = planned.owners.matrices
        self._by_parameter = by_key((matrix.parameter, matrix.name) for matrix in matrices)
        self._names = [[matrices[at].name for at in chunk] for chunk in planned.owners.chunks]
        self._chunks: dict[frozenset[str], dict[int, frozenset[str]]] = {}

    def chunks_of(self, parameters: Iterable[str]) -> dict[int, frozenset[str]]:
        """Return for each chunk with matrices of these parameters their names."""
        key = frozenset(parameters)
        if key not in self._chunks:
            wanted = {matrix for name in key for matrix in self._by_parameter.get(name, ())}
            inside = [wanted.intersection(chunk) for chunk in self._names]
            if len(self._chunks) >= _MOST_MOVERS:
                self._chunks.pop(next(iter(self._chunks)))
            self._chunks[key] = {number: frozenset(moving) for number, moving in enumerate(inside) if moving}
        return self._chunks[key]


_MOST_MOVERS = 256  # kept; experts without tokens make many subsets of parameters


def in_turn(starts: Iterator[tuple[T, Finish | None]]) -> Iterator[T]:
    """Yield the item of each started exchange once it has arrived; the next one is under way by then."""
    posted: deque[tuple[T, Finish | None]] = deque()
    for entry in starts:
        posted.append(entry)
        del entry  # an exchange's buffers are free once it has arrived
        if len(posted) > 1:
            yield _arrived(posted.popleft())
    while posted:
        yield _arrived(posted.popleft())


def _arrived(entry: tuple[T, Finish | None]) -> T:
    item, finish = entry
    if finish is not None:
        finish()
    return item


def declared_local(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the layout of its parameter: that of a plain shard lacks ``_sharding_info``."""
    if hasattr(value, "device_mesh") or hasattr(value, ATTRIBUTE):
        return value
    if value.layout is not torch.strided:
        raise PlanError(
            Problem(
                "unsupported-tensor",
                name,
                found=f"a gradient of layout {value.layout}",
                hint="only dense gradients are moved: nn.Embedding(sparse=False)",
            )
        )
    view = value.detach()
    if (info := getattr(like, ATTRIBUTE, None)) is not None:
        setattr(view, ATTRIBUTE, info)
    return view


def gradient_plan(members: GroupInfo, owners: OwnerPlan, gradients: Mapping[str, torch.Tensor]) -> StateDictPlan:
    """Plan the way of gradients whose layouts differ from their parameters' (partial sums); a collective."""
    facts = collect_metadata(gradients, {}, {}, {}, members)

    def make(everyone: list[Any], problems: list[Problem]) -> tuple[StateDictPlan, list[str]]:
        plan = moves_there(owners, everyone)
        return plan, [f"gradients' plan {plan.digest}"]

    return plan_of_all(members, "gradients of WholeMatrices", facts, make)
