"""Sequences sharded over ranks: the tokens of each rank, exchanges with gradients, and attention over all tokens.

Shards of a sequence are even. `n` is the number of ranks, `s` the tokens of one rank, `S = n * s` all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tp_styles._torch_compat import is_compiling
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.redistribute import TPGroup

Kind = Literal["ulysses", "gather"]


@dataclass(frozen=True)
class Order:
    """The tokens of each rank.

    Attributes:
        size: Number of ranks.
        is_zigzag: Rank r has the chunks r and 2n-1-r of 2n: under a causal mask all ranks attend to equally many
            tokens. Otherwise it has chunk r of n.
    """

    size: int
    is_zigzag: bool = False

    @property
    def multiple(self) -> int:
        """Lengths divide by it."""
        return self.size * (2 if self.is_zigzag else 1)

    def ranges(self, rank: int, length: int) -> tuple[tuple[int, int], ...]:
        """Return global `(start, stop)` of a rank's chunks, in its order."""
        chunk = length // self.multiple
        chunks = (rank, 2 * self.size - 1 - rank) if self.is_zigzag else (rank,)
        return tuple((index * chunk, (index + 1) * chunk) for index in chunks)

    def take(self, full: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return a rank's tokens of a full tensor."""
        parts = [full.narrow(dim, start, stop - start) for start, stop in self.ranges(rank, full.shape[dim])]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def sorted(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor of all ranks' tokens, gathered in rank order, in the order of the sequence."""
        if not self.is_zigzag:
            return gathered
        chunks = gathered.chunk(2 * self.size, dim)
        return torch.cat([*chunks[::2], *chunks[::-2]], dim)  # first chunks rise, second ones fall

    def ranked(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all tokens in rank order: the inverse of `sorted`."""
        if not self.is_zigzag:
            return full
        return torch.cat([self.take(full, dim, rank) for rank in range(self.size)], dim)

    def work(self, length: int) -> list[int]:
        """Return the pairs of a query and an earlier or equal key on each rank: the work of causal attention."""
        return [
            sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in self.ranges(rank, length))
            for rank in range(self.size)
        ]


# Way of a tensor -> way of its gradient.
TRANSPOSE = {"cut": "join", "join": "cut", "gather": "scatter", "scatter": "gather", "exchange": "exchange"}


class SequenceMoves:
    """Exchanges of a sequence over an axis. Gradients take the transposed way.

    `cut` and `join` go between a full tensor that every rank has and shards. `gather` and `scatter` do too, but the
    gradient of the full side is another one on each rank, and is summed. `exchange` sends chunk p of dim 0 to rank p.

    Args:
        axis: The ranks.
        order: Their tokens.
    """

    def __init__(self, axis: TPGroup, order: Order) -> None:
        self.axis, self.order = axis, order

    def __call__(self, way: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the moved tensor."""
        if x.requires_grad and torch.is_grad_enabled():
            moved: torch.Tensor = _Moved.apply(x, self, way, dim)  # type: ignore[no-untyped-call]  # torch's
            return moved
        return self.run(way, x, dim)

    def run(self, way: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Move a tensor without autograd."""
        axis, order = self.axis, self.order
        match way:
            case "cut":
                return order.take(x, dim, axis.rank)
            case "join" | "gather":
                return order.sorted(axis.all_gather(x, dim), dim)
            case "scatter":
                full = order.ranked(x, dim)
                return axis.reduce_scatter(full, dim, [full.shape[dim] // axis.size] * axis.size)
        return axis.exchange(x)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: SequenceMoves, way: str, dim: int) -> torch.Tensor:
        ctx.arguments = moves, way, dim
        return moves.run(way, x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        moves, way, dim = ctx.arguments
        return moves(TRANSPOSE[way], gradient, dim), None, None, None


class GradientScale(torch.autograd.Function):
    """The tensor itself, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a view."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the scaled gradient."""
        return gradient * ctx.factor, None


# ---------------------------------------------------------------------------------------------- attention


class SequenceAttention:
    """Attention of this rank's tokens to all tokens.

    `"ulysses"` exchanges tokens for heads: each rank attends with its share of the heads to the full sequence.
    `"gather"` brings all keys and values to each rank's queries.

    Args:
        moves: The axis and its order.
        kind: One of both.

    Attributes:
        masks: During a forward of the model, masks of this rank's queries: all layers of a mask share one tensor.
    """

    def __init__(self, moves: SequenceMoves, kind: Kind) -> None:
        self.moves, self.kind = moves, kind
        self.masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] | None = None

    def __call__(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
        name: str,
        *,
        is_causal: bool,
    ) -> torch.Tensor:
        """Return the attention's output `[batch, s, heads, size]`.

        Args:
            qkv: Queries `[batch, heads, s, size]`, keys and values (fewer heads are groups).
            mask: Mask of all keys `[..., 1 | s | S, S]`; None for none, or for a causal one. Rows of `s` queries are
                this rank's.
            attend: The attention of one process, `[batch, S | s, heads, size]`; it applies a causal mask itself where
                it gets None.
            name: Name of the module, for errors.
            is_causal: With no mask, attention is causal.

        Raises:
            StyleInputError: Heads do not divide, or the mask is of other tokens.
        """
        q, k, v = qkv
        if q.dim() != 4 or k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
            raise StyleInputError(
                Problem(
                    "shape-mismatch",
                    name,
                    found=f"queries {list(q.shape)}, keys {list(k.shape)}",
                    hint="attention over this rank's tokens takes [batch, heads, tokens, size] of one length: a filled"
                    " cache"
                    " and cross attention have others",
                )
            )
        if self.kind == "gather":
            return self._gathered(q, k, v, mask, attend, name, is_causal=is_causal)
        n, length = self.moves.axis.size, q.shape[2]
        if q.shape[1] % n:
            raise StyleInputError(
                Problem(
                    "does-not-divide",
                    name,
                    dim=1,
                    found=f"{q.shape[1]} heads over {n} ranks",
                    hint='ContextParallel(kind="gather") takes any number of heads',
                )
            )
        k, v = (self._copied(x, q.shape[1]) for x in (k, v))
        q, k, v = self._to_heads((q, k, v))
        if mask is not None:
            mask = self._checked(mask, length, name, rows=(1, n * length))
            if mask.dim() == 4 and mask.shape[1] == q.shape[1] * n:
                mask = mask.narrow(1, self.moves.axis.rank * q.shape[1], q.shape[1])
        out = attend(q, k, v, mask).unflatten(1, (n, length)).transpose(0, 1)  # [n, batch, s, heads / n, size]
        out = self.moves("exchange", out, 0)
        return out.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _copied(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Repeat key-value heads that do not divide; a rank's are then those of its query heads."""
        n, count = self.moves.axis.size, x.shape[1]
        if count % n == 0:
            return x
        return x.repeat_interleave(n // count if n % count == 0 else heads // count, 1)

    def _to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange tokens for heads, of all tensors in one message."""
        n = self.moves.axis.size
        ranked = [x.unflatten(1, (n, -1)).transpose(0, 1) for x in tensors]  # [n, batch, heads / n, s, size]
        if len({x.shape[-1] for x in ranked}) == 1:
            widths = [x.shape[2] for x in ranked]
            received = self.moves("exchange", torch.cat(ranked, 2), 0).split(widths, 2)
        else:  # values of another size
            counts = [x[0].numel() for x in ranked]
            flat = self.moves("exchange", torch.cat([x.flatten(1) for x in ranked], 1), 0).split(counts, 1)
            received = tuple(part.unflatten(1, x.shape[1:]) for part, x in zip(flat, ranked, strict=True))
        return [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in received]

    def _gathered(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        attend: Callable[..., torch.Tensor],
        name: str,
        *,
        is_causal: bool,
    ) -> torch.Tensor:
        moves, length, width = self.moves, q.shape[2], k.shape[-1]
        both = moves("gather", torch.cat([k, v], -1), 2)
        k, v = both[..., :width], both[..., width:]
        if mask is not None:
            mask = self._checked(mask, length, name, rows=(1, length, length * moves.axis.size))
        if self.masks is None or is_compiling():
            return attend(q, k, v, self._of_queries(mask, q, is_causal=is_causal))
        key = id(mask), is_causal, length, q.dtype, q.device
        if key not in self.masks:  # with the given mask, so that no other one gets its id
            self.masks[key] = mask, self._of_queries(mask, q, is_causal=is_causal)
        return attend(q, k, v, self.masks[key][1])

    def _of_queries(self, mask: torch.Tensor | None, q: torch.Tensor, *, is_causal: bool) -> torch.Tensor | None:
        """Return the mask of this rank's queries and all keys, in numbers that are added: torch keeps these a layer."""
        order, rank, length = self.moves.order, self.moves.axis.rank, q.shape[2]
        full = length * order.size
        if mask is None and is_causal:
            mask = self.positions(length, q.device)[:, None] >= torch.arange(full, device=q.device)
        elif mask is not None and mask.shape[-2] == full and full != length:
            mask = order.take(mask, mask.dim() - 2, rank)
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the global positions of this rank's `length` tokens."""
        order, rank = self.moves.order, self.moves.axis.rank
        ranges = order.ranges(rank, length * order.size)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])

    def _checked(self, mask: torch.Tensor, length: int, name: str, rows: tuple[int, ...]) -> torch.Tensor:
        full = length * self.moves.axis.size
        if mask.dim() < 2 or mask.shape[-1] != full or mask.shape[-2] not in rows:
            raise StyleInputError(
                Problem(
                    "shape-mismatch",
                    name,
                    found=f"a mask {list(mask.shape)} for {length} of {full} tokens",
                    hint=f"pass the mask of all {full} tokens: as an input of the model, with inputs={{name: None}}",
                )
            )
        return mask
