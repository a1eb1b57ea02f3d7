"""Plan of owners, one rank for each matrix: from shapes and layouts alone, equal on every rank.

Vocabulary of this folder:
    matrix: a tensor that an optimizer updates in full, such as the q rows of a fused weight or one expert of a stack.
    owner: the rank that holds a matrix's master copy and its optimizer state, both as plain tensors.
    chunk: matrices of all owners whose gradients move in one all-to-all; each owner updates its own of them at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from math import prod
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

from shard_reshard._shared.owners import owners_of, update_work
from shard_reshard._shared.problems import PlanError, Problem, raise_problems
from shard_reshard.layout.parse import LayoutLike, resolve_layout
from shard_reshard.layout.shard_map import ITEMSIZES, Index, ShardMap, dtype_name, human, sizes_of

if TYPE_CHECKING:
    import torch

Owners = int | Sequence[int] | Mapping[str, int] | None


class Matrix(NamedTuple):
    """A tensor that one rank updates in full: a parameter, a section of it, or one index of its first dim.

    Attributes:
        name: The parameter's FQN, with ``[3]`` for expert 3 of a stack and ``:1`` for the second section.
        parameter: FQN of the parameter.
        shape: Shape of the matrix.
        dtype: Name of its dtype.
        expert: Index in the parameter's first dim, which the matrix lacks. None: it has the parameter's dims.
        dim: Dim of the parameter along which it is a section.
        start: First index along ``dim``.
        size: Number of indices along ``dim``. None: all of them.
    """

    name: str
    parameter: str
    shape: Index
    dtype: str
    expert: int | None = None
    dim: int = 0
    start: int = 0
    size: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the full matrix."""
        return prod(self.shape) * ITEMSIZES[self.dtype]

    @property
    def work(self) -> int:
        """Multiplications of an update such as Newton-Schulz: m n min(m, n); of other tensors the element count."""
        return update_work(self.shape)

    def window(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this matrix as a view of a tensor with the parameter's global shape."""
        if self.size is not None:
            tensor = tensor.narrow(self.dim, self.start, self.size)
        return tensor if self.expert is None else tensor[self.expert]


def matrices_of(
    name: str, shape: Index, dtype: str, sections: Sequence[int] = (), dim: int = 0, together: Sequence[str] = ()
) -> list[Matrix]:
    """Return the matrices of a parameter.

    A parameter of three dims is a stack of matrices; a fused one consists of its ``sections`` along ``dim``. One that
    matches a glob of ``together`` is a single tensor.
    """
    if any(fnmatchcase(name, glob) for glob in together):
        return [Matrix(name, name, shape, dtype)]
    stacked = len(shape) == 3 and shape[0] > 0 and not (sections and dim == 0)
    matrices = []
    for index in range(shape[0]) if stacked else (None,):
        title = name if index is None else f"{name}[{index}]"
        own, start = shape if index is None else shape[1:], 0
        if len(sections) < 2:
            matrices.append(Matrix(title, name, own, dtype, index))
            continue
        at = dim - stacked
        for number, size in enumerate(sections):
            if size:
                sizes = (*own[:at], size, *own[at + 1 :])
                matrices.append(Matrix(f"{title}:{number}", name, sizes, dtype, index, dim, start, size))
            start += size
    return matrices


def unmatched(globs: Sequence[str], names: Iterable[str]) -> list[Problem]:
    """Return the globs of ``together`` that match no parameter."""
    names = list(names)
    return [
        Problem("unmatched-pattern", "together", found=repr(glob), hint="leave it out, or correct it")
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in names)
    ]


@dataclass(frozen=True)
class OwnerPlan:
    """Owner and chunk of every matrix, as a value; printable, and the same on every rank.

    Attributes:
        matrices: All matrices, in the order of their parameters.
        owners: For each matrix the rank of the group that owns it.
        chunks: For each exchange the positions of its matrices.
        world_size: Number of ranks in the group.
        bucket_bytes: The most bytes of an owner's matrices in one exchange, unless a single matrix has more.
        sent: For each matrix the bytes that its gradient and its new value put on the wire in a step. No algorithm
            with this owner sends fewer. None if the layouts are unknown.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    world_size: int
    bucket_bytes: int
    sent: tuple[tuple[int, int], ...] | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Always empty: what is wrong with shapes, layouts or owners is raised when the plan is made."""
        return ()

    @property
    def owner(self) -> dict[str, int]:
        """Owner by name of the matrix."""
        return {matrix.name: rank for matrix, rank in zip(self.matrices, self.owners, strict=True)}

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Multiplications of an update on each rank; see `Matrix.work`."""
        return tuple(self._by_rank(lambda matrix: matrix.work))

    @cached_property
    def owned_bytes(self) -> tuple[int, ...]:
        """Bytes of master copies on each rank; optimizer state comes on top."""
        return tuple(self._by_rank(lambda matrix: matrix.num_bytes))

    @property
    def lower_bound(self) -> int:
        """Bytes on the wire of all ranks in a step, gradients and new values: the least with these owners."""
        return sum(map(sum, self.sent or ()))

    @cached_property
    def digest(self) -> str:
        """Hex digest; equal on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON, byte-stable."""
        data = {
            "matrices": [list(matrix) for matrix in self.matrices],
            "owners": self.owners,
            "chunks": self.chunks,
            "world_size": self.world_size,
            "bucket_bytes": self.bucket_bytes,
            "sent": self.sent,
        }
        return json.dumps(data, separators=(",", ":"), sort_keys=True)

    def explain(self, name: str | None = None) -> str:
        """Return the plan in words and numbers; for ``name`` the lines of one parameter or matrix."""
        lines = []
        if name is None:
            count, ranks = len(self.matrices), len(set(self.owners))
            lines.append(f"{count} matrices on {ranks} of {self.world_size} ranks, plan {self.digest[:12]}")
            lines.append(f"  update  load max/mean {_unevenness(self.work)}, by m n min(m, n) of each matrix")
            largest = max(range(self.world_size), key=self.owned_bytes.__getitem__)
            size = human(self.owned_bytes[largest])
            lines.append(
                f"  memory  max/mean {_unevenness(self.owned_bytes)}, at most {size} of masters on rank {largest}"
            )
            if self.sent is not None:
                there, back = (sum(pair[side] for pair in self.sent) for side in (0, 1))
                text = f"  sent    {human(there)} of gradients and {human(back)} of values a step, the lower bound"
                lines.append(f"{text}; {human((there + back) // self.world_size)} a rank")
            lines.append(
                f"  chunks  {len(self.chunks)}, in each of an owner's matrices {human(self.bucket_bytes)} or one"
            )
        chunk_of = {at: number for number, chunk in enumerate(self.chunks) for at in chunk}
        for at, matrix in enumerate(self.matrices):
            if name in (None, matrix.name, matrix.parameter):
                shape = " x ".join(map(str, matrix.shape)) or "scalar"
                text = f"  {matrix.name}: {shape} {matrix.dtype} on rank {self.owners[at]}, chunk {chunk_of[at]}"
                lines.append(text if self.sent is None else f"{text}, {human(sum(self.sent[at]))} sent")
        if not lines:
            raise PlanError(
                Problem("unknown-name", "explain", found=repr(name), hint="print(plan.explain()) lists all")
            )
        return "\n".join(lines)

    def _by_rank(self, number: Callable[[Matrix], int]) -> list[int]:
        total = [0] * self.world_size
        for matrix, rank in zip(self.matrices, self.owners, strict=True):
            total[rank] += number(matrix)
        return total


def _unevenness(loads: Sequence[int]) -> str:
    total = sum(loads)
    return f"{max(loads) * len(loads) / total:.2f}" if total else "1.00"


def plan_owners(
    shapes: Mapping[str, Sequence[int]],
    world_size: int,
    layouts: Mapping[str, LayoutLike] | LayoutLike | None = None,
    *,
    dtype: torch.dtype | str = "float32",
    owners: Owners = None,
    bucket_bytes: int = 64 * 2**20,
    together: Sequence[str] = (),
) -> OwnerPlan:
    """Plan from shapes alone which rank owns which matrix, before there is a job.

    `WholeMatrices` makes the same plan from the parameters themselves.

    Args:
        shapes: Global shape of each parameter by FQN. A shape of three dims is a stack of matrices.
        world_size: Number of ranks in the group.
        layouts: Layout of each parameter, or one for all, to know what is sent. None: the bytes are left out.
        dtype: Dtype of the parameters.
        owners: See `WholeMatrices`.
        bucket_bytes: The most bytes of an owner's matrices in one exchange.
        together: Globs of parameters that are one tensor each, whatever their number of dims.

    Returns:
        A plan with ``explain()``, ``to_json()``, ``digest``, ``owner``, ``work`` and ``owned_bytes``.

    Raises:
        PlanError: For layouts that do not fit, and for ``owners`` outside of the group.
    """
    matrices: list[Matrix] = []
    maps: list[ShardMap | None] = []
    problems = unmatched(together, shapes)
    resolved: dict[tuple[int, Index], ShardMap] = {}
    for name, size in shapes.items():
        shape = sizes_of(size)
        wanted = layouts.get(name) if isinstance(layouts, Mapping) else layouts
        try:
            if wanted is not None and (id(wanted), shape) not in resolved:
                resolved[id(wanted), shape] = resolve_layout(wanted, shape)
        except PlanError as error:
            problems += [problem.named(name) for problem in error.problems]
            continue
        own = matrices_of(name, shape, dtype_name(dtype), together=together)
        matrices += own
        maps += [resolved.get((id(wanted), shape))] * len(own)
    raise_problems(problems)
    return assign(matrices, maps, world_size, owners, bucket_bytes)


def assign(
    matrices: Sequence[Matrix],
    maps: Sequence[ShardMap | None],
    world_size: int,
    owners: Owners = None,
    bucket_bytes: int = 64 * 2**20,
    kinds: Sequence[object] | None = None,
) -> OwnerPlan:
    """Plan owners and chunks.

    ``maps`` are the layouts of the matrices' parameters. Only matrices of one kind share a chunk.
    """
    limit: Any = bucket_bytes  # callers are untyped
    if not isinstance(limit, int) or limit < 1:
        raise PlanError(Problem("invalid-argument", "bucket_bytes", found=repr(bucket_bytes), hint="at least one byte"))
    allowed, fixed = _allowed(matrices, world_size, owners)
    holdings = _Holdings()
    held = [holdings.held(matrix, layout, world_size) for matrix, layout in zip(matrices, maps, strict=True)]
    costs = [(matrix.work, matrix.num_bytes) for matrix in matrices]
    full_on = [
        [rank for rank, count in has.items() if count == prod(matrix.shape)]
        for matrix, has in zip(matrices, held, strict=True)
    ]
    by_caller = [fixed.get(matrix.name, fixed.get(matrix.parameter)) for matrix in matrices]
    chosen = owners_of(costs, full_on, world_size, allowed, by_caller)
    sent = None
    if all(layout is not None for layout in maps):
        sent = tuple(holdings.sent(matrix, has, rank) for matrix, has, rank in zip(matrices, held, chosen, strict=True))
    chunks = _chunks(matrices, chosen, bucket_bytes, kinds or [None] * len(matrices))
    return OwnerPlan(tuple(matrices), tuple(chosen), chunks, world_size, bucket_bytes, sent)


def _allowed(matrices: Sequence[Matrix], world_size: int, owners: Owners) -> tuple[list[int], Mapping[str, int]]:
    """Return the ranks that may own matrices, and the owners that the caller gives by name."""
    hint = f"ranks of the group, 0 to {world_size - 1}: a number of them, a list, or a rank for each parameter"
    fixed: Mapping[str, int] = {}
    allowed: Any = owners
    if owners is None or isinstance(owners, Mapping):
        allowed, fixed = range(world_size), owners or {}
    elif isinstance(owners, int):  # spread over the group: neighbouring ranks share links
        allowed = [at * world_size // owners for at in range(owners)] if 1 <= owners <= world_size else []
    listed = list(allowed)
    if not listed or any(not isinstance(r, int) or not 0 <= r < world_size for r in (*listed, *fixed.values())):
        raise PlanError(Problem("invalid-argument", "owners", found=f"{owners!r:.200}", hint=hint))
    names = {name for matrix in matrices for name in (matrix.name, matrix.parameter)}
    unknown = [name for name in fixed if name not in names]
    raise_problems(Problem("unknown-name", "owners", found=repr(name), hint="name a parameter") for name in unknown)
    return sorted(set(listed)), fixed


class _Holdings:
    """Elements of each matrix on each rank, computed once for equal layouts and windows."""

    def __init__(self) -> None:
        # With the layout, so that its id is not used again.
        self._known: dict[object, tuple[ShardMap, dict[int, int]]] = {}

    def held(self, matrix: Matrix, layout: ShardMap | None, world_size: int) -> dict[int, int]:
        """Return the number of the matrix's elements on each rank that has some; empty without a layout."""
        if layout is None:
            return {}
        key = id(layout), matrix.expert, matrix.dim, matrix.start, matrix.size
        if key not in self._known:
            if (last := max(layout.ranks, default=-1)) >= world_size:
                raise PlanError(
                    Problem(
                        "rank-outside-mesh",
                        matrix.parameter,
                        found=f"the layout names rank {last}, the group has {world_size} ranks",
                        hint="pass a larger group",
                    )
                )
            low, high = [0] * len(layout.shape), list(layout.shape)
            if matrix.size is not None:
                low[matrix.dim], high[matrix.dim] = matrix.start, matrix.start + matrix.size
            if matrix.expert is not None:
                low[0], high[0] = matrix.expert, matrix.expert + 1
            counts: dict[int, int] = {}
            for cell in layout.cross(tuple(low), tuple(high)):
                size = prod(map(sub, cell.stop, cell.start))
                for rank in chain.from_iterable(cell.owners):
                    counts[rank] = counts.get(rank, 0) + size
            self._known[key] = layout, counts
        return self._known[key][1]

    @staticmethod
    def sent(matrix: Matrix, held: Mapping[int, int], owner: int) -> tuple[int, int]:
        """Return the least bytes of a gradient's way to the owner, and of the value's way back."""
        own, itemsize = held.get(owner, 0), ITEMSIZES[matrix.dtype]
        return (prod(matrix.shape) - own) * itemsize, (sum(held.values()) - own) * itemsize


def _chunks(
    matrices: Sequence[Matrix], owners: Sequence[int], bucket_bytes: int, kinds: Iterable[object]
) -> tuple[tuple[int, ...], ...]:
    """Group matrices into exchanges: the largest of every owner in the first one, so that all owners have work."""
    by_kind: dict[object, dict[int, list[int]]] = {}
    for at, kind in enumerate(kinds):
        by_kind.setdefault(kind, {}).setdefault(owners[at], []).append(at)
    chunks: list[tuple[int, ...]] = []
    for by_owner in by_kind.values():
        queues = [sorted(own, key=lambda at: (-matrices[at].work, at)) for _, own in sorted(by_owner.items())]
        chunk: list[int] = []
        sizes = [0] * len(queues)
        for number in range(max(map(len, queues))):
            layer = [(place, queue[number]) for place, queue in enumerate(queues) if number < len(queue)]
            if chunk and any(sizes[place] + matrices[at].num_bytes > bucket_bytes for place, at in layer):
                chunks.append(tuple(sorted(chunk)))
                chunk, sizes = [], [0] * len(queues)
            for place, at in layer:
                sizes[place] += matrices[at].num_bytes
                chunk.append(at)
        chunks.append(tuple(sorted(chunk)))
    return tuple(chunks)
