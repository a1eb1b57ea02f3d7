"""The plan of one tensor as a value: layouts, dtypes, derived quantities, and validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import sub
from typing import Self

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.shard_map import FLOATING, ITEMSIZES, Cell, Index, ShardMap

FORMAT = 1

# Smaller shares are not worth a message: boxes are split among owners in shares of at least this size.
SMALLEST_PART_BYTES = 16 * 1024


@dataclass(frozen=True)
class Plan:
    """Plan of one tensor from one layout to another, as a value.

    Attributes:
        shape: Shape of the global tensor.
        dtype: Name of the source's dtype, for example ``"float32"``.
        out_dtype: Name of the destination's dtype.
        src: Layout of the source.
        dst: Layout of the destination.
        max_workspace_bytes: The most bytes of temporary buffers a rank may use, or None.
        adjoint: True for a plan of gradients: values that arrive at one place from several ranks are added up.
    """

    shape: Index
    dtype: str
    out_dtype: str
    src: ShardMap
    dst: ShardMap
    max_workspace_bytes: int | None = None
    adjoint: bool = False

    # ---- identity ---------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Hex digest of the full content; equal plans have equal digests on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON, byte-stable."""
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

    # ---- derived ----------------------------------------------------------------------------------------------

    @cached_property
    def world_size(self) -> int:
        """Number of ranks needed by the plan: its largest rank plus one."""
        return max(max(side.ranks, default=-1) for side in (self.src, self.dst)) + 1

    @cached_property
    def is_identity(self) -> bool:
        """True if source and destination are one layout: every rank copies locally."""
        return self.src == self.dst

    @cached_property
    def wire_dtype(self) -> str:
        """Name of the dtype in transfers: the smaller of both; the source's if values are still to be reduced."""
        if self.reduce_op is not None or ITEMSIZES[self.dtype] < ITEMSIZES[self.out_dtype]:
            return self.dtype
        return self.out_dtype

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element in a transfer."""
        return ITEMSIZES[self.wire_dtype]

    @cached_property
    def reduce_op(self) -> str | None:
        """Reduction on the way: "sum", "min", "max" or "product"; None for none."""
        if self.adjoint:
            return "sum"
        if self.is_identity or self.src.num_partials == 1:
            return None
        op = self.src.reduce_ops[0]
        return "sum" if op == "avg" else op  # summed, then divided once

    @cached_property
    def divisor(self) -> int:
        """Divisor of a reduced value: the number of averaged ranks."""
        layout = self.dst if self.adjoint else self.src
        return 1 if self.is_identity else layout.averaged

    @cached_property
    def uses_scatter_allgather(self) -> bool:
        """True if replicated destinations are filled by scatter and all-gather (see `_busiest`)."""
        if self.is_identity or self.adjoint or self.dst.num_partials > 1:
            return False
        if self.dst.max_replicas == 1 or 0 in self.shape:  # nothing to relay
            return False
        if self.src.num_partials > 1 and self.dtype != self.out_dtype:
            return False  # relayed values would be rounded to the wire dtype: replicas would differ
        direct, relayed = _busiest(self)
        return relayed + SMALLEST_PART_BYTES <= direct  # a second exchange has to pay off

    def identity_value(self, rank: int) -> int | None:
        """Return the fill value of a partial destination without a contribution: 0 for a sum, 1 for a product."""
        if self.adjoint:
            return 0
        if self.is_identity or self.dst.num_partials == 1 or not set(self.dst.reduce_ops) & {"sum", "product"}:
            return None
        return 1 if self.dst.reduce_ops[0] == "product" else 0

    def transpose(self) -> Self:
        """Return the plan of the gradients: every copy reversed, arrivals added up.

        ``plan.transpose().transpose() == plan``.
        """
        turned: Self | None = self.__dict__.get("_transposed")
        if turned is None:
            turned = type(self)(
                self.shape, self.out_dtype, self.dtype, self.dst, self.src, self.max_workspace_bytes, not self.adjoint
            )
            self.__dict__["_transposed"], turned.__dict__["_transposed"] = turned, self
        return turned


def group_problems(plans: Iterable[Plan], size: int) -> list[Problem]:
    """Report plans with ranks outside of a group of ``size`` ranks."""
    highest = max((plan.world_size for plan in plans), default=0)
    if highest <= size:
        return []
    reason = f"a layout names rank {highest - 1}, the group has {size} ranks"
    return [Problem("rank-outside-mesh", "group", found=reason, hint="pass a larger group=")]


def _busiest(plan: Plan) -> tuple[int, int]:
    """Estimate the bytes of the busiest rank: directly, and with a relay among the replicas.

    Directly an owner sends its data to every replica (its share, if there are several owners), and a replica receives
    every partial value. With a relay an owner sends its data once, and a replica relays and receives its own.
    """
    replicas, owners, addends = plan.dst.max_replicas, plan.src.max_replicas, plan.src.num_partials
    has, gets = plan.src.largest * plan.itemsize, plan.dst.largest * plan.itemsize
    if addends > 1:
        direct = max(has * (replicas - 1), gets * (addends - 1))
        relayed = max(has, gets * addends // replicas) * (replicas - 1) // replicas + gets * (replicas - 1) // replicas
        return direct, relayed
    if plan.src.rank_set >= plan.dst.rank_set and owners >= replicas:
        return 0, 0  # mostly own copies
    return has * replicas // owners, has // owners + gets


_UNSIGNED = ("uint16", "uint32", "uint64")  # torch has no kernels to add or compare them


def _size(cell: Cell) -> int:
    return prod(map(sub, cell.stop, cell.start))


def check_plan(plan: Plan) -> None:
    """Raise everything that keeps a plan from being carried out."""
    problems: list[Problem] = []

    def add(code: str, name: str, found: str, hint: str) -> None:
        problems.append(Problem(code, name, found=found, hint=hint))

    ops = set() if plan.is_identity else set(plan.src.reduce_ops)
    pending = set() if plan.is_identity else set(plan.dst.reduce_ops)
    wanted = plan.dst.cells() if plan.src.holes else ()
    if any(sum(map(_size, plan.src.cross(cell.start, cell.stop))) < _size(cell) for cell in wanted):
        add("boxes-incomplete", "src", "elements that no rank has", "only a destination may leave elements out")
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        hint = "reduce one axis after the other: redistribute to a layout that keeps one of them first"
        add("unsupported-dtype", "src", f"partial axes of {_listed(ops)}", hint)
    # Found here, because a rank that finds it while it reduces leaves the others waiting.
    is_complex, is_unsigned = plan.dtype.startswith("complex"), plan.dtype in _UNSIGNED
    if (
        ("avg" in ops and plan.dtype not in FLOATING)
        or (ops and plan.dtype == "bool")
        or (is_unsigned and ops - {"product"})
        or (is_complex and ops & {"min", "max"})
    ):
        hint = "convert it before, to a dtype that torch can add and compare"
        add("unsupported-dtype", "src", f"{_listed(ops)} of {plan.dtype}", hint)
    if len(pending) > 1 and pending & {"sum", "product"}:
        hint = "make all partial axes of the destination one op"
        add("unsupported-dtype", "dst", f"partial axes of {_listed(pending)}", hint)
    if is_complex and not plan.out_dtype.startswith("complex"):
        add("dtype-mismatch", "dtype", f"{plan.dtype} to {plan.out_dtype}", "take the real part before")
    limit = plan.max_workspace_bytes
    if limit is not None and limit < 1:
        reason = f"max_workspace_bytes={limit}"
        add("invalid-argument", "max_workspace_bytes", reason, "at least one byte, or None")
    if problems:
        raise PlanError(problems)


def _listed(ops: set[str]) -> str:
    return ", ".join(sorted(ops))
