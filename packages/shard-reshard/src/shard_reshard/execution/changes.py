"""Exchange of changes: of bytes that are sent again, only the elements that differ from those sent before."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from shard_reshard.execution.exchange import INTEGERS

_ALIGNMENT = 8


class Message(NamedTuple):
    """Header of the changes for one peer: an index of the unchanged elements before each value, and values."""

    width: int  # bytes of a digit of the index; 0: all bytes are sent instead
    index_bytes: int
    num_values: int

    def num_bytes(self, split: int, itemsize: int) -> int:
        """Bytes on the wire for a peer that gets ``split`` bytes in full."""
        return _aligned(self.index_bytes) + _aligned(self.num_values * itemsize) if self.width else _aligned(split)


class ChangeExchange:
    """All-to-alls of a call that is repeated, with what each sent and received the last time.

    Both ends keep a copy of all bytes: what a receiver does with its tensors meanwhile makes no difference.

    Args:
        itemsize: The smallest element that is sent.

    Attributes:
        full: The next call sends everything: both ends do not hold the same.
    """

    def __init__(self, itemsize: int) -> None:
        self.itemsize = min(itemsize, 8)
        self.full, self._number = True, 0
        # Bytes of each collective by peer, sent and received.
        self._kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def begin(self, full: bool) -> None:
        """Start a call; all ranks say the same."""
        self.full, self._number = full, 0
        if full:
            self._kept = []

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        """Do as ``all_to_all_single`` does, on bytes."""
        news, results, own = list(input.split(input_splits)), list(output.split(output_splits)), group.rank()
        if self.full:
            dist.all_to_all_single(output, input, output_splits, input_splits, group=group)
        else:
            results[own].copy_(news[own])
        # A rank's own bytes are in the collective or not, as strides decide in each call.
        news[own] = results[own] = input[:0]
        if self.full:
            self._kept.append(([part.clone() for part in news], [part.clone() for part in results]))
            return
        sent, received = self._kept[self._number]
        self._number += 1
        headers, parts = [], []
        for new, old in zip(news, sent, strict=True):
            message, part = encode(new, old, self.itemsize)
            headers.append(message)
            parts += part
        sizes = torch.tensor(headers, dtype=torch.int64, device=input.device)
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes, group=group)
        messages = [Message(*row) for row in theirs.tolist()]
        sends = [m.num_bytes(new.numel(), self.itemsize) for m, new in zip(headers, news, strict=True)]
        receives = [m.num_bytes(result.numel(), self.itemsize) for m, result in zip(messages, results, strict=True)]
        arrived = torch.empty(sum(receives), dtype=torch.uint8, device=input.device)
        dist.all_to_all_single(arrived, torch.cat([arrived[:0], *parts]), receives, sends, group=group)
        for message, part, kept, result in zip(messages, arrived.split(receives), received, results, strict=True):
            decode(message, part, kept, self.itemsize)
            result.copy_(kept)
        for old, new in zip(sent, news, strict=True):
            old.copy_(new)


def encode(new: torch.Tensor, old: torch.Tensor, itemsize: int) -> tuple[Message, list[torch.Tensor]]:
    """Return the shorter message that makes ``new`` of ``old``, changes or everything, and its bytes."""
    words = new.view(INTEGERS[itemsize])
    changed = words != old.view(INTEGERS[itemsize])
    # Beyond that no index is short enough; positions would take more memory than the bytes themselves.
    if int(changed.sum()) * itemsize <= new.numel() * 7 // 8:
        positions = changed.nonzero().view(-1)
        gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
        width = min((1, 2), key=lambda width: width * (len(gaps) + int((gaps // (256**width - 1)).sum())))
        index, values = _pack(gaps, width), words[positions].view(torch.uint8)
        message = Message(width, index.numel(), len(gaps))
        if message.num_bytes(new.numel(), itemsize) <= new.numel():
            return message, [*_padded(index), *_padded(values)]
    return Message(0, 0, 0), _padded(new)


def decode(message: Message, part: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    """Write the changes of a message into ``target``."""
    if not message.width:
        target.copy_(part[: target.numel()])
        return
    begin = _aligned(message.index_bytes)
    positions = (_unpack(part[: message.index_bytes], message.width) + 1).cumsum(0) - 1
    values = part[begin : begin + message.num_values * itemsize]
    target.view(INTEGERS[itemsize])[positions] = values.view(INTEGERS[itemsize])


def _pack(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers as bytes: the largest digit as often as it fits, then the rest."""
    top = 256**width - 1
    digits = numbers // top + 1
    packed = numbers.new_full((int(digits.sum()),), top)
    packed[digits.cumsum(0) - 1] = numbers % top
    return packed.to(torch.int16 if width == 2 else torch.uint8).view(torch.uint8)


def _unpack(data: torch.Tensor, width: int) -> torch.Tensor:
    top = 256**width - 1
    digits = data.view(torch.int16 if width == 2 else torch.uint8).to(torch.int64) & top
    totals: torch.Tensor = digits.cumsum(0)[digits != top]
    return totals.diff(prepend=digits.new_zeros(1))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _padded(data: torch.Tensor) -> list[torch.Tensor]:
    rest = _aligned(data.numel()) - data.numel()
    return [data, data.new_zeros(rest)] if rest else [data]
