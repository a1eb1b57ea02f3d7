"""DistributedDataParallel that knows that not all ranks are data parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tp_ddp_bridge.loading import times_assigned
from tp_ddp_bridge.problems import PlanError, Problem
from tp_ddp_bridge.view_class import BridgedModule


class BridgedDDP(DistributedDataParallel):
    """What ``wrap_ddp`` returns. DDP itself, except that it refuses what would go wrong silently beside tensor
    parallelism.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._assigned_before = times_assigned()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's stub
        self._assigned_before = times_assigned()

    def _see_that_parameters_are_reduced(self) -> None:
        """After ``load_state_dict(assign=True)``: DDP reduces the parameters that it was made with, and no others."""
        if self._assigned_before == times_assigned():
            return
        known = set(map(id, self._module_parameters))
        ignored = self.parameters_to_ignore
        new = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in known and name not in ignored
        ]
        if new:
            raise PlanError(
                Problem(
                    "not-reduced",
                    name,
                    found="a parameter that this DDP was not made with: load_state_dict(assign=True) has put it there",
                    hint="load before wrap_ddp, or without assign=True; or wrap_ddp() and the optimizer are made anew",
                )
                for name in new
            )
        self._assigned_before = times_assigned()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; an undone one is refused, because the reducer would wait for leaves that nobody uses."""
        if not isinstance(self.module, BridgedModule):
            raise RuntimeError(
                "the module of this DDP was given its DTensor parameters back (undo_dp_transform), which DDP cannot "
                "reduce: wrap it anew with wrap_ddp"
            )
        self._see_that_parameters_are_reduced()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's stub

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook, on the data-parallel group.

        Torch's own hooks take ``state=None`` for the default group, in which ranks hold different shards; here they get
        DDP's group instead.

        Args:
            state: As in DDP. A process group, or a state object that has one, must have DDP's ranks.
            hook: As in DDP.

        Raises:
            PlanError: The hook would average over other ranks than DDP's.
        """
        own = dist.get_process_group_ranks(self.process_group)
        if state is None and hook.__module__.startswith("torch.distributed.algorithms.ddp_comm_hooks"):
            state = self.process_group
        group = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", self.process_group)
        ranks = dist.get_process_group_ranks(group)  # None: the default group, as torch's hooks read it
        if ranks != own:
            raise PlanError(
                Problem(
                    "groups-mix",
                    f"state of {getattr(hook, '__name__', hook)}",
                    found=f"its process group has ranks {ranks}, DDP averages over {own}: different shards would be "
                    "mixed",
                    hint="make the state with process_group=ddp.process_group",
                )
            )
        super().register_comm_hook(state, hook)
