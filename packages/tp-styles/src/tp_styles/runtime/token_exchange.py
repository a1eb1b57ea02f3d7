"""Exchange of tokens between the ranks that hold a layer's experts: out to the experts, and back.

A **pair** is one token with one of its selected experts. Pairs are sent ordered by expert, so each rank receives blocks
by sender, and within a block rows by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tp_styles._shared.consensus import named_collective
from tp_styles.problems import Problem, StyleInputError


@dataclass(frozen=True)
class RoutedTokens:
    """Rows that arrived at this rank for its experts.

    Attributes:
        hidden: The rows, `[R, width]`.
        experts: Index of each row's expert, `[R]`, counted from 0 among this rank's experts.
        weights: Routing weight of each row, `[R]`, with a gradient that returns to the sender; None without weights.
        state: What `combine` needs; only the dispatcher reads it.
    """

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor | None
    state: Any


class TokenDispatcher(Protocol):
    """Brings tokens to experts and back, with gradients: the place for kernels such as DeepEP.

    Every rank of the group calls both methods once in each forward, a rank without tokens too. Both are differentiable,
    and their backward runs on every rank: results are connected to the arguments even if they have no rows.
    """

    def dispatch(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor | None,
        *,
        num_experts: int,
        group: dist.ProcessGroup,
    ) -> RoutedTokens:
        """Send each token to the ranks of its experts.

        Rank r of n holds the experts `r * step` to `(r + 1) * step`, where `step` is `num_experts / n` rounded up.

        Args:
            hidden: This rank's tokens, `[T, width]`; T differs between ranks and may be 0.
            experts: Global indices of each token's experts, `[T, k]`; `num_experts` stands for none.
            weights: Routing weights, `[T, k]`; None where the module takes none.
            num_experts: Number of all experts.
            group: The ranks.
        """
        ...

    def combine(self, outputs: torch.Tensor, state: Any) -> torch.Tensor:
        """Return the sum of each token's expert outputs, `[T, width]`, on the rank of the token.

        Args:
            outputs: One row for each of `RoutedTokens.hidden`, `[R, width]`.
            state: That of `dispatch`.
        """
        ...


class Splits(NamedTuple):
    """Pairs of one exchange: how many go to and come from each rank, and where they belong on this rank.

    Attributes:
        sent: Pairs to each rank.
        received: Pairs from each rank.
        order: Index of each sent pair among this rank's `T * k` pairs.
        shape: T and k.
        group: The ranks.
    """

    sent: list[int]
    received: list[int]
    order: torch.Tensor
    shape: tuple[int, int]
    group: dist.ProcessGroup


# Name of these exchanges in the error of a rank whose peer died, or raised before it came here.
SUBJECT = "the exchange of tokens with their experts"

# Flags that go to every rank with the counts of pairs.
BAD_INDEX, RAISED = 1, 2


class AllToAllDispatcher:
    """One all-to-all to the experts and one back. The counts of pairs go ahead in a small one.

    The counts are read on the host, once a layer and pass: on CUDA the host waits there for the device.
    """

    def dispatch(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor | None,
        *,
        num_experts: int,
        group: dist.ProcessGroup,
    ) -> RoutedTokens:
        """See `TokenDispatcher.dispatch`.

        Raises:
            StyleInputError: An index is outside of 0..num_experts; on every rank.
        """
        num_tokens, k = experts.shape
        flat = experts.reshape(-1)
        with torch.no_grad():
            order = flat.argsort(stable=True)  # by expert, so by rank; pairs without an expert come last
            here, theirs, sent, received = exchange_counts(flat, num_experts, group)
            splits = Splits(sent, received, order[: sum(sent)], (num_tokens, k), group)
        parts = [_Rows.apply(hidden, splits.order, k)]  # type: ignore[no-untyped-call]  # torch's Function
        if weights is not None:
            parts.append(weights.reshape(-1)[splits.order])
        arrived = _Exchange.apply(group, tuple(sent), tuple(received), *parts)  # type: ignore[no-untyped-call]
        local = here.repeat(theirs.shape[0]).repeat_interleave(theirs.reshape(-1), output_size=sum(received))
        return RoutedTokens(arrived[0], local, arrived[1] if weights is not None else None, splits)

    def combine(self, outputs: torch.Tensor, state: Splits) -> torch.Tensor:
        """See `TokenDispatcher.combine`."""
        (back,) = _Exchange.apply(  # type: ignore[no-untyped-call]  # torch's Function
            state.group, tuple(state.received), tuple(state.sent), outputs
        )
        return sum_of_pairs(back, state.order, *state.shape)

    def __repr__(self) -> str:
        return "AllToAllDispatcher()"


def exchange_counts(
    experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Tell each rank how many pairs it gets for each of its experts. One host synchronisation.

    Args:
        experts: Global expert of each pair, `[P]`.
        num_experts: Number of all experts.
        group: The ranks.

    Returns:
        Indices of a rank's experts; counts by sender and expert, `[n, step]`; pairs to and from each rank.

    Raises:
        StyleInputError: An index on some rank is outside of 0..num_experts, or a rank raised before its exchange; on
            every rank.
    """
    size = dist.get_world_size(group)
    step = -(-num_experts // size)  # as torch.chunk: the last ranks may hold fewer experts, or none
    counts = experts.new_zeros(size * step + 1, dtype=torch.int64)
    none = torch.where(experts < num_experts, experts, size * step).clamp(0, size * step)
    counts.scatter_add_(0, none.to(torch.int64), torch.ones_like(experts, dtype=torch.int64))
    flag = BAD_INDEX * ((experts < 0) | (experts > num_experts)).any()
    ours = torch.cat([counts[:-1].view(size, step), flag.expand(size, 1).to(torch.int64)], dim=1)
    theirs = torch.empty_like(ours)
    with named_collective(SUBJECT):
        dist.all_to_all_single(theirs, ours, group=group)  # equal splits: the only exchange of known size
    sums = torch.stack([ours[:, :-1].sum(1), theirs[:, :-1].sum(1), theirs[:, -1]]).tolist()
    sent, received, flags = sums
    if RAISED in flags:
        raise StyleInputError(
            Problem(
                "rank-failed",
                "experts",
                found=f"an error on rank {flags.index(RAISED)}",
                hint="see the traceback of that rank: it has not sent its tokens",
            )
        )
    if any(flags):  # every rank has every rank's flag
        ranks = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        raise StyleInputError(
            Problem(
                "invalid-argument",
                "experts",
                found=f"an index on rank {ranks}",
                hint=f"a router selects experts 0 to {num_experts - 1}; {num_experts} stands for none",
            )
        )
    return torch.arange(step, device=experts.device), theirs[:, :-1], sent, received


def announce_error(num_experts: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Take the place of `exchange_counts` on a rank that raises: its peers, which wait there, raise too."""
    size = dist.get_world_size(group)
    ours = torch.zeros(size, -(-num_experts // size) + 1, dtype=torch.int64, device=device)
    ours[:, -1] = RAISED
    dist.all_to_all_single(torch.empty_like(ours), ours, group=group)


def sum_of_pairs(rows: torch.Tensor, order: torch.Tensor, num_tokens: int, k: int) -> torch.Tensor:
    """Return the sum over each token's pairs, `[T, width]`; a pair without a row adds nothing.

    The index is saved for backward on every rank: a recomputation under activation checkpointing, which ends with the
    last saved tensor, ends behind both exchanges everywhere.

    Args:
        rows: Rows of pairs, `[P, width]`.
        order: Index of each among the `T * k` pairs.
        num_tokens: T.
        k: Pairs of a token.
    """
    pairs = rows.new_zeros(num_tokens * k, rows.shape[-1]).index_copy(0, order, rows)
    return pairs.view(num_tokens, k, rows.shape[-1]).sum(1)


class _Rows(torch.autograd.Function):
    """A row for each pair. The gradient is summed in the order of the pairs, so it is the same in every run."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.shape = hidden.shape[0], k
        return hidden.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return sum_of_pairs(gradient, order, *ctx.shape), None, None


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, in one all-to-all for all parts; gradients take the way back in one."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.splits = group, received, sent
        packed = parts[0].contiguous() if len(parts) == 1 else _packed(parts)
        arrived = packed.new_empty(sum(received), *packed.shape[1:])
        with named_collective(SUBJECT):
            dist.all_to_all_single(arrived, packed, list(received), list(sent), group=group)
        return (arrived,) if len(parts) == 1 else _unpacked(arrived, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        returned = _Exchange.apply(*ctx.splits, *gradients)  # type: ignore[no-untyped-call]  # torch's Function
        return None, None, None, *returned


def _packed(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return one row for each pair, with the columns of all parts; bytes if their types differ."""
    columns = [part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts]
    if len({part.dtype for part in parts}) > 1:
        columns = [column.contiguous().view(torch.uint8) for column in columns]
    return torch.cat(columns, dim=1)


def _unpacked(rows: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    width = [part.shape[1:].numel() for part in parts]
    if len({part.dtype for part in parts}) > 1:
        width = [count * part.itemsize for count, part in zip(width, parts, strict=True)]
    # Clones, not `contiguous()`: one row counts as contiguous with any stride, which a view of another type refuses.
    columns = [column.clone(memory_format=torch.contiguous_format) for column in rows.split(width, dim=1)]
    shapes = [(rows.shape[0], *part.shape[1:]) for part in parts]
    return tuple(c.view(p.dtype).view(s) for c, p, s in zip(columns, parts, shapes, strict=True))
