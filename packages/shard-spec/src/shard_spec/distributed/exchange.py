"""Moving rows and columns between ranks, with autograd.

Vocabulary, used by all sharded forwards:

- *tall*: this rank's rows with every column, ``[my_rows, ..., width]``. What a data-parallel module sees.
- *wide*: every rank's rows with this rank's columns, ``[total_rows, ..., my_columns]``. What a shard of a weight needs.
- *columns*: for each rank of the group the ``(start, size)`` interval of the last dim that it works on. Ranks may work
  on the same columns (then each has a part of a sum) or all on every column.
- *primary*: one rank of each set of replicas; only primaries contribute to a sum.

``spread`` makes wide from tall, ``collect`` makes tall from wide; each is the other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shard_spec import _torch_compat

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

    def row_start(self, rank: int) -> int:
        """Return the first row of ``rank`` in the concatenated batch."""
        return sum(self.rows[:rank])


def gather_rows(tall: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Every rank's rows with this rank's columns: ``[my_rows, ..., width] -> [total_rows, ..., my_columns]``.

    A collective. The backward sums the parts of the gradient that the ranks hold.
    """
    made: torch.Tensor = _Spread.apply(tall, exchange)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return made


def scatter_rows(wide: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """This rank's rows with every column: ``[total_rows, ..., my_columns] -> [my_rows, ..., width]``.

    A collective. Where several primaries worked on a column, their parts are summed in the order of the ranks, half
    precision in float32.
    """
    made: torch.Tensor = _Collect.apply(wide, exchange)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return made


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tall: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return _gather_rows(tall, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_rows(grads[0], ctx.exchange), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return _scatter_rows(wide, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grads[0], ctx.exchange), None


def _gather_rows(tall: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    me = exchange.rank
    everything = all(interval == (0, exchange.width) for interval in exchange.columns)
    if everything and len(set(exchange.rows)) == 1:
        return _all_gather(tall, exchange)
    blocks = [tall.narrow(-1, start, size) for start, size in exchange.columns]
    shapes = [(rows, *tall.shape[1:-1], exchange.columns[me][1]) for rows in exchange.rows]
    return torch.cat(all_to_all(blocks, shapes, exchange.group))


def _all_gather(tall: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    whole = tall.new_empty((exchange.total_rows, *tall.shape[1:]))
    if whole.numel():
        _torch_compat.all_gather_flat(as_bytes(whole), as_bytes(tall.contiguous()), exchange.group)
    return whole


def _scatter_rows(wide: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    me, my_rows = exchange.rank, exchange.rows[exchange.rank]
    none = wide.narrow(0, 0, 0)
    blocks = [
        wide.narrow(0, exchange.row_start(rank), rows) if exchange.primary[me] else none
        for rank, rows in enumerate(exchange.rows)
    ]
    shapes = [
        (my_rows if primary else 0, *wide.shape[1:-1], size)
        for primary, (_, size) in zip(exchange.primary, exchange.columns, strict=True)
    ]
    received = all_to_all(blocks, shapes, exchange.group)
    dtype = torch.float32 if wide.dtype in _HALF else wide.dtype
    tall = wide.new_zeros((my_rows, *wide.shape[1:-1], exchange.width), dtype=dtype)
    for block, primary, (start, size) in zip(received, exchange.primary, exchange.columns, strict=True):
        if primary and tall.dtype == torch.bool:
            tall.narrow(-1, start, size).logical_or_(block)
        elif primary:
            tall.narrow(-1, start, size).add_(block)
    return tall.to(wide.dtype)


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
