"""Loss scaling for float16: ranks with different shards skip a step together.

Torch's scaler looks for infinities in the gradients of its own process. Under tensor parallelism one rank's shard
can overflow while another's does not: one rank then skips the step, the other takes it, and the model diverges
without an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from tp_ddp_bridge._shared.consensus import named_collective
from tp_ddp_bridge._shared.problems import own_errors
from tp_ddp_bridge._torch_compat import LocalGradScaler
from tp_ddp_bridge.layout import as_plain, refuse_full_reads, tensor_groups
from tp_ddp_bridge.optim.elementwise import parameters_of


class GradScaler(LocalGradScaler):
    """``torch.amp.GradScaler`` with one verdict for all ranks with shards of the model.

    Same arguments and use. ``unscale_`` (or ``step``, without a call of it) sends one all-reduce of one number per
    tensor-parallel group with shards of the optimizer's parameters. Data-parallel ranks have equal gradients
    already.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale."""
        with own_errors():  # another package may have marked a parameter as stale
            super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        leaves = as_plain(parameters_of(optimizer))  # of which torch's search for infinities is refused
        try:
            return super()._unscale_grads_(optimizer, *arguments)
        finally:
            for leaf in leaves:
                refuse_full_reads(leaf)

    def _reduce_found_inf(self, optimizer: Optimizer, found_inf: dict[torch.device, torch.Tensor]) -> None:
        """Let every rank take the verdict of all shards; ``found_inf`` is changed in place."""
        parameters = list(parameters_of(optimizer))
        groups = tensor_groups(parameters, sharded=True)
        if not groups:
            return  # no shards: torch's verdict holds
        verdict = torch.zeros((), device=parameters[0].device)
        for local in found_inf.values():
            verdict = torch.maximum(verdict, local.to(verdict.device))
        for group in groups:
            with named_collective("GradScaler: the verdict on infinite gradients"):
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
        for local in found_inf.values():
            local.copy_(verdict)  # stays on the device: no synchronization
