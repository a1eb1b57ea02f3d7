"""Moving rows and columns between ranks, with autograd.

Vocabulary, used by all sharded forwards:

- *row-sharded*: this rank's rows with every column, ``[my_rows, ..., width]``. What a data-parallel module sees.
- *column-sharded*: every rank's rows with this rank's columns, ``[total_rows, ..., my_columns]``. What a shard of a
  weight needs.
- *columns*: for each rank of the group the ``(start, size)`` interval of the last dim that it works on. Ranks may work
  on the same columns (then each has a part of a sum) or all on every column.
- *primary*: one rank of each set of replicas; only primaries contribute to a sum.

``gather_rows`` makes column-sharded from row-sharded, ``scatter_rows`` the reverse; each is the other's backward.

`scatter` brings this rank its shard of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shard_spec import _torch_compat
from shard_spec.layout.layout import Layout

Columns = tuple[tuple[int, int], ...]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RowExchange:
    """Rows that each rank holds and columns that it computes.

    Attributes:
        group: The ranks.
        rows: Number of rows that each rank of the group passed, in group order.
        columns: The columns each rank works on, in group order.
        width: Number of columns of a whole row.
        primary: For each rank whether it contributes when parts are summed.
    """

    group: dist.ProcessGroup
    rows: tuple[int, ...]
    columns: Columns
    width: int
    primary: tuple[bool, ...]

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self.group)

    @property
    def total_rows(self) -> int:
        """Rows of the concatenated batch."""
        return sum(self.rows)


def gather_rows(row_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Every rank's rows with this rank's columns: ``[my_rows, ..., width] -> [total_rows, ..., my_columns]``.

    A collective. The backward sums the parts of the gradient that the ranks hold.
    """
    made: torch.Tensor = _GatherRows.apply(row_sharded, exchange)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return made


def scatter_rows(column_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """This rank's rows with every column: ``[total_rows, ..., my_columns] -> [my_rows, ..., width]``.

    A collective. Where several primaries worked on a column, their parts are summed in the order of the ranks, half
    precision in float32.
    """
    made: torch.Tensor = _ScatterRows.apply(column_sharded, exchange)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return made


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return _gather_rows(row_sharded, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_rows(grads[0], ctx.exchange), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return _scatter_rows(column_sharded, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grads[0], ctx.exchange), None


def _gather_rows(row_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    me = exchange.rank
    everything = all(interval == (0, exchange.width) for interval in exchange.columns)
    if everything and len(set(exchange.rows)) == 1:
        return _all_gather(row_sharded, exchange)
    blocks = [row_sharded.narrow(-1, start, size) for start, size in exchange.columns]
    shapes = [(rows, *row_sharded.shape[1:-1], exchange.columns[me][1]) for rows in exchange.rows]
    return torch.cat(all_to_all(blocks, shapes, exchange.group))


def _all_gather(row_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    whole = row_sharded.new_empty((exchange.total_rows, *row_sharded.shape[1:]))
    if whole.numel():
        _torch_compat.all_gather_flat(as_bytes(whole), as_bytes(row_sharded.contiguous()), exchange.group)
    return whole


def _scatter_rows(column_sharded: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    me, my_rows = exchange.rank, exchange.rows[exchange.rank]
    none = column_sharded.narrow(0, 0, 0)
    blocks = [
        column_sharded.narrow(0, sum(exchange.rows[:rank]), rows) if exchange.primary[me] else none
        for rank, rows in enumerate(exchange.rows)
    ]
    shapes = [
        (my_rows if primary else 0, *column_sharded.shape[1:-1], size)
        for primary, (_, size) in zip(exchange.primary, exchange.columns, strict=True)
    ]
    received = all_to_all(blocks, shapes, exchange.group)
    dtype = torch.float32 if column_sharded.dtype in _HALF else column_sharded.dtype
    row_sharded = column_sharded.new_zeros((my_rows, *column_sharded.shape[1:-1], exchange.width), dtype=dtype)
    for block, primary, (start, size) in zip(received, exchange.primary, exchange.columns, strict=True):
        if primary and row_sharded.dtype == torch.bool:
            row_sharded.narrow(-1, start, size).logical_or_(block)
        elif primary:
            row_sharded.narrow(-1, start, size).add_(block)
    return row_sharded.to(column_sharded.dtype)


def all_to_all(
    blocks: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send ``blocks[i]`` to rank ``i`` of the group, receive a tensor of ``shapes[i]`` from it; one collective.

    All blocks have one dtype, any dtype: it travels as bytes.
    """
    like = blocks[0]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    packed = torch.cat([block.reshape(-1) for block in blocks])
    received = like.new_empty(sum(sizes))
    item = like.element_size()
    dist.all_to_all_single(
        as_bytes(received),
        as_bytes(packed),
        [size * item for size in sizes],
        [block.numel() * item for block in blocks],
        group=group,
    )
    return [part.view(tuple(shape)) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat ``uint8`` view of a contiguous tensor of any dtype: what every backend accepts."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.resolve_neg().view(torch.uint8)


def take(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The shard of ``full`` that lies on global rank ``rank``; a view where it is one box."""
    shard = full.detach()
    for dim, intervals in enumerate(layout.intervals(rank, tuple(full.shape))):
        parts = [shard.narrow(dim, start, size) for start, size in intervals]
        shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return shard


def scatter(
    full: torch.Tensor | None,
    layout: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    src: int,
    *,
    primaries: bool = False,
) -> torch.Tensor:
    """This rank's shard of the tensor that rank ``src`` of the group has; one collective, exact bytes.

    Args:
        full: The tensor on ``src``; not looked at on other ranks.
        layout: Where the shards lie; its ranks are those of the group.
        shape: Global shape.
        dtype: Any dtype; it travels as bytes.
        device: Where the shard is to lie, and where the collective runs.
        group: The ranks.
        src: Rank in the group.
        primaries: Whether only one rank of each set of replicas gets its shard; the others' is left empty.
    """
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    local = torch.empty(layout.local_shape(ranks[me], shape), dtype=dtype, device=device)
    if layout.is_replicated and not primaries:
        if me == src:
            assert full is not None
            local.copy_(full.detach())
        return broadcast_(local, group, src)
    item = local.element_size()
    receives_any = [not primaries or layout.is_primary(rank) for rank in ranks]
    numels = [
        _numel(layout.local_shape(rank, shape)) if any_ else 0 for rank, any_ in zip(ranks, receives_any, strict=True)
    ]
    packed = torch.empty(0, dtype=torch.uint8, device=device)
    sends = [0] * len(ranks)
    if me == src:
        assert full is not None
        receivers = [rank for rank, any_ in zip(ranks, receives_any, strict=True) if any_]
        shards = [take(full, layout, rank).reshape(-1) for rank in receivers]
        packed = as_bytes(torch.cat(shards).to(device))
        sends = [numel * item for numel in numels]
    receives = [numels[me] * item if rank == src else 0 for rank in range(len(ranks))]
    if sum(numels):
        received = as_bytes(local)[: sum(receives)]
        dist.all_to_all_single(received, packed, receives, sends, group=group)
    return local


def broadcast_(tensor: torch.Tensor, group: dist.ProcessGroup, src: int) -> torch.Tensor:
    """Fill a contiguous tensor with what rank ``src`` of the group has in it."""
    if tensor.numel():
        dist.broadcast(as_bytes(tensor), group=group, group_src=src)
    return tensor


def gather_shards(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """The whole tensor on every rank, from the shards of a layout without partial sums; one collective."""
    ranks = dist.get_process_group_ranks(group)
    numels = [_numel(layout.local_shape(rank, shape)) for rank in ranks]
    most = max(numels)
    mine = local.new_empty(most)
    mine[: local.numel()] = local.detach().reshape(-1)
    every = local.new_empty(most * len(ranks))
    if most:
        _torch_compat.all_gather_flat(as_bytes(every), as_bytes(mine), group)
    whole = local.new_empty(shape)
    for rank, numel, padded in zip(ranks, numels, torch.split(every, most or 1), strict=False):
        shard = padded[:numel].view(layout.local_shape(rank, shape))
        _put(whole, shard, layout.intervals(rank, shape), 0)
    return whole


def _put(whole: torch.Tensor, shard: torch.Tensor, intervals: Sequence[Sequence[tuple[int, int]]], dim: int) -> None:
    """Copy ``shard`` into its intervals of ``whole``, dim by dim."""
    if dim == whole.dim():
        whole.copy_(shard)
        return
    position = 0
    for start, size in intervals[dim]:
        _put(whole.narrow(dim, start, size), shard.narrow(dim, position, size), intervals, dim + 1)
        position += size


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def fingerprint(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's bytes, formed on its device; equal on ranks that hold the same values."""
    flat = as_bytes(tensor.contiguous())
    total = weighted = 0
    step = 1 << 24
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device) % 65521 + 1
        total += int(part.sum())
        weighted += int((part * places).sum())
    return f"{total:x}-{weighted:x}"
