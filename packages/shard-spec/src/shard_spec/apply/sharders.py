"""Sharders: modules that a user's own code shards take their places, on all ranks or on none."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.execution_plan import ExecutionPlan
from shard_spec.apply.transaction import Snapshot, Transaction
from shard_spec.distributed.rank_state import RankState, capture_errors, raise_on_all_ranks


def install_module(module: nn.Module, path: str, new: nn.Module, transaction: Transaction) -> None:
    """Put ``new`` where the module at ``path`` is, everywhere it is."""
    old = module.get_submodule(path)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is old:
                transaction.set_module(parent, name, new)


def run_sharders(
    module: nn.Module, actions: ExecutionPlan, group: dist.ProcessGroup, transaction: Transaction
) -> dict[str, nn.Module]:
    """Call the Sharders in the order of their FQNs; when one fails on some rank, all ranks raise."""
    if not actions.sharders:
        return {}

    def run() -> dict[str, nn.Module]:
        made = {}
        for path, sharder in actions.sharders.items():
            old = module.get_submodule(path)
            transaction.on_rollback(Snapshot(old).restore)
            new = sharder.shard(old)
            if not isinstance(new, nn.Module):
                found = f"{type(sharder).__qualname__}.shard returned {type(new).__qualname__}"
                raise PlanError(Problem("wrong-type", path, found=found, hint="return an nn.Module"))
            made[path] = new
        return made

    made, problems = capture_errors(run)
    lines = tuple(f"{path}: {type(new).__qualname__}" for path, new in (made or {}).items())
    raise_on_all_ranks(group, RankState(lines, problems), "a Sharder failed")
    assert made is not None
    return made
