"""ShardedForward: what stands in for ``module.forward`` while the module's weight is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.gradients import masked_identity
from shard_spec.distributed.exchange import RowExchange, gather_rows
from shard_spec.layout.layout import Layout
from shard_spec.legacy.forward_context import ForwardContext
from shard_spec.legacy.input_metadata import BatchMetadata, all_gather_input_metadata
from shard_spec.legacy.weight_sharding import WeightSharding
from shard_spec.legacy.wrapping import unwrap, whole, wrap


class ShardedForward:
    """A picklable callable, set as the module's instance attribute ``forward``; deleting it restores the class's own.

    Attributes:
        module: The module whose forward it is.
        name: Its FQN, for errors.
        context: What it shares with the other modules of one ``shard_module`` call.
        cut: How the weight lies, or None where only the bias is sharded.
    """

    original: ClassVar[Callable[..., Any]]
    """The class's own forward, which this one stands in for."""
    tensors: ClassVar[tuple[str, ...]]
    """The parameters that may be sharded under it."""

    def __init__(self, module: nn.Module, name: str, context: ForwardContext, weight: Layout | None) -> None:
        self.module = module
        self.name = name
        self.context = context
        rows, columns = module._parameters["weight"].shape  # type: ignore[union-attr]  # these modules have one
        self.sharding = None if weight is None else WeightSharding(weight, (rows, columns), context.group.ranks)

    def __repr__(self) -> str:
        layout = "replicated" if self.sharding is None else str(self.sharding.layout)
        return f"{type(self).__name__}({self.name!r}, weight={layout})"

    # ---- input ------------------------------------------------------------------------------------------------

    def gather_metadata(self, *tensors: torch.Tensor | None, problem: str = "") -> BatchMetadata:
        """Gather what all ranks pass; a collective. See ``all_gather_input_metadata``."""
        return all_gather_input_metadata(tensors, self.context, self.name, problem)

    def stand_in(self) -> torch.Tensor:
        """Return an empty input for ``metadata`` in place of one that cannot be taken."""
        return torch.empty(0, device=self.device)

    @property
    def device(self) -> torch.device:
        """Device of the weight; not read before the ranks have compared their modules."""
        found = next((each.device for each in self.module.parameters(recurse=False)), None)
        return found or torch.device("cpu")

    def whole_rows(self, rows: tuple[int, ...], width: int) -> RowExchange:
        """The exchange that gives every rank all rows whole."""
        size = self.context.group.size
        primary = (True,) * size if self.sharding is None else self.sharding.primary
        return RowExchange(self.context.group.group, rows, ((0, width),) * size, width, primary)

    def gathered(self, tensor: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        """All ranks' rows of a tensor of any number of dims, on every rank; gradients are summed over the ranks."""
        flat = tensor.unsqueeze(-1)
        return gather_rows(flat, self.whole_rows(rows, 1)).squeeze(-1)

    def global_input(self, value: DTensor) -> torch.Tensor:
        """A DTensor input as a whole plain tensor on every rank; the ranks' gradients are parts of one sum.

        Raises:
            PlanError: ``other-ranks`` when it lies on other ranks than the weight.
        """
        ranks = sorted(value.device_mesh.mesh.flatten().tolist())
        if ranks != sorted(self.context.group.ranks):
            hint = "redistribute the input onto the ranks of the module's weight, or pass this rank's rows"
            found = f"a DTensor on ranks {ranks}; the module is sharded over {sorted(self.context.group.ranks)}"
            raise PlanError(Problem("other-ranks", self.name, found=found, hint=hint))
        counts = self.sharding is None or self.sharding.primary[self.context.group.rank]
        return masked_identity(whole(value, parts=True), forward=True, backward=counts)

    # ---- weight and output ------------------------------------------------------------------------------------

    def local_weight(self) -> torch.Tensor:
        """This rank's shard of the weight.

        Raises:
            PlanError: ``not-sharded`` when somebody replaced the sharded parameter.
        """
        weight = self.module.weight
        if not isinstance(weight, DTensor):
            hint = "undo the handle of shard_module before replacing parameters"
            found = f"a {type(weight).__qualname__} in place of the sharded weight"
            raise PlanError(Problem("not-sharded", f"{self.name}.weight", found=found, hint=hint))
        return unwrap(weight)

    def global_output(self, local: torch.Tensor, cut_dim: int, width: int) -> DTensor:
        """The outputs of the concatenated batch as a DTensor.

        Args:
            local: ``[total_rows, ..., my part of width]``.
            cut_dim: The dim of the weight that becomes the last dim of the output; along axes that cut the other dim
                the ranks hold parts of a sum.
            width: Global size of the last dim.
        """
        assert self.sharding is not None
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        placements = self.sharding.placements({cut_dim: Shard(local.dim() - 1), 1 - cut_dim: Partial()}, Replicate())
        return wrap(local, weight.device_mesh, placements, (*local.shape[:-1], width))


def whole_parameter(value: torch.Tensor) -> torch.Tensor:
    """A small parameter, sharded or not, whole on every rank; the ranks' gradients are parts of one sum."""
    return whole(value, parts=True) if isinstance(value, DTensor) else value


def rows_problem(value: object, device: torch.device, least_dims: int) -> str:
    """Why ``value`` cannot be a local batch; empty when it can."""
    if not isinstance(value, torch.Tensor):
        return f"an input of type {type(value).__name__}: a tensor is needed"
    if value.device.type != device.type:
        return f"an input on {value.device}: the weight is on {device}"
    if value.dim() >= least_dims:
        return ""
    return f"an input of shape {list(value.shape)}: a local batch has rows in dim 0 and at least {least_dims} dim(s)"
