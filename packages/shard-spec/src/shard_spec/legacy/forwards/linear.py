"""The forward of an ``nn.Linear`` whose weight, bias or both are sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from shard_spec._torch_compat import eager_only
from shard_spec.apply.gradients import masked_identity
from shard_spec.distributed.exchange import gather_rows
from shard_spec.legacy.forwards.base import ShardedForward, rows_problem, whole_parameter
from shard_spec.legacy.wrapping import unwrap


class ShardedLinear(ShardedForward):
    """Local rows in, the outputs of all rows out, as a DTensor.

    A weight that is cut by its rows (output features) gets every rank's input whole and gives a part of the output's
    last dim; one that is cut by its columns gets the columns it needs and gives a part of a sum. A DTensor input (from
    the sharded module before it) is taken as it lies where it fits. With a whole weight and a sharded bias the output
    is this rank's rows.
    """

    original = nn.Linear.forward
    tensors = ("weight", "bias")

    @eager_only
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """``[my_rows, ..., in_features]`` (or a DTensor ``[total_rows, ..., in_features]``) to the output."""
        module = self.module
        assert isinstance(module, nn.Linear)
        own = module._parameters["bias"]
        if self.sharding is None:
            return F.linear(input, module.weight, None if own is None else whole_parameter(own))
        wide = self._wide_input(input, module.in_features)
        bias = None if own is None else whole_parameter(own)
        local = F.linear(wide, self.local_weight(), None if bias is None else self._local_bias(bias))
        return self.global_output(local, 0, module.out_features)

    def _wide_input(self, input: torch.Tensor, in_features: int) -> torch.Tensor:
        """All rows with the columns that this rank's shard of the weight meets."""
        assert self.sharding is not None
        if isinstance(input, DTensor):
            return self._from_dtensor(input)
        problem = rows_problem(input, self.device, 2)
        if not problem and input.shape[-1] != in_features:
            problem = f"an input of shape {list(input.shape)} for {in_features} input features"
        metadata = self.gather_metadata(self.stand_in() if problem else input, problem=problem)
        self.context.note(metadata.rows())
        if metadata.any_requires_grad() and not input.requires_grad:
            input = input.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        return gather_rows(input, self.sharding.exchange(self.context.group.group, metadata.rows(), 1))

    def _from_dtensor(self, input: DTensor) -> torch.Tensor:
        assert self.sharding is not None
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        last = input.dim() - 1
        if input.device_mesh == weight.device_mesh:
            wanted = self.sharding.placements({0: Replicate(), 1: Shard(last)}, Replicate())
            grads = self.sharding.placements({0: Partial(), 1: Shard(last)}, Replicate())
            return unwrap(input.redistribute(placements=wanted), grads)
        start, size = self.sharding.columns[self.context.group.rank]
        return self.global_input(input).narrow(last, start, size)

    def _local_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The part of the bias for this rank's output features: added once to each sum, counted once by replicas."""
        assert self.sharding is not None
        me = self.context.group.rank
        start, size = self.sharding.rows[me]
        adds = self.sharding.is_first_replica(me, 1)
        return masked_identity(bias.narrow(0, start, size), forward=adds, backward=adds and self.sharding.primary[me])
