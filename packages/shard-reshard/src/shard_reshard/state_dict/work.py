"""A state dict in flight: its buckets are posted, waited for and handed out one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from shard_reshard._shared.problems import Problem
from shard_reshard.execution.checks import Match, TensorGuards
from shard_reshard.execution.mover import Finish, NotPicklable
from shard_reshard.state_dict.outputs import (
    Bucket,
    LocalTargets,
    MovedStateDict,
    ReceiveBuffers,
    write_outputs,
)


class PreparedState(NamedTuple):
    """A call on this rank: its tensors, as given, locally and as guards compare them, and its receive buffers."""

    tensors: Mapping[str, Any]
    targets: Mapping[str, Any]
    sources: Mapping[str, torch.Tensor]
    outs: Mapping[str, torch.Tensor]
    match: Match
    held: list[torch.Tensor]
    atomic: bool
    arriving: ReceiveBuffers | None
    buckets: list[Bucket]
    problems: list[Problem]


class StateDictWork(NotPicklable):
    """A state dict in flight, from ``async_op=True``; it holds all its tensors until `wait`.

    Buckets are posted in their order, the first ``in_flight`` by the call itself. Waiting for a bucket waits for those
    before it, and posts as many later ones, so that their transfers run beside what the caller does with its tensors:

    >>> work = resharder(gradients, async_op=True)  # doctest: +SKIP
    >>> for bucket in work.buckets:  # doctest: +SKIP
    ...     update(bucket.wait())
    >>> moved = work.wait()  # doctest: +SKIP

    Every rank waits for all buckets, in the same order relative to its other collectives in the group. On CUDA a bucket
    is packed on the stream that is current when it is posted, sent on the group's own stream, and unpacked on the
    stream that is current when it is waited for; that stream alone may use the tensors without a further event.
    """

    _instead = "wait() for it and copy the result"

    def __init__(
        self,
        here: LocalTargets,
        call: PreparedState,
        unchanged: TensorGuards | None,
        in_flight: int,
        done: Callable[[], None] | None,
    ) -> None:
        self._here, self._call, self._unchanged, self._in_flight, self._done = here, call, unchanged, in_flight, done
        self._finishes: list[Finish | None] = []  # of the posted buckets
        self._arrived = 0  # buckets waited for
        self._parts: dict[int, dict[str, Any]] = {}  # results by bucket
        self._result: MovedStateDict | None = None
        self._error: Exception | None = None
        self._post(in_flight)

    @property
    def plan(self) -> Any:
        """The plan of the call."""
        return self._here.plan

    @property
    def buckets(self) -> tuple[BucketWork, ...]:
        """All buckets, in the order of their exchanges; equally many on every rank."""
        return tuple(BucketWork(self, number) for number in range(len(self.plan.buckets)))

    def wait(self) -> MovedStateDict:
        """Wait for all buckets. Return the tensors of this rank by destination name, with ``.plan``.

        Raises:
            RuntimeError: A rank died; the error of a bucket is raised again by every later `wait`.
        """
        call, numbers = self._call, range(len(self.plan.buckets))
        self._wait(len(numbers))
        if self._result is None:
            with torch.no_grad():
                assert call.arriving is not None
                if call.atomic and call.targets:  # filled now that everything has arrived
                    result = write_outputs(self._here, call.arriving, call.targets, call.outs)
                else:
                    parts = {name: value for number in numbers for name, value in self._part(number).items()}
                    result = MovedStateDict({name: parts[name] for name in self.plan.outputs if name in parts})
            result.update(self.plan.values)
            result.plan = self.plan
            self._result = result
        return self._result

    def is_completed(self) -> bool:
        """Return True if no bucket is left to wait for, or after an error."""
        return self._error is not None or self._arrived == len(self.plan.buckets)

    def _post(self, count: int) -> None:
        """Post the first ``count`` buckets that are not posted yet."""
        if self._error is not None:
            raise self._error
        here, call = self._here, self._call
        assert call.arriving is not None
        try:
            for number in range(len(self._finishes), min(count, len(call.buckets))):
                sources, outs = call.buckets[number]
                _, finish = here.movers[number].start(sources, outs, True, call.arriving.fresh, self._unchanged)
                self._finishes.append(finish)
        except Exception as error:  # a failed call stays failed
            self._error = error
            raise

    def _wait(self, count: int) -> None:
        """Wait for the first ``count`` buckets, and post ``in_flight`` later ones after each."""
        if self._error is not None:
            raise self._error
        while self._arrived < count:
            self._post(self._arrived + 1)
            finish, self._finishes[self._arrived] = self._finishes[self._arrived], None
            try:
                if finish is not None:
                    finish()
            except Exception as error:
                self._error = error
                raise
            self._arrived += 1
            if self._arrived == len(self.plan.buckets) and self._done is not None:
                self._done()
            self._post(self._arrived + self._in_flight)

    def _part(self, number: int) -> dict[str, Any]:
        """Return the results that are complete with bucket ``number``, which has arrived."""
        call, names = self._call, self.plan.arrivals[number]
        if number not in self._parts:
            assert call.arriving is not None
            outs, locals_ = ({}, {}) if call.atomic else (call.targets, call.outs)
            with torch.no_grad():
                self._parts[number] = dict(write_outputs(self._here, call.arriving, outs, locals_, names))
        return self._parts[number]

    def __del__(self) -> None:
        if getattr(self, "_error", True) is None and not self.is_completed():
            for finish in self._finishes:
                if finish is not None:
                    finish.abandon()
            warnings.warn(
                f"a state dict was started and never waited for: {len(self.plan.buckets) - self._arrived} of its "
                f"{len(self.plan.buckets)} buckets have not arrived, and other ranks wait for what was not posted",
                RuntimeWarning,
                stacklevel=2,
            )


class BucketWork:
    """One exchange of a `StateDictWork`, for the tensors of several names.

    Attributes:
        sources: Names of source tensors that ranks send in this bucket. They are read when it is posted.
        names: Destination names that are complete when it has arrived; each is in one bucket, the same on every rank.
    """

    def __init__(self, work: StateDictWork, number: int) -> None:
        self._work, self._number = work, number
        moves = [work.plan.moves[at] for at in work.plan.buckets[number]]
        self.sources: tuple[str, ...] = tuple(dict.fromkeys(move.source for move in moves))
        self.names: tuple[str, ...] = work.plan.arrivals[number]

    def post(self) -> None:
        """Pack and send this bucket, and those before it, unless they were posted; it waits for nothing."""
        self._work._post(self._number + 1)

    def wait(self) -> dict[str, Any]:
        """Wait for this bucket and those before it. Return this rank's tensors of ``names``.

        They are in ``out`` with ``atomic=False``; with ``atomic=True`` they are fresh, and `StateDictWork.wait` copies
        them into ``out``.
        """
        self._work._wait(self._number + 1)
        return self._work._part(self._number)
