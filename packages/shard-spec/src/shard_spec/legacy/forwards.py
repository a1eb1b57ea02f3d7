"""Forwards of sharded modules on DTensors, with local batches at both ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.apply.tensors import counted_on
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.legacy.rows import BatchRows, on_mesh, unwrap, whole, wrap


@dataclass(eq=False, repr=False)
class ShardedForward:
    """A picklable callable in a module's instance attribute ``forward``. Deleting it restores the class's own."""

    original: ClassVar[Callable[..., Any]]  # the class's own forward
    tensors: ClassVar[tuple[str, ...]]  # the parameters that may be sharded under it

    module: nn.Module
    name: str  # FQN of the module, for errors
    rows: BatchRows  # how local batches enter and leave
    sharded: tuple[str, ...]  # names of its sharded parameters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, sharded={self.sharded})"

    def problem(self, rows: torch.Tensor) -> str:
        """Why this module cannot take local ``rows``; empty when it can."""
        return ""

    def batch(self, input: object, least_dims: int) -> DTensor:
        """The full batch as a DTensor, from this rank's rows or from the module before."""
        weight = self.module.weight
        if not isinstance(weight, DTensor):
            raise PlanError(
                Problem(
                    "not-sharded",
                    f"{self.name}.weight",
                    found=f"a {type(weight).__qualname__} in place of the sharded weight",
                    hint="undo the handle of shard_module before replacing parameters",
                )
            )
        if isinstance(input, DTensor):
            return on_mesh(input, weight.device_mesh, self.name)
        rows = input if isinstance(input, torch.Tensor) else torch.empty(0, device="cpu")
        if not isinstance(input, torch.Tensor):
            wrong = f"an input of type {type(input).__name__}: a tensor is needed"
        elif rows.device.type != weight.device.type:
            wrong = f"an input on {rows.device}: the weight is on {weight.device}"
        elif rows.dim() < least_dims:
            wrong = f"an input of shape {list(rows.shape)}: a local batch has rows in dim 0"
            wrong += f" and at least {least_dims} dim(s)"
        else:
            wrong = self.problem(rows)
        entered = self.rows.enter(rows, self.name, weight.device_mesh, wrong)
        return on_mesh(entered, weight.device_mesh, self.name)

    def parameter(self, name: str, mesh: DeviceMesh) -> DTensor | None:
        """One of the module's parameters on ``mesh``, whether it is sharded or not."""
        value = self.module._parameters[name]
        if value is None or isinstance(value, DTensor):
            return value if value is None else on_mesh(value, mesh, self.name)
        # The gradient that DTensor forms is the sum already, and the hook of a plain parameter sums over the ranks.
        first = counted_on(self.rows.group.rank == 0, value, value)
        return wrap(first, mesh, [Replicate()] * mesh.ndim, value.shape)


def along(weight: DTensor, by_dim: dict[int, Placement]) -> list[Placement]:
    """One placement for each mesh axis: ``by_dim[d]`` where it shards dim ``d`` of the weight."""
    return [by_dim[each.dim] if isinstance(each, Shard) else Replicate() for each in weight.placements]


class ShardedLinear(ShardedForward):
    """Local rows or a DTensor in. The outputs of all rows out, as a DTensor that lies as the weight has it.

    With a full weight and a sharded bias the output is this rank's rows.
    """

    original = nn.Linear.forward
    tensors = ("weight", "bias")

    @eager_only
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """``[my_rows, ..., in_features]`` (or a DTensor ``[total_rows, ..., in_features]``) to the output."""
        weight: Any = self.module.weight
        if "weight" not in self.sharded:
            full: Any = self.module.bias
            return F.linear(input, weight, whole(full, parts=True) if isinstance(full, DTensor) else full)
        x, mesh = self.batch(input, 2), weight.device_mesh
        last = Shard(x.dim() - 1)
        # Columns of the input meet columns of the weight; rows of the weight meet all of them. The product is a local
        # one: which layouts DTensor's own would redistribute on the way depends on their cost.
        x = x.redistribute(placements=along(weight, {0: Replicate(), 1: last}))
        x_local = unwrap(x, along(weight, {0: Partial(), 1: last}))
        local_bias, bias = None, self.parameter("bias", mesh)
        if bias is not None:  # of ranks that hold parts of one sum the first adds it
            bias = bias.redistribute(placements=along(weight, {0: Shard(0), 1: Replicate()}))
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            adds = not any(at for at, each in zip(coordinate, weight.placements, strict=True) if each.is_shard(1))
            local_bias = counted_on(adds, unwrap(bias, along(weight, {0: Shard(0), 1: Partial()})))
        local = F.linear(x_local, unwrap(weight), local_bias)
        return wrap(local, mesh, along(weight, {0: last, 1: Partial()}), (*x.shape[:-1], weight.shape[0]))

    def problem(self, rows: torch.Tensor) -> str:
        """See `ShardedForward.problem`."""
        features = self.module.in_features
        wrong = rows.shape[-1] != features
        return f"an input of shape {list(rows.shape)} for {features} input features" if wrong else ""


class ShardedEmbedding(ShardedForward):
    """This rank's ids in, this rank's rows out. DTensor ids (of the full batch) give a DTensor.

    Each rank looks all ids up in its shard of the table. DTensor's own lookup fails on a shard without rows, and forms
    the gradient of the full table on every rank.
    """

    original = nn.Embedding.forward
    tensors = ("weight",)

    @eager_only
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Ids ``[my_rows, ...]`` to ``[my_rows, ..., embedding_dim]``."""
        table, entered = self.module, self.batch(input, 1)
        assert isinstance(table, nn.Embedding)
        weight = table.weight
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        ids = entered.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        try:  # ids that no rank would look up; on an accelerator nothing is read back, its kernel traps
            torch.index_select(torch.zeros(1, device=ids.device).expand(table.num_embeddings), 0, ids.reshape(-1))
        except IndexError as error:
            raise IndexError(f"{self.name}: ids outside of a table of {table.num_embeddings} rows") from error
        layout = Layout(MeshSpec.from_device_mesh(mesh), weight.placements)
        ((start, size),) = layout.intervals(dist.get_rank(), tuple(weight.shape))[0]
        padding = table.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < start + size else None
        local = look_up(ids, unwrap(weight), start, padding)
        placements = along(weight, {0: Partial(), 1: Shard(ids.dim())})
        out = wrap(local, mesh, placements, (*ids.shape, table.embedding_dim))
        return out if isinstance(input, DTensor) else self.rows.leave(out, self.name)

    def problem(self, rows: torch.Tensor) -> str:
        """See `ShardedForward.problem`."""
        return "" if rows.dtype in (torch.int32, torch.int64) else f"ids of dtype {rows.dtype}; use int64 or int32"


def look_up(ids: torch.Tensor, table: torch.Tensor, start: int, padding: int | None) -> torch.Tensor:
    """The rows of a shard of a table; zeros for ids that other ranks have: ``[*ids.shape, my_columns]``.

    ``table`` has the rows from ``start`` on; its row ``padding`` gets no gradient.
    """
    size, elsewhere = table.shape[0], 0
    inside = (ids >= start) & (ids < start + size)
    if not size:  # a row to look up for ids of other ranks
        table, elsewhere = torch.cat([table, table.new_zeros(1, table.shape[1])]), size
    rows = F.embedding(torch.where(inside, ids - start, elsewhere), table, padding)
    return torch.where(inside.unsqueeze(-1), rows, 0)


class RefusedEmbeddingBag(ShardedForward):
    """Refuses the forward of a bag. A module around it may look ids up in its sharded table."""

    original = nn.EmbeddingBag.forward
    tensors = ("weight",)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raise on every rank, whatever is passed, before anything is sent.

        Raises:
            PlanError: ``module-not-shardable``.
        """
        raise PlanError(
            Problem(
                "module-not-shardable",
                self.name,
                found="the forward of an nn.EmbeddingBag whose table is sharded",
                hint="look ids up with a sharded nn.Embedding and reduce its rows, or leave this table replicated",
            )
        )
