"""Looking up rows of a table of which this rank has a shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from shard_spec.legacy.weight_sharding import WeightSharding


def check_ids(ids: torch.Tensor, num_embeddings: int, name: str) -> None:
    """Raise for ids outside of the table, which otherwise no rank would look up.

    Every rank sees all ids, so every rank raises. On an accelerator nothing is read back: there ``look_up`` lets the
    embedding kernel trap.

    Raises:
        IndexError: As ``torch.nn.functional.embedding`` does.
    """
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_embeddings:
        raise IndexError(f"{name}: ids from {low} to {high} for a table of {num_embeddings} rows")


def look_up(
    ids: torch.Tensor,
    table: torch.Tensor,
    rows: tuple[int, int],
    num_embeddings: int,
    padding_idx: int | None,
    scale_grad_by_freq: bool = False,
) -> torch.Tensor:
    """The rows of this rank's shard of a table; zeros for ids that other ranks have.

    Args:
        ids: Any shape.
        table: ``[size, my_columns]``.
        rows: ``(start, size)``: which rows of the global table these are.
        num_embeddings: Rows of the global table.
        padding_idx: Row that gets no gradient.
        scale_grad_by_freq: Divide gradients by how often an id is in ``ids``, which has to be all ranks' ids.

    Returns:
        ``[*ids.shape, my_columns]``.
    """
    start, size = rows
    if size == 0:
        nothing = table.new_zeros((*ids.shape, table.shape[1]))
        return nothing + table.sum()  # zero, and it keeps the empty shard in the graph
    inside = (ids >= start) & (ids < start + size)
    elsewhere = torch.zeros_like(ids)
    if ids.device.type != "cpu":
        elsewhere = elsewhere.masked_fill((ids < 0) | (ids >= num_embeddings), size + 1)
    local_padding = padding_idx - start if padding_idx is not None and start <= padding_idx < start + size else None
    if scale_grad_by_freq:
        # Ids of other ranks get a row of their own, so that they do not count as occurrences of row 0.
        table = torch.cat([table, table.new_zeros(1, table.shape[1])])
        elsewhere = torch.where(elsewhere == 0, size, elsewhere)
    found = F.embedding(
        torch.where(inside, ids - start, elsewhere), table, local_padding, scale_grad_by_freq=scale_grad_by_freq
    )
    return torch.where(inside.unsqueeze(-1), found, 0)


def renormalize(
    table: torch.Tensor,
    ids: torch.Tensor,
    cut: WeightSharding,
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float,
) -> None:
    """Scale the rows that ``ids`` names down to ``max_norm``, in place, as ``nn.Embedding(max_norm=)`` does.

    Where the columns of a row lie on several ranks, their powers are summed in the group first.

    Args:
        table: This rank's shard, ``[my_rows, my_columns]``, taken under ``no_grad``, before the forward takes its own.
        ids: All ranks' ids.
    """
    me = dist.get_rank(group)
    start, size = cut.rows[me]
    with torch.no_grad():
        inside = (ids >= start) & (ids < start + size)
        mine = torch.unique(ids[inside] - start)
        if all(interval == (0, cut.shape[1]) for interval in cut.columns):
            if mine.numel():
                torch.embedding_renorm_(table.detach(), mine, max_norm, norm_type)
            return
        norms = _norms(table, cut, group, norm_type).narrow(0, start, size)[mine]
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        table.detach()[mine] *= scale.to(table.dtype).unsqueeze(-1)


def _norms(table: torch.Tensor, cut: WeightSharding, group: dist.ProcessGroup, norm_type: float) -> torch.Tensor:
    """The norm of every row of the global table, on every rank."""
    me = dist.get_rank(group)
    start, size = cut.rows[me]
    parts = torch.zeros(cut.shape[0], dtype=torch.float64 if table.dtype == torch.float64 else torch.float32)
    parts = parts.to(table.device)
    values = table.detach().abs().to(parts.dtype)
    infinite = norm_type == float("inf")
    if cut.primary[me] and table.numel():
        parts.narrow(0, start, size).copy_(values.amax(1) if infinite else values.pow(norm_type).sum(1))
    dist.all_reduce(parts, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return parts if infinite else parts.pow(1.0 / norm_type)
