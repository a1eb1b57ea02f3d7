"""Who is in a group, and where its small messages travel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from shard_reshard.problems import PlanError, Problem


class Members(NamedTuple):
    """A process group as planning sees it."""

    group: dist.ProcessGroup
    rank: int  # of this process, in the group
    global_ranks: tuple[int, ...]  # of the members, in the order of the group

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.global_ranks)

    def to_group(self, rank: int) -> int:
        """The group's number for a global rank.

        Raises:
            PlanError: ``rank-not-in-group``.
        """
        try:
            return self.global_ranks.index(rank)
        except ValueError:
            found = f"global rank {rank}, the group has the global ranks {list(self.global_ranks)}"
            hint = "pass a group= that holds every rank of both layouts"
            raise PlanError(Problem("rank-not-in-group", "group", found=found, hint=hint)) from None


def members_of(group: dist.ProcessGroup | None) -> Members:
    """The members of ``group``; None is the default group.

    Raises:
        PlanError: ``no-process-group``, or ``not-a-member`` when this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        hint = "call torch.distributed.init_process_group first; plan_reshard and simulate need no process group"
        raise PlanError(Problem("no-process-group", found="torch.distributed is not initialized", hint=hint))
    found = dist.group.WORLD if group is None else group
    rank = dist.get_rank(found)
    if rank < 0 or found is None:
        hint = "call from members only"
        raise PlanError(Problem("not-a-member", "group", found="this process is not in the group", hint=hint))
    return Members(found, rank, tuple(dist.get_process_group_ranks(found)))


def data_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors of this group lie, for ranks that have none to tell: the current GPU, or the CPU."""
    backends = _backends(group)
    if "cpu" not in backends and "cuda" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Where small messages between ranks travel: on the CPU if the group can."""
    return torch.device("cpu") if "cpu" in _backends(group) else data_device(group)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return {str(device): str(backend) for device, backend in config.get_device_backend_map().items()}
