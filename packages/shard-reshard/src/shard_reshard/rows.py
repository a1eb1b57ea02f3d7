"""Rows: the first words between ranks, of one length whatever they are about.

Ranks that make different calls have to find that out from each other. Messages of different lengths would do worse than
hang: gloo ends the process. So whatever a rank wants to compare, it begins with a row of the same length that says what
it is about, and ranks that read of another topic than their own know that they disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
import torch.distributed as dist

from shard_reshard.members import Members, message_device

ROW_BYTES = 42


class Topic(IntEnum):
    """What a row is about."""

    CALL = 1  # a digest of what is about to be done
    DTYPES = 2  # the dtypes of tensors that not every rank has
    STATE_DICT = 3  # a digest of what a rank knows of a state dict, and its version
    VERSION = 4  # the version alone


def exchange_rows(members: Members, topic: Topic, payload: bytes) -> Callable[[], list[bytes] | None]:
    """Begin to send a row to all ranks.

    Args:
        members: The group; every member sends one.
        topic: What it is about.
        payload: At most 41 bytes.

    Returns:
        A function that waits and returns all ranks' payloads, filled up with zeros, by rank; None where some rank's row
        is about something else.
    """
    assert len(payload) < ROW_BYTES
    row = [int(topic), *payload.ljust(ROW_BYTES - 1, b"\0")]
    mine = torch.tensor(row, dtype=torch.uint8, device=message_device(members.group))
    everyone = [torch.empty_like(mine) for _ in range(members.size)]
    try:
        work = dist.all_gather(everyone, mine, group=members.group, async_op=True)
    except RuntimeError as error:
        raise _failed(members, topic) from error

    def rows() -> list[bytes] | None:
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise _failed(members, topic) from error
        found = [bytes(row.tolist()) for row in everyone]
        return [row[1:] for row in found] if all(row[0] == topic for row in found) else None

    return rows


def _failed(members: Members, topic: Topic) -> RuntimeError:
    what = topic.name.lower().replace("_", " ")
    return RuntimeError(
        f"all_gather of what ranks compare before they reshard (about: {what}) failed on rank {members.rank}: another "
        "rank died or made no such call; nothing was moved"
    )
