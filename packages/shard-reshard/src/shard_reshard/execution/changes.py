"""Exchange of changes: only elements that differ from those of the previous call."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from shard_reshard.execution.exchange import INTEGERS


class Message(NamedTuple):
    """Header of the changes for one peer. Values come first, then the unchanged elements before each."""

    width: int  # bytes of a digit of these numbers; 0: all bytes are sent instead
    num_values: int
    num_bytes: int  # of all, in whole words


class ChangeExchange:
    """All-to-alls of a repeated call, with the bytes sent and received by the previous one.

    Both ends keep a copy of all bytes, so a receiver may change its tensors between calls.

    Args:
        itemsize: The smallest element that is sent.
    """

    def __init__(self, itemsize: int) -> None:
        self.itemsize, self._full, self._number = min(itemsize, 8), True, 0
        # Bytes of each collective by peer, sent and received.
        self._kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def begin(self, full: bool) -> None:
        """Start a call. ``full`` on all ranks alike: it sends everything, both ends do not hold the same."""
        self._full, self._number = full or not self._kept, 0  # a new plan has nothing yet, on any rank
        if self._full:
            self._kept = []

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        """Equivalent of ``all_to_all_single`` on bytes."""
        news, results, own = list(input.split(input_splits)), list(output.split(output_splits)), group.rank()
        if self._full:
            dist.all_to_all_single(output, input, output_splits, input_splits, group=group)
        else:
            results[own].copy_(news[own])  # local bytes need no transfer
        # The strides of each call decide if a rank's own bytes are in the collective: they are not diffed.
        news[own] = results[own] = input[:0]
        if self._full:
            self._kept.append(([part.clone() for part in news], [part.clone() for part in results]))
            return
        sent, received = self._kept[self._number]
        self._number += 1
        parts = [encode(new, old, self.itemsize) for new, old in zip(news, sent, strict=True)]
        headers = torch.tensor([message for message, _ in parts], dtype=torch.int64, device=input.device)
        theirs = torch.empty_like(headers)
        dist.all_to_all_single(theirs, headers, group=group)
        messages = [Message(*row) for row in theirs.tolist()]
        receives, sends = ([m.num_bytes for m in side] for side in (messages, [message for message, _ in parts]))
        arrived = torch.empty(sum(receives), dtype=torch.uint8, device=input.device)
        dist.all_to_all_single(arrived, torch.cat([data for _, data in parts]), receives, sends, group=group)
        for message, data, previous, result in zip(messages, arrived.split(receives), received, results, strict=True):
            decode(message, data, previous, self.itemsize)
            result.copy_(previous)
        for old, new in zip(sent, news, strict=True):
            old.copy_(new)  # after all sends: `parts` may be views of `new`


def encode(new: torch.Tensor, old: torch.Tensor, itemsize: int) -> tuple[Message, torch.Tensor]:
    """Return the shorter message that makes ``new`` of ``old``, changes or everything, and its bytes."""
    words, width, num_values, data = new.view(INTEGERS[itemsize]), 0, 0, new
    changed = words != old.view(INTEGERS[itemsize])
    # With more changes no index is short enough; positions would take more memory than the bytes themselves.
    if int(changed.sum()) * itemsize <= new.numel() * 7 // 8:
        positions = changed.nonzero().view(-1)
        gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
        digits = {size: gaps // (256**size - 1) + 1 for size in (1, 2)}  # of each gap
        size = min(digits, key=lambda size: size * int(digits[size].sum()))
        # A gap is the largest digit as often as it fits, then the rest.
        index = gaps.new_full((int(digits[size].sum()),), 256**size - 1)
        index[digits[size].cumsum(0) - 1] = gaps % (256**size - 1)
        packed = index.to(torch.int16 if size == 2 else torch.uint8).view(torch.uint8)
        changes = torch.cat([words[positions].view(torch.uint8), packed])
        if changes.numel() <= new.numel():
            width, num_values, data = size, len(gaps), changes
    padding = data.new_zeros(-data.numel() % 8)  # every message is aligned
    return Message(width, num_values, data.numel() + padding.numel()), torch.cat([data, padding])


def decode(message: Message, data: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    """Write the changes of a message into ``target``."""
    width, num_values, _ = message
    if not width:
        target.copy_(data[: target.numel()])
        return
    begin, top = num_values * itemsize, 256**width - 1
    # Aligned by the copy; padding begins where as many gaps have ended as there are values.
    index = data[begin : data.numel() - (data.numel() - begin) % width].clone()
    digits = index.view(torch.int16 if width == 2 else torch.uint8).to(torch.int64) & top
    positions = digits.cumsum(0)[digits != top][:num_values] + torch.arange(num_values, device=data.device)
    target.view(INTEGERS[itemsize])[positions] = data[:begin].view(INTEGERS[itemsize])
