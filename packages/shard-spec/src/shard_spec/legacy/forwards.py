"""Forwards of sharded modules: local batches in, the outputs of the concatenated batch out.

`WeightSharding` says how the dims of a weight lie on the ranks; `ShardedForward` stands in for ``module.forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.apply.gradients import masked_identity
from shard_spec.distributed.exchange import Columns, RowExchange, gather_rows, scatter_rows
from shard_spec.layout.layout import Layout
from shard_spec.legacy.input_metadata import BatchMetadata, all_gather_input_metadata
from shard_spec.legacy.module_tracker import ForwardContext
from shard_spec.legacy.wrapping import unwrap, whole, wrap

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class WeightSharding:
    """A two-dimensional weight cut over a group; every interval is contiguous.

    Attributes:
        layout: Where the weight lies; plain shards and replicas only.
        shape: Global shape of the weight.
        ranks: Global ranks of the group, in group order.
    """

    layout: Layout
    shape: tuple[int, int]
    ranks: tuple[int, ...]

    @cached_property
    def rows(self) -> Columns:
        """For each rank of the group, its ``(start, size)`` interval of dim 0."""
        return self._intervals(0)

    @cached_property
    def columns(self) -> Columns:
        """For each rank of the group, its ``(start, size)`` interval of dim 1."""
        return self._intervals(1)

    def _intervals(self, dim: int) -> Columns:
        return tuple(self.layout.intervals(rank, self.shape)[dim][0] for rank in self.ranks)

    @cached_property
    def primary(self) -> tuple[bool, ...]:
        """For each rank of the group, whether it stands for its replicas."""
        return tuple(self.layout.is_primary(rank) for rank in self.ranks)

    def is_first_replica(self, rank: int, dim: int) -> bool:
        """Return whether ``rank`` of the group is the first of those that share its interval of the other dim."""
        coordinate = self.layout.mesh.coordinate(self.ranks[rank])
        assert coordinate is not None
        return all(at == 0 for at, spec in zip(coordinate, self._specs, strict=True) if spec == dim)

    @cached_property
    def _specs(self) -> tuple[int | None, ...]:
        """The dim that each mesh axis cuts, counted from the front."""
        return tuple(None if spec.dim is None else spec.dim % 2 for spec in self.layout.specs)

    def placements(self, by_dim: dict[int, Placement], replicate: Placement) -> tuple[Placement, ...]:
        """One placement for each mesh axis: ``by_dim[d]`` where it cuts dim ``d``, else ``replicate``."""
        return tuple(replicate if dim is None else by_dim[dim] for dim in self._specs)

    def exchange(self, group: dist.ProcessGroup, rows: tuple[int, ...], dim: int) -> RowExchange:
        """The exchange between ``rows`` of the batch and the columns that ``dim`` of the weight meets.

        Args:
            group: The group.
            rows: Rows of the batch by rank.
            dim: Dim of the weight along which a row of the batch is cut.
        """
        intervals = self.rows if dim == 0 else self.columns
        return RowExchange(group, rows, intervals, self.shape[dim], self.primary)


class ShardedForward:
    """A picklable callable, set as the module's instance attribute ``forward``; deleting it restores the class's own.

    Attributes:
        module: The module whose forward it is.
        name: Its FQN, for errors.
        context: What it shares with the other modules of one ``shard_module`` call.
        sharding: How the weight lies, or None where only the bias is sharded.
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

    @property
    def cut(self) -> WeightSharding:
        """The sharding of a weight that is sharded."""
        assert self.sharding is not None
        return self.sharding

    # ---- input ------------------------------------------------------------------------------------------------

    def gather_input(self, tensor: torch.Tensor, problem: str) -> BatchMetadata:
        """Gather what all ranks pass; a collective. See ``all_gather_input_metadata``."""
        given = torch.empty(0, device=self.device) if problem else tensor
        return all_gather_input_metadata(given, self.context, self.name, problem)

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
            PlanError: ``mesh-mismatch`` when it lies on other ranks than the weight.
        """
        ranks = sorted(value.device_mesh.mesh.flatten().tolist())
        if ranks != sorted(self.context.group.ranks):
            hint = "redistribute the input onto the ranks of the module's weight, or pass this rank's rows"
            found = f"a DTensor on ranks {ranks}; the module is sharded over {sorted(self.context.group.ranks)}"
            raise PlanError(Problem("mesh-mismatch", self.name, found=found, hint=hint))
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
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        placements = self.cut.placements({cut_dim: Shard(local.dim() - 1), 1 - cut_dim: Partial()}, Replicate())
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
        column_sharded = self._column_sharded_input(input, module.in_features)
        bias = None if own is None else whole_parameter(own)
        local = F.linear(column_sharded, self.local_weight(), None if bias is None else self._local_bias(bias))
        return self.global_output(local, 0, module.out_features)

    def _column_sharded_input(self, input: torch.Tensor, in_features: int) -> torch.Tensor:
        """All rows with the columns that this rank's shard of the weight meets."""
        if isinstance(input, DTensor):
            return self._from_dtensor(input)
        problem = rows_problem(input, self.device, 2)
        if not problem and input.shape[-1] != in_features:
            problem = f"an input of shape {list(input.shape)} for {in_features} input features"
        metadata = self.gather_input(input, problem)
        self.context.note(metadata.rows)
        if metadata.any_requires_grad and not input.requires_grad:
            input = input.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        return gather_rows(input, self.cut.exchange(self.context.group.group, metadata.rows, 1))

    def _from_dtensor(self, input: DTensor) -> torch.Tensor:
        weight, cut = self.module.weight, self.cut
        assert isinstance(weight, DTensor)
        last = input.dim() - 1
        if input.device_mesh == weight.device_mesh:
            wanted = cut.placements({0: Replicate(), 1: Shard(last)}, Replicate())
            grads = cut.placements({0: Partial(), 1: Shard(last)}, Replicate())
            return unwrap(input.redistribute(placements=wanted), grads)
        start, size = cut.columns[self.context.group.rank]
        return self.global_input(input).narrow(last, start, size)

    def _local_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The part of the bias for this rank's output features: added once to each sum, counted once by replicas."""
        cut, me = self.cut, self.context.group.rank
        start, size = cut.rows[me]
        adds = cut.is_first_replica(me, 1)
        return masked_identity(bias.narrow(0, start, size), forward=adds, backward=adds and cut.primary[me])


def look_up(
    ids: torch.Tensor,
    table: torch.Tensor,
    rows: tuple[int, int],
    num_embeddings: int,
    padding_idx: int | None,
    scale_grad_by_freq: bool = False,
) -> torch.Tensor:
    """The rows of this rank's shard of a table; zeros for ids that other ranks have.

    Args:
        ids: Any shape.
        table: ``[size, my_columns]``.
        rows: ``(start, size)``: which rows of the global table these are.
        num_embeddings: Rows of the global table.
        padding_idx: Row that gets no gradient.
        scale_grad_by_freq: Divide gradients by how often an id is in ``ids``, which has to be all ranks' ids.

    Returns:
        ``[*ids.shape, my_columns]``.
    """
    start, size = rows
    if size == 0:
        nothing = table.new_zeros((*ids.shape, table.shape[1]))
        return nothing + table.sum()  # zero, and it keeps the empty shard in the graph
    inside = (ids >= start) & (ids < start + size)
    elsewhere = torch.zeros_like(ids)
    if ids.device.type != "cpu":
        elsewhere = elsewhere.masked_fill((ids < 0) | (ids >= num_embeddings), size + 1)
    local_padding = padding_idx - start if padding_idx is not None and start <= padding_idx < start + size else None
    if scale_grad_by_freq:
        # Ids of other ranks get a row of their own, so that they do not count as occurrences of row 0.
        table = torch.cat([table, table.new_zeros(1, table.shape[1])])
        elsewhere = torch.where(elsewhere == 0, size, elsewhere)
    found = F.embedding(
        torch.where(inside, ids - start, elsewhere), table, local_padding, scale_grad_by_freq=scale_grad_by_freq
    )
    return torch.where(inside.unsqueeze(-1), found, 0)


def renormalize(
    table: torch.Tensor,
    ids: torch.Tensor,
    cut: WeightSharding,
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float,
) -> None:
    """Scale the rows that ``ids`` names down to ``max_norm``, in place, as ``nn.Embedding(max_norm=)`` does.

    Where the columns of a row lie on several ranks, their powers are summed in the group first.

    Args:
        table: This rank's shard, ``[my_rows, my_columns]``, taken under ``no_grad``, before the forward takes its own.
        ids: All ranks' ids.
    """
    me = dist.get_rank(group)
    start, size = cut.rows[me]
    with torch.no_grad():
        inside = (ids >= start) & (ids < start + size)
        mine = torch.unique(ids[inside] - start)
        if all(interval == (0, cut.shape[1]) for interval in cut.columns):
            if mine.numel():
                torch.embedding_renorm_(table.detach(), mine, max_norm, norm_type)
            return
        norms = _norms(table, cut, group, norm_type).narrow(0, start, size)[mine]
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        table.detach()[mine] *= scale.to(table.dtype).unsqueeze(-1)


def _norms(table: torch.Tensor, cut: WeightSharding, group: dist.ProcessGroup, norm_type: float) -> torch.Tensor:
    """The norm of every row of the global table, on every rank."""
    me = dist.get_rank(group)
    start, size = cut.rows[me]
    parts = torch.zeros(cut.shape[0], dtype=torch.float64 if table.dtype == torch.float64 else torch.float32)
    parts = parts.to(table.device)
    values = table.detach().abs().to(parts.dtype)
    infinite = norm_type == float("inf")
    if cut.primary[me] and table.numel():
        parts.narrow(0, start, size).copy_(values.amax(1) if infinite else values.pow(norm_type).sum(1))
    dist.all_reduce(parts, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return parts if infinite else parts.pow(1.0 / norm_type)


class ShardedEmbedding(ShardedForward):
    """This rank's ids in, this rank's rows out: every rank looks up all ids in its shard of the table.

    DTensor ids (of the whole batch) give a DTensor of the whole batch.
    """

    original = nn.Embedding.forward
    tensors = ("weight",)

    @eager_only
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Ids ``[my_rows, ...]`` to ``[my_rows, ..., embedding_dim]``."""
        if isinstance(input, DTensor):
            return self.global_output(self.look_up(self.global_input(input)), 1, self.cut.shape[1])
        problem = rows_problem(input, self.device, 1) or ids_problem(input)
        metadata = self.gather_input(input, problem)
        column_sharded = self.look_up(self.gathered(input, metadata.rows))
        return scatter_rows(column_sharded, self.cut.exchange(self.context.group.group, metadata.rows, 1))

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """All ranks' ids in this rank's shard of the table: ``[*ids.shape, my_columns]``."""
        table, cut, group = self.module, self.cut, self.context.group
        assert isinstance(table, nn.Embedding)
        self._check_ids(ids, table.num_embeddings)
        if table.max_norm is not None:
            with torch.no_grad():
                renormalize(self.local_weight(), ids, cut, group.group, table.max_norm, table.norm_type)
        rows, by_freq = cut.rows[group.rank], table.scale_grad_by_freq
        return look_up(ids, self.local_weight(), rows, table.num_embeddings, table.padding_idx, by_freq)

    def _check_ids(self, ids: torch.Tensor, num_embeddings: int) -> None:
        """Raise for ids outside of the table, which otherwise no rank would look up.

        Every rank sees all ids, so every rank raises. On an accelerator nothing is read back: there ``look_up`` lets
        the embedding kernel trap.

        Raises:
            IndexError: As ``torch.nn.functional.embedding`` does.
        """
        if ids.device.type != "cpu" or not ids.numel():
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_embeddings:
            raise IndexError(f"{self.name}: ids from {low} to {high} for a table of {num_embeddings} rows")


def ids_problem(ids: torch.Tensor) -> str:
    """Why ``ids`` cannot be looked up; empty when they can."""
    return "" if ids.dtype in (torch.int32, torch.int64) else f"ids of dtype {ids.dtype}; use int64 or int32"


class RefusedEmbeddingBag(ShardedForward):
    """A bag keeps its sharded table for a module around it that looks ids up itself; its own forward is refused."""

    original = nn.EmbeddingBag.forward
    tensors = ("weight",)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raise on every rank, whatever is passed, before anything is sent.

        Raises:
            PlanError: ``module-not-shardable``.
        """
        found = "the forward of an nn.EmbeddingBag whose table is sharded"
        hint = "look ids up with a sharded nn.Embedding and reduce its rows, or leave this table replicated"
        raise PlanError(Problem("module-not-shardable", self.name, found=found, hint=hint))
