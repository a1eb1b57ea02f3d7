"""Forwards of sharded modules: local batches in, the outputs of the concatenated batch out.

`WeightSharding` says how the dims of a weight lie on the ranks; `ShardedForward` stands in for ``module.forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
        metadata = self.gather_metadata(self.stand_in() if problem else input, problem=problem)
        self.context.note(metadata.rows())
        if metadata.any_requires_grad() and not input.requires_grad:
            input = input.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        return gather_rows(input, self.cut.exchange(self.context.group.group, metadata.rows(), 1))

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


class ShardedTable(ShardedForward):
    """Sharded embeddings and bags of them: ids are checked, the rows that they name scaled and looked up."""

    tensors = ("weight",)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """All ranks' ids in this rank's shard of the table: ``[*ids.shape, my_columns]``."""
        table, cut, group = self.module, self.cut, self.context.group
        assert isinstance(table, nn.Embedding | nn.EmbeddingBag)
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


class ShardedEmbedding(ShardedTable):
    """This rank's ids in, this rank's rows out: every rank looks up all ids in its shard of the table.

    DTensor ids (of the whole batch) give a DTensor of the whole batch.
    """

    original = nn.Embedding.forward

    @eager_only
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Ids ``[my_rows, ...]`` to ``[my_rows, ..., embedding_dim]``."""
        if isinstance(input, DTensor):
            return self.global_output(self.look_up(self.global_input(input)), 1, self.cut.shape[1])
        problem = rows_problem(input, self.device, 1) or ids_problem(input)
        metadata = self.gather_metadata(self.stand_in() if problem else input, problem=problem)
        column_sharded = self.look_up(self.gathered(input, metadata.rows()))
        return scatter_rows(column_sharded, self.cut.exchange(self.context.group.group, metadata.rows(), 1))


def ids_problem(ids: torch.Tensor) -> str:
    """Why ``ids`` cannot be looked up; empty when they can."""
    return "" if ids.dtype in (torch.int32, torch.int64) else f"ids of dtype {ids.dtype}; use int64 or int32"


@dataclass(frozen=True)
class _Bags:
    """This rank's bags as flat tokens.

    Attributes:
        ids: ``[num_tokens]``.
        offsets: Where each bag begins, ``[num_bags]``.
        weights: ``[num_tokens]`` or None.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    @property
    def of_token(self) -> torch.Tensor:
        """The bag of each token, ``[num_tokens]``."""
        ends = torch.cat([self.offsets[1:], self.offsets.new_full((1,), self.ids.shape[0])])
        bags = torch.arange(self.offsets.shape[0], device=self.ids.device)
        return torch.repeat_interleave(bags, ends - self.offsets, output_size=self.ids.shape[0])


class ShardedEmbeddingBag(ShardedTable):
    """This rank's bags in, this rank's bags out.

    Sums and means are formed on each rank for its shard of the table and then brought together, bag by bag. A maximum
    needs the tokens themselves: they are looked up as in an embedding, and this rank reduces its own.
    """

    original = nn.EmbeddingBag.forward

    @eager_only
    def __call__(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``nn.EmbeddingBag``: ids ``[my_bags, length]``, or flat ids with ``offsets``; to ``[my_bags, dim]``."""
        module = self.module
        assert isinstance(module, nn.EmbeddingBag)
        given = (each for each in (input, offsets, per_sample_weights) if each is not None)
        problem = next(filter(None, (rows_problem(each, self.device, 1) for each in given)), "")
        problem = problem or _problem(module, input, offsets, per_sample_weights)
        bags = None if problem else _flat(module, input, offsets, per_sample_weights)
        metadata = self.gather_metadata(
            self.stand_in() if bags is None else bags.offsets,
            self.stand_in() if bags is None else bags.ids,
            None if bags is None else bags.weights,
            problem=problem,
        )
        assert bags is not None
        if bags.weights is not None and metadata.any_requires_grad(2) and not bags.weights.requires_grad:
            # Its backward communicates: all ranks have to run it.
            bags = replace(bags, weights=bags.weights.detach().requires_grad_())
        all_ids = self.gathered(bags.ids, metadata.rows(1))
        found = self.look_up(all_ids)
        if module.mode == "max":
            return self._max(module, bags, found, metadata.rows(1))
        return self._sum(module, bags, all_ids, found, metadata.rows(0), metadata.rows(1))

    def _sum(
        self,
        module: nn.EmbeddingBag,
        bags: _Bags,
        all_ids: torch.Tensor,
        found: torch.Tensor,
        num_bags: tuple[int, ...],
        num_tokens: tuple[int, ...],
    ) -> torch.Tensor:
        group = self.context.group
        if module.padding_idx is not None:
            found = found.masked_fill((all_ids == module.padding_idx).unsqueeze(-1), 0)
        if bags.weights is not None:
            found = found * gather_rows(bags.weights.unsqueeze(-1), self.whole_rows(num_tokens, 1))
        bag_of_token = self.gathered(bags.of_token + sum(num_bags[: group.rank]), num_tokens)
        column_sharded = found.new_zeros(sum(num_bags), found.shape[-1]).index_add(0, bag_of_token, found)
        summed = scatter_rows(column_sharded, self.cut.exchange(group.group, num_bags, 1))
        if module.mode == "sum":
            return summed
        counted = torch.ones_like(bags.ids) if module.padding_idx is None else (bags.ids != module.padding_idx).long()
        counts = torch.zeros_like(bags.offsets).index_add(0, bags.of_token, counted.to(bags.offsets.dtype))
        return summed / counts.clamp(min=1).unsqueeze(-1).to(summed.dtype)

    def _max(
        self, module: nn.EmbeddingBag, bags: _Bags, found: torch.Tensor, num_tokens: tuple[int, ...]
    ) -> torch.Tensor:
        tokens = scatter_rows(found, self.cut.exchange(self.context.group.group, num_tokens, 1))
        num = tokens.shape[0]
        places = torch.arange(num, device=tokens.device)
        padding = None
        if module.padding_idx is not None:
            places, padding = places.masked_fill(bags.ids == module.padding_idx, num), num
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        return F.embedding_bag(places, tokens, bags.offsets.long(), mode="max", padding_idx=padding)


def _problem(
    module: nn.EmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> str:
    """Why these bags cannot be looked up; empty when they can. As ``torch.nn.functional.embedding_bag`` would."""
    if ids_problem(ids):
        return ids_problem(ids)
    if ids.dim() not in (1, 2):
        return f"ids of shape {list(ids.shape)}; an embedding bag takes 1 or 2 dims"
    if ids.dim() == 2 and offsets is not None:
        return "offsets together with 2-D ids, where each row already is a bag"
    if ids.dim() == 1 and offsets is None:
        return "1-D ids without offsets"
    if offsets is not None and (offsets.dim() != 1 or offsets.numel() < (1 if module.include_last_offset else 0)):
        return f"offsets of shape {list(offsets.shape)}"
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights of shape {list(weights.shape)} for ids of shape {list(ids.shape)}"
    if weights is not None and module.mode != "sum":
        return f"per_sample_weights with mode {module.mode!r}; torch defines them for 'sum' only"
    return ""


def _flat(
    module: nn.EmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> _Bags:
    if offsets is None:
        length = ids.shape[1]
        starts = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype) * length
        return _Bags(ids.reshape(-1), starts, None if weights is None else weights.reshape(-1))
    return _Bags(ids, offsets[:-1] if module.include_last_offset else offsets, weights)
