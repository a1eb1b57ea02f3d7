"""The plan of one tensor's way from one layout to another: pure, deterministic, and per rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import add, attrgetter, sub
from typing import TYPE_CHECKING, NamedTuple

from shard_reshard.assign import SMALLEST_PART_BYTES, moves
from shard_reshard.bound import BoundLayout, Cell, Index, new_tuple
from shard_reshard.copies import Copy, cut_cell, make_copy, merge_copies
from shard_reshard.dtypes import FLOATING, ITEMSIZES, dtype_name
from shard_reshard.problems import PlanError, Problem
from shard_reshard.reading import read_fields

if TYPE_CHECKING:
    import torch

FORMAT = 1


class OwnPart(NamedTuple):
    """What one rank does in one stage of a plan."""

    sends: Mapping[int, tuple[Copy, ...]]  # by receiving rank, ascending; without the rank itself
    receives: Mapping[int, tuple[Copy, ...]]  # by sending rank, ascending; without the rank itself
    own: tuple[Copy, ...]  # copies that stay on the rank


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """How one tensor gets from one layout to another. Made by :func:`plan_reshard`.

    Attributes:
        shape: Shape of the global tensor.
        dtype: Name of the source's dtype, for example ``"float32"``.
        out_dtype: Name of the destination's dtype.
        src: Where the tensor is.
        dst: Where it is to be.
        max_workspace_bytes: The most bytes of temporary buffers a rank may use, or None.
        adjoint: The plan moves gradients backwards: what arrives at one place from several ranks is added up.
    """

    shape: Index
    dtype: str
    out_dtype: str
    src: BoundLayout
    dst: BoundLayout
    max_workspace_bytes: int | None = None
    adjoint: bool = False

    # ---- identity ---------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Hex digest of everything the plan says; equal plans have equal digests on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReshardPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> str:
        """The plan as JSON, byte-stable; :meth:`from_json` reads it back."""
        data = {
            "format": FORMAT,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "out_dtype": self.out_dtype,
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "max_workspace_bytes": self.max_workspace_bytes,
            "adjoint": self.adjoint,
        }
        return json.dumps(data, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ReshardPlan:
        """Read what :meth:`to_json` wrote.

        Raises:
            PlanError: ``unknown-format`` for a format of another version, ``malformed-plan`` for what is no plan, and
                what `plan_reshard` would say of a plan that cannot be carried out.
        """
        plan = ReshardPlan(*read_fields(text, FORMAT))
        check_plan(plan.transpose() if plan.adjoint else plan)
        return plan

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Always empty: a plan with problems is not made, `plan_reshard` raises them."""
        return ()

    # ---- facts ------------------------------------------------------------------------------------------------

    @cached_property
    def world_size(self) -> int:
        """Number of ranks that the plan needs: one more than the largest rank it names."""
        return max(self.src.max_rank, self.dst.max_rank) + 1

    @cached_property
    def keeps_place(self) -> bool:
        """Whether source and destination are one layout: every rank copies what it has, reduced or not."""
        return self.src == self.dst

    @cached_property
    def wire_dtype(self) -> str:
        """Name of the dtype on the wire: the smaller of both; the source's where values are still reduced."""
        if self.reduce_op is not None or ITEMSIZES[self.dtype] < ITEMSIZES[self.out_dtype]:
            return self.dtype
        return self.out_dtype

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element on the wire."""
        return ITEMSIZES[self.wire_dtype]

    @cached_property
    def reduce_op(self) -> str | None:
        """How addends become one value on the way: "sum", "min", "max" or "product"; None where there is one."""
        if self.adjoint:
            return "sum"
        if self.keeps_place or self.src.num_addends == 1:
            return None
        op = self.src.reduce_ops[0]
        return "sum" if op == "avg" else op

    @cached_property
    def divisor(self) -> int:
        """What a reduced value is divided by: the number of ranks that are averaged."""
        layout = self.dst if self.adjoint else self.src
        return 1 if self.keeps_place or "avg" not in layout.reduce_ops else _averaged(layout)

    @cached_property
    def stages(self) -> int:
        """Number of exchanges: 2 where replicas pass parts on to each other."""
        return 2 if self.relays else 1

    @cached_property
    def relays(self) -> bool:
        """Whether replicated destinations get their value as scatter and all-gather (see `_busiest`)."""
        if self.keeps_place or self.adjoint or self.dst.num_addends > 1:
            return False
        if self.dst.max_replicas == 1 or 0 in self.shape:
            return False
        if self.src.num_addends > 1 and self.dtype != self.out_dtype:
            return False  # what is passed on would be rounded to the dtype on the wire, replicas would differ
        direct, relayed = _busiest(self)
        return relayed + SMALLEST_PART_BYTES <= direct

    def fill(self, rank: int) -> int | None:
        """What a rank of a partial destination that gets no value holds: 0 in a sum, 1 in a product, else None."""
        if self.adjoint:
            return 0
        if self.keeps_place or self.dst.num_addends == 1 or not set(self.dst.reduce_ops) & {"sum", "product"}:
            return None
        return 1 if self.dst.reduce_ops[0] == "product" else 0

    def local_shapes(self, rank: int, side: str) -> tuple[Index, ...]:
        """Shapes of the local tensors of ``rank`` on ``side``, ``"src"`` or ``"dst"``."""
        return (self.src if side == "src" else self.dst).local_shapes(rank)

    # ---- who moves what ---------------------------------------------------------------------------------------

    def own_part(self, rank: int) -> tuple[OwnPart, ...]:
        """What ``rank`` sends, receives and keeps, one entry for each stage. Looks at no other rank's part."""
        cache = self._own_parts
        if rank not in cache:
            if len(cache) >= 4:  # a process asks for one rank; only simulations ask for all
                cache.pop(next(iter(cache)))
            cache[rank] = self._plan_own_part(rank)
        return cache[rank]

    @cached_property
    def _own_parts(self) -> dict[int, tuple[OwnPart, ...]]:
        return {}

    def _plan_own_part(self, rank: int) -> tuple[OwnPart, ...]:
        arriving, leaving = self._copies_of(rank, self.relays)
        parts = []
        for stage in range(self.stages):
            here = [copy for copy in arriving if copy.stage == stage]
            own = self._ordered([copy for copy in here if copy.src_rank == rank])
            receives = self._by_peer([copy for copy in here if copy.src_rank != rank], attrgetter("src_rank"))
            sends = self._by_peer([copy for copy in leaving if copy.stage == stage], attrgetter("dst_rank"))
            parts.append(OwnPart(sends, receives, own))
        return tuple(parts)

    def _copies_of(self, rank: int, relay: bool) -> tuple[list[Copy], list[Copy]]:
        """All copies that end on ``rank``, and all that begin there and end elsewhere."""
        if self.adjoint:
            forward_in, forward_out = self.transpose()._copies_of(rank, relay=False)
            turned_in = [_turned(copy) for copy in forward_out]
            turned_out = [_turned(copy) for copy in forward_in if copy.src_rank != rank]
            own = [_turned(copy) for copy in forward_in if copy.src_rank == rank]
            return own + turned_in, turned_out
        if self.keeps_place:
            return [
                Copy(
                    0, 0, p.start, _sizes(p.start, p.stop), rank, rank, p.tensor, p.local_start, p.tensor, p.local_start
                )
                for p in self.src.pieces(rank)
            ], []
        if self.src.max_replicas == self.dst.max_replicas == self.src.num_addends == self.dst.num_addends == 1:
            return self._plain_copies_of(rank)
        arriving: list[Copy] = []
        leaving: list[Copy] = []
        for piece in self.dst.pieces(rank):
            for whole in self.dst.cross(piece.start, piece.stop):
                receivers = self._receivers(whole)
                if rank in receivers:
                    for src in self.src.cross(piece.start, piece.stop):
                        dst = cut_cell(whole, src.start, src.stop)
                        for move in moves(src, dst, receivers, self.itemsize, relay, rank):
                            if move.dst_rank == rank:
                                arriving.append(make_copy(move, src, dst))
                            elif move.stage == 1:
                                leaving.append(make_copy(move, src, dst))
        for piece in self.src.pieces(rank):
            for whole in self.src.cross(piece.start, piece.stop):
                for dst in self.dst.cross(piece.start, piece.stop):
                    src = cut_cell(whole, dst.start, dst.stop)
                    for move in moves(src, dst, self._receivers(dst), self.itemsize, relay, rank):
                        if move.src_rank == rank and move.dst_rank != rank and move.stage == 0:
                            leaving.append(make_copy(move, src, dst))
        return arriving, leaving

    def _plain_copies_of(self, rank: int) -> tuple[list[Copy], list[Copy]]:
        """The same where every cell has one holder and one receiver: the case of large worlds, kept lean."""
        arriving: list[Copy] = []
        leaving: list[Copy] = []
        for start, stop, tensor, local_start in self.dst.pieces(rank):
            shift = tuple(map(sub, local_start, start))
            for low, high, there, ((sender,),), tensors in self.src.cross(start, stop):
                number = 0 if tensors is None else tensors[sender]
                sizes, here = tuple(map(sub, high, low)), tuple(map(add, low, shift))
                arriving.append(new_tuple(Copy, (0, 0, low, sizes, sender, rank, number, there, tensor, here)))
        for start, stop, tensor, local_start in self.src.pieces(rank):
            shift = tuple(map(sub, local_start, start))
            for low, high, there, ((receiver,),), tensors in self.dst.cross(start, stop):
                if receiver != rank:
                    number = 0 if tensors is None else tensors[receiver]
                    sizes, here = tuple(map(sub, high, low)), tuple(map(add, low, shift))
                    leaving.append(new_tuple(Copy, (0, 0, low, sizes, rank, receiver, tensor, here, number, there)))
        return arriving, leaving

    def _between(self, src: Cell, dst: Cell, receivers: tuple[int, ...], relay: bool) -> Iterator[Copy]:
        """The copies of the common box of two cells, given cut to it."""
        for move in moves(src, dst, receivers, self.itemsize, relay):
            yield make_copy(move, src, dst)

    def _receivers(self, cell: Cell) -> tuple[int, ...]:
        """Who gets the value of a destination cell: of a pending sum only the first addend, all others are filled."""
        if len(cell.holders) == 1 or self.fill(cell.holders[0][0]) is not None:
            return cell.holders[0]
        return tuple(rank for ranks in cell.holders for rank in ranks)

    def _by_peer(self, copies: list[Copy], peer: Callable[[Copy], int]) -> dict[int, tuple[Copy, ...]]:
        found: dict[int, list[Copy]] = {}
        for copy in copies:
            rank = peer(copy)
            if rank in found:
                found[rank].append(copy)
            else:
                found[rank] = [copy]
        return {rank: self._ordered(found[rank]) for rank in sorted(found)}

    def _ordered(self, copies: list[Copy]) -> tuple[Copy, ...]:
        if len(copies) < 2:
            return tuple(copies)
        # Addends of one region have to keep one shape, so copies that are reduced stay as they are.
        return tuple(sorted(copies) if self.reduce_op is not None else merge_copies(copies))

    def copies(self) -> Iterator[Copy]:
        """Every copy between all ranks, those that stay on their rank included: for pictures and proofs."""
        if self.adjoint:
            yield from (_turned(copy) for copy in self.transpose()._all_copies(relay=False))
        else:
            yield from self._all_copies(self.relays)

    def _all_copies(self, relay: bool) -> Iterator[Copy]:
        if self.keeps_place:
            for rank in self.src.ranks:
                yield from self._copies_of(rank, relay)[0]
            return
        for src, dst in self._crossings():
            yield from self._between(src, dst, self._receivers(dst), relay)

    @cached_property
    def stays(self) -> bool:
        """Whether nothing has to be sent at all, between any two ranks."""
        if self.adjoint:
            return self.transpose().stays
        if self.keeps_place:
            return True
        return self.src.num_addends == 1 and not any(self._lacks(rank) for rank in self.dst.ranks)

    def _lacks(self, rank: int) -> bool:
        """Whether ``rank`` needs an element that it does not hold."""
        held = self.src.pieces(rank)
        for piece in self.dst.pieces(rank):
            cell = next(self.dst.cross(piece.start, piece.stop))
            if rank in self._receivers(cell):
                common = sum(_common(piece.start, piece.stop, other.start, other.stop) for other in held)
                if common < prod(_sizes(piece.start, piece.stop)):
                    return True
        return False

    def _crossings(self) -> Iterator[tuple[Cell, Cell]]:
        for whole in self.src.cells():
            for dst in self.dst.cross(whole.start, whole.stop):
                yield cut_cell(whole, dst.start, dst.stop), dst

    def transpose(self) -> ReshardPlan:
        """The plan of the way back, as gradients take it: every copy turned round, arrivals added up.

        ``plan.transpose().transpose() == plan``.
        """
        return self._transposed

    @cached_property
    def _transposed(self) -> ReshardPlan:
        turned = ReshardPlan(
            self.shape, self.out_dtype, self.dtype, self.dst, self.src, self.max_workspace_bytes, not self.adjoint
        )
        turned.__dict__["_transposed"] = self
        return turned

    # ---- how much ---------------------------------------------------------------------------------------------

    @cached_property
    def bytes_matrix(self) -> tuple[tuple[int, ...], ...]:
        """Bytes on the wire from each rank (row) to each rank (column); what stays on a rank is not counted."""
        matrix = [[0] * self.world_size for _ in range(self.world_size)]
        for copy in self.copies():
            if copy.src_rank != copy.dst_rank:
                matrix[copy.src_rank][copy.dst_rank] += copy.numel * self.itemsize
        return tuple(map(tuple, matrix))

    @cached_property
    def wire_bytes(self) -> int:
        """All bytes that the plan puts on the wire."""
        return sum(map(sum, self.bytes_matrix))

    @cached_property
    def lower_bound(self) -> int:
        """The fewest bytes with which any algorithm could do the same: see docs/design/shard-reshard.md."""
        if self.adjoint:
            return self.transpose().lower_bound
        if self.keeps_place:
            return 0
        elements = 0
        for src, dst in self._crossings():
            receivers = set(self._receivers(dst))
            size = prod(_sizes(src.start, src.stop))
            if len(src.holders) == 1:
                elements += size * len(receivers.difference(src.holders[0]))
            else:
                # A reduction over k addends and a broadcast to n ranks are a tree over all of them.
                fewest = _fewest_sends(src.holders, receivers)
                elements += size * fewest
        return elements * self.itemsize

    def workspace_bytes(self, rank: int) -> int:
        """The most temporary buffer bytes that ``rank`` needs at one time, its tensors being contiguous."""
        from shard_reshard.packing import buffer_bytes
        from shard_reshard.program import build_program

        return buffer_bytes(build_program((self,), rank, self.world_size))

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that ``rank`` needs beside its source tensors: the result and all temporary buffers."""
        out = sum(map(prod, self.dst.local_shapes(rank))) * ITEMSIZES[self.out_dtype]
        return out + self.workspace_bytes(rank)

    def explain(self, name: str | None = None) -> str:
        """Who sends what to whom, in words and numbers; ``name`` heads the text."""
        from shard_reshard.explain import explain

        return explain(self, name)

    def torch_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The torch dtypes of source, wire and destination."""
        from shard_reshard.dtypes import torch_dtype

        return torch_dtype(self.dtype), torch_dtype(self.wire_dtype), torch_dtype(self.out_dtype)


# What torch has no kernels for; found here, because a rank that finds it while it reduces leaves the others waiting.
_NOT_REDUCED = {
    **{name: {"sum", "min", "max"} for name in ("uint16", "uint32", "uint64")},
    "complex32": {"avg"},
    "float4_e2m1fn_x2": {"sum", "avg", "min", "max", "product"},
}


def check_plan(plan: ReshardPlan) -> None:
    """Raise everything that keeps a plan from being carried out."""
    problems = []
    ops = () if plan.keeps_place else plan.src.reduce_ops
    if len(set(ops)) > 1 and not set(ops) <= {"sum", "avg"}:
        hint = "reduce one axis after the other: redistribute to a layout that keeps one of them first"
        problems.append(Problem("mixed-reductions", "src", found=f"partial axes of {', '.join(ops)}", hint=hint))
    if ("avg" in ops and plan.dtype not in FLOATING) or (ops and plan.dtype == "bool"):
        hint = "reduce in a floating dtype, or sum"
        problems.append(Problem("reduction-dtype", "src", found=f"{ops[0]} of {plan.dtype}", hint=hint))
    if plan.dtype in _NOT_REDUCED and set(ops) & _NOT_REDUCED[plan.dtype]:
        hint = "convert it before, to a dtype that torch can add and compare"
        problems.append(Problem("reduction-dtype", "src", found=f"{ops[0]} of {plan.dtype}", hint=hint))
    if ops and plan.dtype.startswith("complex") and set(ops) & {"min", "max"}:
        hint = "complex numbers have no order"
        problems.append(Problem("reduction-dtype", "src", found=f"{ops[0]} of {plan.dtype}", hint=hint))
    pending = () if plan.keeps_place else plan.dst.reduce_ops
    if len({"sum", "product"} & set(pending)) == 2 or ({"sum", "product"} & set(pending) and len(set(pending)) > 1):
        hint = "make all partial axes of the destination one op"
        problems.append(Problem("mixed-reductions", "dst", found=f"partial axes of {', '.join(pending)}", hint=hint))
    if plan.dtype.startswith("complex") and not plan.out_dtype.startswith("complex"):
        hint = "take the real part before"
        problems.append(Problem("lossy-cast", "dtype", found=f"{plan.dtype} to {plan.out_dtype}", hint=hint))
    if "float4_e2m1fn_x2" in (plan.dtype, plan.out_dtype) and plan.dtype != plan.out_dtype:
        hint = "packed pairs of numbers move as they are"
        problems.append(Problem("cast-of-packed", "dtype", found=f"{plan.dtype} to {plan.out_dtype}", hint=hint))
    if plan.max_workspace_bytes is not None and plan.max_workspace_bytes < 1:
        found = f"max_workspace_bytes={plan.max_workspace_bytes}"
        problems.append(Problem("bad-workspace", "max_workspace_bytes", found=found, hint="at least one byte, or None"))
    if problems:
        raise PlanError(problems)


def make_plan(
    src: BoundLayout,
    dst: BoundLayout,
    dtype: torch.dtype | str,
    out_dtype: torch.dtype | str | None = None,
    max_workspace_bytes: int | None = None,
) -> ReshardPlan:
    """A checked plan between two bound layouts."""
    if src.shape != dst.shape:
        found = f"source of {src.shape}, destination of {dst.shape}"
        raise PlanError(Problem("shape-mismatch", found=found, hint="both layouts are of one global tensor"))
    name = dtype_name(dtype)
    out_name = name if out_dtype is None else dtype_name(out_dtype)
    plan = ReshardPlan(src.shape, name, out_name, src, dst, max_workspace_bytes)
    check_plan(plan)
    return plan


def _sizes(start: Index, stop: Index) -> Index:
    return tuple(b - a for a, b in zip(start, stop, strict=True))


def _common(start: Index, stop: Index, other_start: Index, other_stop: Index) -> int:
    """Number of elements that two boxes share."""
    return prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in zip(start, stop, other_start, other_stop, strict=True))


def _turned(copy: Copy) -> Copy:
    """The copy the other way round; the addend becomes the rank it comes from, which fixes the order of sums."""
    return copy._replace(
        addend=copy.dst_rank,
        src_rank=copy.dst_rank,
        dst_rank=copy.src_rank,
        src_tensor=copy.dst_tensor,
        src_start=copy.dst_start,
        dst_tensor=copy.src_tensor,
        dst_start=copy.src_start,
    )


def _averaged(layout: BoundLayout) -> int:
    from shard_reshard.bound import MeshBound

    assert isinstance(layout, MeshBound)
    return prod(
        size
        for size, term in zip(layout.layout.mesh.shape, layout.layout.terms, strict=True)
        if term.kind == "P" and term.arg == "avg"
    )


def _fewest_sends(holders: tuple[tuple[int, ...], ...], receivers: set[int]) -> int:
    """Messages that reduce the addends and bring the result to all receivers, for one element."""
    meets = any(receivers.intersection(ranks) for ranks in holders)
    return len(holders) + len(receivers) - (2 if meets else 1)


def _busiest(plan: ReshardPlan) -> tuple[int, int]:
    """About how many bytes the busiest rank sends or receives: directly, and with a relay among the replicas.

    Directly a holder sends what it has to every replica (its share, where several hold it), and a replica receives
    every addend. With a relay a holder sends what it has once, and a replica passes on and receives its own tensor.
    """
    replicas, holders, addends = plan.dst.max_replicas, plan.src.max_replicas, plan.src.num_addends
    has, gets = plan.src.largest * plan.itemsize, plan.dst.largest * plan.itemsize
    if addends > 1:
        direct = max(has * (replicas - 1), gets * (addends - 1))
        relayed = max(has, gets * addends // replicas) * (replicas - 1) // replicas + gets * (replicas - 1) // replicas
        return direct, relayed
    if plan.src.rank_set >= plan.dst.rank_set and holders >= replicas:
        return 0, 0  # mostly own copies
    return has * replicas // holders, has // holders + gets
