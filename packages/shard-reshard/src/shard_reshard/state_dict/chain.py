"""Version chain: whether all ranks hold the state of the same call, so that changes alone may be sent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from shard_reshard.consensus import GroupInfo, Topic, all_gather_header, raise_joined
from shard_reshard.state_dict.agreement import agree_on_values, agreed_version, values_row, version_row
from shard_reshard.state_dict.plan import RankMeta

_TOKEN_BYTES = 16


class VersionChain:
    """Token of the calls that a rank took part in, compared between ranks before each call.

    Args:
        anchor_every: Every so many calls everything is sent.
    """

    def __init__(self, anchor_every: int) -> None:
        self._anchor_every, self._calls = anchor_every, 0
        self._token = self._next = os.urandom(_TOKEN_BYTES)  # equal to no other rank's

    def agree(
        self, members: GroupInfo, version: int | None, facts: RankMeta, tensors: Mapping[str, Any]
    ) -> tuple[bool, int | None]:
        """Return whether everything has to be sent, and the version; a collective.

        Raises:
            PlanError: On all ranks, where one makes another call, or versions or plain tensors differ.
        """
        payload = self._token + version_row(version) + values_row(facts, tensors)
        rows = all_gather_header(members, Topic.CHANGES, payload)()
        if rows is None:
            raise_joined(members, "a call of a StateDictResharder with changed_only=True", ())
        # Until the call has ended no rank holds a state that is known: one that fails has a token of its own.
        self._token = os.urandom(_TOKEN_BYTES)
        agree_on_values(members, facts, tensors, [row[_TOKEN_BYTES + 9 : _TOKEN_BYTES + 17] for row in rows])
        version = agreed_version([row[_TOKEN_BYTES:] for row in rows])
        full = len({row[:_TOKEN_BYTES] for row in rows}) > 1 or self._calls >= self._anchor_every
        self._calls = 1 if full else self._calls + 1
        self._next = hashlib.sha256(b"".join(rows)).digest()[:_TOKEN_BYTES]
        return full, version

    def done(self) -> None:
        """End a call that brought everything."""
        self._token = self._next
