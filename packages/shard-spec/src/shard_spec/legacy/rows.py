"""Local batches in, the full batch as a DTensor, and this rank's rows out again."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shard_spec._shared.consensus import all_gather_header, raise_joined
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.distributed.mesh_cache import GroupRef
from shard_spec.legacy.wrapping import unwrap, whole, wrap

NOT_RUN = "the forward has not run on any rank"


class BatchRows:
    """The rows of one batch over the ranks of a group: a line of ranks, each with torch's chunk of them.

    Attributes:
        group: The ranks.
        mesh: One axis over them, in the order of the group.
        totals: Numbers of rows that entered since the last forward of the root began.
    """

    def __init__(self, group: GroupRef, mesh: DeviceMesh) -> None:
        self.group = group
        self.mesh = mesh
        self.totals: set[int] = set()

    def line(self, mesh: DeviceMesh) -> DeviceMesh:
        """``mesh`` where its one axis has the ranks in the order of the group, else the mesh of the rows."""
        same = mesh.ndim == 1 and tuple(mesh.mesh.tolist()) == self.group.ranks
        return mesh if same else self.mesh

    def enter(self, rows: torch.Tensor, name: str, mesh: DeviceMesh, problem: str = "") -> DTensor:
        """The full batch, sharded by rows, on ``line(mesh)``; a collective of 64 bytes that compares the inputs.

        Args:
            rows: This rank's batch.
            name: FQN of the module, for errors.
            mesh: Where the module will want the batch.
            problem: What this rank finds wrong with its own input; all ranks then raise.

        Raises:
            PlanError: On every rank: ``invalid-argument`` for a wrong input or rows that are no chunks of the batch,
                ``ranks-disagree`` where dtypes, the other dims, grad modes or autocast differ.
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
            hint = f"{self.chunks(total)} rows of {total} would be right: pad the last batch, or drop it"
            reason = f"local batches of {counts} rows, not torch.chunk's chunks of one batch"
            raise PlanError(Problem("invalid-argument", name, found=reason, hint=hint))
        self.totals.add(total)
        if any(header[len(digest) + 8] for header in headers) and not requires_grad:
            rows = rows.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        return wrap(rows, self.line(mesh), [Shard(0)], (total, *rows.shape[1:]))

    def leave(self, value: DTensor, name: str) -> torch.Tensor:
        """This rank's rows of an output, with all columns; a collective where other ranks have parts of them.

        Raises:
            PlanError: On every rank: ``invalid-layout`` for an output that has no row for each row of a batch.
        """
        if not value.dim() or value.shape[0] not in self.totals:
            reason = f"an output of shape {list(value.shape)} from batches of {sorted(self.totals)} rows"
            hint = "name a module whose output has one row for each row of the batch"
            raise PlanError(Problem("invalid-layout", name, found=reason, hint=hint))
        return unwrap(on_mesh(value, self.line(value.device_mesh), name).redistribute(placements=[Shard(0)]))

    def chunks(self, total: int) -> list[int]:
        """Rows of ``total`` that each rank holds."""
        most = -(-total // self.group.size)
        return [max(0, min(most, total - most * rank)) for rank in range(self.group.size)]


def on_mesh(value: DTensor, mesh: DeviceMesh, name: str) -> DTensor:
    """``value`` on ``mesh``: as it is, or gathered where the meshes differ.

    Raises:
        PlanError: ``mesh-mismatch`` where the meshes hold other ranks.
    """
    if value.device_mesh == mesh:
        return value
    mine, wanted = (sorted(each.mesh.flatten().tolist()) for each in (value.device_mesh, mesh))
    if mine != wanted:
        hint = "redistribute the input onto the ranks of the module's weight, or pass this rank's rows"
        reason = f"a DTensor on ranks {mine}; the module is sharded over {wanted}"
        raise PlanError(Problem("mesh-mismatch", name, found=reason, hint=hint))
    return wrap(whole(value, parts=False), mesh, [Replicate()] * mesh.ndim, value.shape)
