"""Consensus: ranks compare what they are about to do before the first byte of data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard._torch_compat import is_fake


class GroupInfo(NamedTuple):
    """A process group as planning sees it."""

    group: dist.ProcessGroup
    rank: int  # of this process, in the group
    global_ranks: tuple[int, ...]  # of the members, in the order of the group

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.global_ranks)

    def to_group(self, rank: int) -> int:
        """The group's number for a global rank."""
        try:
            return self.global_ranks.index(rank)
        except ValueError:
            found = f"global rank {rank}, the group has the global ranks {list(self.global_ranks)}"
            hint = "pass a group= that holds every rank of both layouts"
            raise PlanError(Problem("rank-outside-mesh", "group", found=found, hint=hint)) from None


def group_info(group: dist.ProcessGroup | None) -> GroupInfo:
    """The members of ``group``; None is the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        hint = "call torch.distributed.init_process_group first; plan_reshard and simulate need no process group"
        raise PlanError(Problem("no-process-group", found="torch.distributed is not initialized", hint=hint))
    if type(group).__name__ in ("str", "DeviceMesh"):
        hint = "pass a process group, as mesh.get_group('tp') returns it"
        raise PlanError(Problem("wrong-type", "group", found=f"{group!r:.100}", hint=hint))
    found = dist.group.WORLD if group is None else group
    # Of the group itself: one that joins several jobs has ranks of which no default group knows.
    rank = found.rank() if isinstance(found, dist.ProcessGroup) else -1
    if rank < 0 or found is None:
        hint = "call from members only"
        raise PlanError(Problem("rank-outside-mesh", "group", found="this process is not in the group", hint=hint))
    return GroupInfo(found, rank, tuple(dist.get_process_group_ranks(found)))


def data_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for ranks without tensors: the current GPU, or the CPU."""
    backends = _backends(group)
    if "cpu" not in backends and "cuda" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_device_types: WeakKeyDictionary[dist.ProcessGroup, frozenset[str]] = WeakKeyDictionary()


def _backends(group: dist.ProcessGroup) -> frozenset[str]:
    """Return the types of devices that a group has backends for."""
    found = _device_types.get(group)
    if found is None:
        config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
        found = _device_types[group] = frozenset(map(str, config.get_device_backend_map()))
    return found


ROW_BYTES = 42


class Topic(IntEnum):
    """Subject of a header."""

    CALL = 1  # a digest of what is about to be done
    DTYPES = 2  # the dtypes of tensors that not every rank has
    STATE_DICT = 3  # a digest of what a rank knows of a state dict, and its version
    VERSION = 4  # the version alone
    CHANGES = 5  # the version, and what the rank holds already


def all_gather_header(members: GroupInfo, topic: Topic, payload: bytes) -> Callable[[], list[bytes] | None]:
    """Begin to send a row of at most 41 bytes to all ranks.

    Returns:
        A function that waits and returns all ranks' payloads, filled up with zeros, by rank; None where some rank's row
        is about something else.
    """
    assert len(payload) < ROW_BYTES
    row = [int(topic), *payload.ljust(ROW_BYTES - 1, b"\0")]
    device = torch.device("cpu") if "cpu" in _backends(members.group) else data_device(members.group)
    mine = torch.tensor(row, dtype=torch.uint8, device=device)
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


def _failed(members: GroupInfo, topic: Topic) -> RuntimeError:
    what = topic.name.lower().replace("_", " ")
    # The rank of the world: it is the one that the launcher's logs name.
    return RuntimeError(
        f"all_gather of what ranks compare before they reshard (about: {what}) failed on rank {dist.get_rank()}: "
        "another rank died or made no such call; nothing was moved"
    )


_HAS_PROBLEMS, _COMPARES_ALWAYS = 1, 2  # first byte of a header
_TOLD = "shard_reshard_all_ranks_raise_it"  # attribute of an error
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def check_mode(check: str) -> str:
    """``check`` if it is one of the modes there are."""
    if check not in ("first", "always"):
        raise PlanError(Problem("invalid-argument", "check", found=repr(check), hint="'first' or 'always'"))
    return check


BEFORE_MOVING = "nothing was moved: found before the exchange, the same on every rank"
BEFORE_WRITING = "out stays as it was: found before it was filled, the same on every rank"
WHILE_WRITING = "out is filled in part: found between two exchanges, the same on every rank"


def assert_consistent(
    members: GroupInfo,
    facts: str,
    problems: Sequence[Problem],
    check: str = "first",
    state: str = BEFORE_MOVING,
) -> bool:
    """Return on all ranks, or raise the same error on all.

    Args:
        members: The group; every member calls this.
        facts: What has to be the same on every rank, as text.
        problems: What is wrong on this rank; then no rank goes on.
        check: "first": facts that this group has agreed on before need no communication; problems are then raised
            on this rank only. "always": compare.
        state: What the error says about the caller's tensors.

    Returns:
        True where later calls with these facts need no comparison: no rank wants one in every call.

    Raises:
        PlanError: The problems of all ranks; ``ranks-disagree`` with what each said where facts differ.
    """
    if is_fake(()):  # fake tensors have no other ranks
        if problems:
            raise PlanError(problems)
        return check == "first"
    digest = hashlib.sha256(facts.encode())
    agreed = _agreed.setdefault(members.group, set())
    if check == "first" and digest.hexdigest() in agreed:
        if problems:
            raise PlanError(problems)  # the others are past comparing
        return True
    flags = (len(problems) > 0) * _HAS_PROBLEMS | (check == "always") * _COMPARES_ALWAYS
    rows = all_gather_header(members, Topic.CALL, bytes([flags]) + digest.digest())()
    if rows is None or len({row[1:] for row in rows}) > 1 or any(row[0] & _HAS_PROBLEMS for row in rows):
        raise_joined(members, facts, problems, state)
    if any(row[0] & _COMPARES_ALWAYS for row in rows):
        return False  # one rank that compares in every call needs all others to
    agreed.add(digest.hexdigest())
    return True


def raise_on_all_ranks(members: GroupInfo, error: Exception) -> NoReturn:
    """Raise ``error`` on all ranks, which wait for this one's row; or as it is, where all have raised it already."""
    if not getattr(error, _TOLD, False):
        assert_consistent(members, "", problems_of(error), "always")
    raise error


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """An error as problems that other ranks can be told: whatever keeps one rank from going on must stop them all."""
    if isinstance(error, PlanError):
        return error.problems
    found = f"{type(error).__name__}: {error}"
    return (Problem("invalid-argument", found=found, hint="see the error that this one was raised after"),)


def raise_joined(members: GroupInfo, facts: str, problems: Sequence[Problem], state: str = BEFORE_MOVING) -> NoReturn:
    """Raise one error on all ranks, with the problems of each and what each said; every member calls this."""
    said: list[Any] = [None] * members.size
    dist.all_gather_object(said, (facts, tuple(problems)), group=members.group)
    found: list[Problem] = []
    for theirs in (problem for _, listed in said for problem in listed):
        if theirs not in found:
            found.append(theirs)
    groups: dict[str, list[int]] = {}
    for rank, (text, listed) in enumerate(said):
        if not listed:
            groups.setdefault(text, []).append(rank)
    if len(groups) > 1:
        for text, ranks in groups.items():
            who = f"ranks {', '.join(map(str, ranks))} say {text}"
            hint = "call with the same shape, dtype, layouts and options on every rank of the group"
            found.append(Problem("ranks-disagree", found=who, hint=hint))
    error = PlanError(found, state)
    setattr(error, _TOLD, True)
    raise error
