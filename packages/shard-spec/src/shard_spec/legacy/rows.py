"""Local batches in, the full batch as a DTensor, and this rank's rows out again.

Torch's ``from_local`` and ``to_local`` do not tell what the gradient of a gradient is: a second derivative through a
partial sum comes out wrong, without an error. Here it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shard_spec._shared.consensus import all_gather_header, raise_joined
from shard_spec._shared.dtensor import as_dtensor
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.apply.tensors import refuse_second_derivative
from shard_spec.distributed.parameter_format import GroupRef, MeshCache, choose_format
from shard_spec.layout.layout import Layout
from shard_spec.layout.placements import chunk
from shard_spec.specs import ShardingSpec

T = TypeVar("T", bound=torch.Tensor)


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """``local`` as a DTensor of global ``shape``. Its gradient lies alike; that of a partial sum is replicated."""
    return _differentiated_once(as_dtensor(local.contiguous(), mesh, placements, shape))


def unwrap(value: DTensor, gradient: Sequence[Placement] | None = None) -> torch.Tensor:
    """The local tensor of ``value``; ``gradient`` tells what the ranks' gradients will be.

    By default they lie alike, and each rank has the whole gradient of its part of a partial sum.
    """
    default = [Replicate() if placement.is_partial() else placement for placement in value.placements]
    return _differentiated_once(value.to_local(grad_placements=default if gradient is None else gradient))


def _differentiated_once(value: T) -> T:
    if not torch.is_grad_enabled():
        return value.detach()  # type: ignore[return-value]  # of its type; torch's functions hand requires_grad on
    if value.requires_grad:
        value.register_hook(lambda grad: refuse_second_derivative())  # type: ignore[no-untyped-call]  # DTensor's
    return value


def whole(value: DTensor, *, parts: bool) -> torch.Tensor:
    """All of ``value`` on every rank. The ranks' gradients are ``parts`` of a sum, or the same whole gradient."""
    everywhere: list[Placement] = [Replicate()] * value.device_mesh.ndim
    return unwrap(value.redistribute(placements=everywhere), [Partial()] * len(everywhere) if parts else everywhere)


NOT_RUN = "the forward has not run on any rank"


@dataclass(eq=False)
class BatchRows:
    """The rows of one batch over the ranks of a group: a line of ranks, each with torch's chunk of them."""

    group: GroupRef
    mesh: DeviceMesh  # one axis, in the order of the group
    totals: set[int] = field(default_factory=set)  # of rows that entered since the last forward of the root began

    def line(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return ``mesh`` if its axis is the group in order, else that of the rows."""
        same = mesh.ndim == 1 and tuple(mesh.mesh.tolist()) == self.group.ranks
        return mesh if same else self.mesh

    def enter(self, rows: torch.Tensor, name: str, mesh: DeviceMesh, problem: str = "") -> DTensor:
        """The full batch, sharded by rows, on ``line(mesh)``. A collective of 64 bytes that compares the inputs.

        ``problem`` is what this rank finds wrong with its own input. All ranks raise then, and where rows are no chunks
        of the batch, or dtypes, the other dims, grad modes or autocast differ.
        """
        subject, lines, count, requires_grad = f"the forward of {name or '(root)'}", [""], 0, False
        error = None
        if problem:
            error = PlanError(Problem("invalid-argument", name, found=problem, hint="correct the input there"))
        else:
            kind = rows.device.type
            cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            lines = [f"input: {rows.dtype} [rows, {', '.join(map(str, rows.shape[1:]))}]"]
            lines += [f"grad mode: {torch.is_grad_enabled()}", f"autocast: {cast}"]
            count, requires_grad = rows.shape[0], rows.requires_grad
        digest = bytes([bool(problem)]) + hashlib.sha256("\n".join((subject, *lines)).encode()).digest()
        mine = digest + count.to_bytes(8, "big") + bytes([requires_grad])
        headers = all_gather_header(self.group.group, mine, subject, NOT_RUN)
        if problem or len({header[: len(digest)] for header in headers}) > 1:
            hint = "pass local batches that can be concatenated, in one grad mode and autocast"
            raise_joined(self.group.group, subject, lines, error, hint=hint, state=NOT_RUN)
        counts = [int.from_bytes(header[len(digest) : len(digest) + 8], "big") for header in headers]
        total = sum(counts)
        if counts != self.chunks(total):
            # A DTensor knows the total alone, and takes each rank's rows to be torch's chunk of it.
            raise PlanError(
                Problem(
                    "invalid-argument",
                    name,
                    found=f"local batches of {counts} rows, not torch.chunk's chunks of one batch",
                    hint=f"{self.chunks(total)} rows of {total} would be right: pad the last batch, or drop it",
                )
            )
        self.totals.add(total)
        if any(header[len(digest) + 8] for header in headers) and not requires_grad:
            rows = rows.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        return wrap(rows, self.line(mesh), [Shard(0)], (total, *rows.shape[1:]))

    def leave(self, value: DTensor, name: str) -> torch.Tensor:
        """This rank's rows of an output, with all columns. A collective where other ranks have parts of them."""
        if not value.dim() or value.shape[0] not in self.totals:
            raise PlanError(
                Problem(
                    "invalid-layout",
                    name,
                    found=f"an output of shape {list(value.shape)} from batches of {sorted(self.totals)} rows",
                    hint="name a module whose output has one row for each row of the batch",
                )
            )
        return unwrap(on_mesh(value, self.line(value.device_mesh), name).redistribute(placements=[Shard(0)]))

    def chunks(self, total: int) -> list[int]:
        """Rows of ``total`` that each rank holds."""
        return [chunk(total, self.group.size, rank)[1] for rank in range(self.group.size)]


def on_mesh(value: DTensor, mesh: DeviceMesh, name: str) -> DTensor:
    """``value`` on ``mesh``: as it is, or gathered where the meshes differ."""
    if value.device_mesh == mesh:
        return value
    mine, wanted = (sorted(each.mesh.flatten().tolist()) for each in (value.device_mesh, mesh))
    if mine != wanted:
        raise PlanError(
            Problem(
                "mesh-mismatch",
                name,
                found=f"a DTensor on ranks {mine}; the module is sharded over {wanted}",
                hint="redistribute the input onto the ranks of the module's weight, or pass this rank's rows",
            )
        )
    return wrap(whole(value, parts=False), mesh, [Replicate()] * mesh.ndim, value.shape)


@dataclass(eq=False)
class ReshardOutput:
    """Forward hook: the output of the concatenated batch, in the layout of ``output_plan``.

    A plain output counts as this rank's rows of it.
    """

    name: str
    wanted: ShardingSpec | Layout
    rows: BatchRows
    meshes: MeshCache

    @eager_only
    def __call__(self, module: nn.Module, args: Any, output: Any) -> DTensor:
        """Redistribute; a collective where the layout differs."""
        value = _one_tensor(output, self.name, "output_plan")
        if not isinstance(value, DTensor):
            value = self.rows.enter(value, self.name, self.rows.mesh, "" if value.dim() else "a scalar, without rows")
        layout = self.wanted if isinstance(self.wanted, Layout) else self.wanted.to_layout(value.shape)
        wanted = choose_format(layout, tuple(value.shape), self.name)
        if isinstance(wanted, Problem):
            raise PlanError(wanted)
        return on_mesh(value, self.meshes.mesh_of(layout), self.name).redistribute(placements=wanted.placements)


@dataclass(eq=False)
class LocalRows:
    """Forward hook: a plain tensor in place of a DTensor output.

    This rank's rows, the ones it passed, with all columns. Where ``output_plan`` asked for a layout that does not cut
    rows, it is this rank's part in that layout. A plain output is this rank's rows already.
    """

    name: str
    rows: BatchRows
    laid_out: bool

    @eager_only
    def __call__(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        """Give the rows back; a collective where another rank has parts of them."""
        value = _one_tensor(output, self.name, "return_local_tensor")
        if not isinstance(value, DTensor):
            return value
        cut = {each.dim for each in value.placements if isinstance(each, Shard)}
        return unwrap(value) if self.laid_out and cut and 0 not in cut else self.rows.leave(value, self.name)


def _one_tensor(output: Any, name: str, what: str) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    raise PlanError(
        Problem(
            "wrong-type",
            name,
            found=f"an output of type {type(output).__name__}",
            hint=f"name a module that returns one tensor in {what}",
        )
    )
