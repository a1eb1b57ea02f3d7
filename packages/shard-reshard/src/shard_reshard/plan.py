"""The plan of one tensor's way from one layout to another: pure, deterministic, and per rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from shard_reshard.assign import SMALLEST_PART_BYTES
from shard_reshard.bound import BoundLayout, Index
from shard_reshard.copies import Copy
from shard_reshard.dtypes import ITEMSIZES
from shard_reshard.own_parts import OwnPart, all_copies, crossings, plan_own_part, receivers_of, sizes_of, turned
from shard_reshard.problems import Problem
from shard_reshard.reading import read_fields

if TYPE_CHECKING:
    import torch

FORMAT = 1


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
        from shard_reshard.plan_checks import check_plan

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
            cache[rank] = plan_own_part(self, rank)
        return cache[rank]

    @cached_property
    def _own_parts(self) -> dict[int, tuple[OwnPart, ...]]:
        return {}

    def copies(self) -> Iterator[Copy]:
        """Every copy between all ranks, those that stay on their rank included: for pictures and proofs."""
        if self.adjoint:
            yield from (turned(copy) for copy in all_copies(self.transpose(), relay=False))
        else:
            yield from all_copies(self, self.relays)

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
            if rank in receivers_of(self, cell):
                common = sum(_common(piece.start, piece.stop, other.start, other.stop) for other in held)
                if common < prod(sizes_of(piece.start, piece.stop)):
                    return True
        return False

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
        for src, dst in crossings(self):
            receivers = set(receivers_of(self, dst))
            size = prod(sizes_of(src.start, src.stop))
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


def _common(start: Index, stop: Index, other_start: Index, other_stop: Index) -> int:
    """Number of elements that two boxes share."""
    return prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in zip(start, stop, other_start, other_stop, strict=True))


def _averaged(layout: BoundLayout) -> int:
    from shard_reshard.mesh_bound import MeshBound

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
