"""The tensor-parallel axis at run time: collectives, and changes of layout with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tp_styles._shared.consensus import all_gather_small, as_bytes
from tp_styles._torch_compat import (
    all_gather_into,
    functional_collectives,
    is_compiling,
    is_transformed,
    reduce_scatter_into,
    without_dispatch_modes,
)
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.votes import before_collective
from tp_styles.values import Redistribution, Split, Step, Transfer, gradient_layout, normalized


class TPGroup:
    """Collectives over a 1-D mesh on local tensors. Outputs are fresh, inputs untouched, unless a name ends in `_`.

    Args:
        mesh: 1-D device mesh.
        subject: What communicates, for the error of a rank that waits for a rank that has raised.
    """

    def __init__(self, mesh: DeviceMesh, subject: str = "a parallel style") -> None:
        assert mesh.ndim == 1, mesh
        self.mesh, self.subject = mesh, subject
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        return self.mesh.get_group()  # first use, also after a pickle

    # Process groups can be neither copied nor pickled; the mesh can, and finds its groups again.
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "group"}

    def __deepcopy__(self, memo: dict[int, Any]) -> TPGroup:
        return self  # copies of a model share it

    def communicate(self, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Make one collective of the axis outside of graphs.

        Raises:
            RuntimeError: It failed, as where another rank has raised before it and the group's timeout is over.
        """
        try:
            collective(*args, **options, group=self.group)
        except RuntimeError as error:
            axis = ", ".join(self.mesh.mesh_dim_names or ("without a name",))
            raise RuntimeError(
                f"{self.subject} over the mesh axis {axis}: {collective.__name__} failed on rank {dist.get_rank()}:"
                " another rank died, or made no such call, and its own error says why"
            ) from error

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if is_compiling():  # in a graph: functional collectives
            return self.all_reduce(x)
        if x.is_contiguous():
            self.communicate(dist.all_reduce, x)
            return x
        return x.copy_(self.all_reduce(x))  # collectives need contiguous memory

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        if is_compiling():
            reduced: torch.Tensor = functional_collectives.all_reduce(x, "sum", (self.mesh, 0))
            return reduced
        out = x.clone(memory_format=torch.contiguous_format)
        self.communicate(dist.all_reduce, out)
        return out

    def all_reduce_max_(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; `x` is contiguous."""
        if is_compiling():
            greatest: torch.Tensor = functional_collectives.all_reduce(x, "max", (self.mesh, 0))
            return greatest
        self.communicate(dist.all_reduce, x, dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate all ranks' shards along `dim`; `sizes` if they differ."""
        return torch.cat(self.gather_parts(x, dim, sizes), dim=dim)

    def gather_parts(self, x: torch.Tensor, dim: int, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return all ranks' shards, in rank order; `sizes` along `dim` if they differ."""
        if sizes is None or len(set(sizes)) == 1:
            return self._stacked(x)
        parts = self._stacked(_padded(x, dim, max(sizes)))  # collectives need one size
        return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]

    def _stacked(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        if is_compiling():
            flat = functional_collectives.all_gather_tensor(x.reshape(1, -1), 0, (self.mesh, 0))
            return [part.view(x.shape) for part in flat.unbind(0)]
        out = x.new_empty((self.size, *x.shape))
        self.communicate(all_gather_into, as_bytes(out), as_bytes(x))  # backends do not know every type
        return list(out.unbind(0))

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's shard along `dim` of the sum over the ranks. `sizes` has all ranks' lengths."""
        pieces = torch.split(x, list(sizes), dim=dim)
        largest = max(sizes)
        stacked = torch.stack([_padded(chunk, dim, largest) for chunk in pieces])  # shards of one size
        if is_compiling():
            out = functional_collectives.reduce_scatter_tensor(stacked, "sum", 0, (self.mesh, 0)).squeeze(0)
        else:
            out = stacked.new_empty(stacked.shape[1:])
            flat_in, flat_out = stacked.view(-1), out.view(-1)
            self.communicate(reduce_scatter_into, flat_out, flat_in)
        own = sizes[self.rank]
        part: torch.Tensor = out if own == largest else out.narrow(dim, 0, own).contiguous()  # without padding
        return part

    def exchange(
        self, x: torch.Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> torch.Tensor:
        """Exchange rows of dim 0: as many from and to each rank as the lists say, equally many without them."""
        x = x.contiguous()
        if is_compiling():
            out: torch.Tensor = functional_collectives.all_to_all_single(x, received, sent, (self.mesh, 0))
            return out
        out = torch.empty_like(x) if received is None else x.new_empty(sum(received), *x.shape[1:])
        self.communicate(dist.all_to_all_single, out, x, received, sent)
        return out

    def all_to_all(
        self,
        x: torch.Tensor,
        source_dim: int,
        dim: int,
        source_sizes: Sequence[int],
        sizes: Sequence[int],
    ) -> torch.Tensor:
        """Exchange shards of `source_dim` for shards of `dim`; both lists of sizes are by rank."""
        pieces = [chunk.contiguous() for chunk in torch.split(x, list(sizes), dim=dim)]
        packed = torch.cat([chunk.reshape(-1) for chunk in pieces])
        shapes = []
        for size in source_sizes:  # shape of the block from each rank
            shape = list(x.shape)
            shape[source_dim], shape[dim] = size, sizes[self.rank]
            shapes.append(shape)
        received = [math.prod(shape) for shape in shapes]
        out = self.exchange(packed, received, [chunk.numel() for chunk in pieces])
        parts = [part.view(shape) for part, shape in zip(torch.split(out, received), shapes, strict=True)]
        return torch.cat(parts, dim=source_dim)

    def all_gather_objects(self, value: Any, subject: str) -> list[Any]:
        """Gather picklable objects of all ranks; a dead peer is an error with `subject`."""
        before_collective(self.group, subject)
        with without_dispatch_modes():  # the check's mode would see every copy of the bytes
            return all_gather_small(self.group, value, subject)

    def slice(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's shard of `x` along `dim` (a view)."""
        return x.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank])


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)


# Size of every rank's shard along one dim.
Sizes = tuple[int, ...]


class Redistribute:
    """One flow, callable on the activation.

    Args:
        flow: The flow.
        axis: Its ranks.
        name: Name of the tensor, for errors.
        inplace_ok: The tensor is a temporary of the caller and may be reduced in place.
        uneven: Shards of a dim of unknown size may differ: the caller keeps the global size.
    """

    def __init__(
        self, flow: Redistribution, axis: TPGroup, name: str = "", *, inplace_ok: bool = False, uneven: bool = False
    ) -> None:
        self.uneven = uneven
        self.sections = None if flow.split is None or flow.split.is_single else flow.split
        self.flow = flow
        # Errors of a waiting rank name the place in the model; a loss has named its axis itself.
        self.axis = axis if name in ("", axis.subject) else TPGroup(axis.mesh, f"a parallel style at {name}")
        self.name = name
        self.inplace_ok = inplace_ok
        self.is_even = axis.size == 1
        self.ends: list[BlockInput] = []  # of a row-wise layer's input: what its block has brought in is let go
        self._transfers: dict[int, Transfer] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The activation in the wanted layout, a local tensor. DTensors are moved from the layout they have."""
        for block_input in self.ends:
            if block_input.last is self or is_compiling():  # one graph leaves nothing behind for another
                block_input.source = block_input.entered = None
        if isinstance(x, DTensor):
            x = self.redistributed(x)
            gradient = self.flow.gradient or gradient_layout(self.flow.dst)
            return x.to_local(grad_placements=(normalized(gradient, x.dim()),))
        transfer = self._transfers.get(x.dim())  # negative dims depend on it
        if transfer is None:
            transfer = self._transfers[x.dim()] = self.flow.transfer(x.dim())
        if transfer.forward.op == "none" and (transfer.backward.op == "none" or not x.requires_grad):
            return x  # nothing moves in either pass
        in_graph = is_compiling()
        if not in_graph and is_transformed():
            refuse_transforms(self.name)
        if in_graph or (x.requires_grad and torch.is_grad_enabled()):
            moved: torch.Tensor = _Moved.apply(x, transfer, self, None)  # type: ignore[no-untyped-call]  # torch's
            return moved
        return self.run(transfer.forward, x, {}, in_place=self.inplace_ok)

    def redistributed(self, x: DTensor) -> DTensor:
        """Return a DTensor in the wanted layout, from any layout."""
        if x.device_mesh != self.axis.mesh:
            raise StyleInputError(
                Problem(
                    "mesh-mismatch",
                    self.name,
                    found=f"a DTensor on {x.device_mesh}",
                    hint=f"the module is on {self.axis.mesh}; redistribute over that mesh before the call",
                )
            )
        wanted = (normalized(self.flow.dst, x.dim()),)
        return x if x.placements == wanted else x.redistribute(placements=wanted)

    def to_dtensor(self, x: torch.Tensor) -> DTensor:
        """Return the activation in the wanted layout, as a DTensor. Shards in plain tensors are even."""
        if not isinstance(x, DTensor):
            source = normalized(self.flow.src, x.dim())
            if isinstance(source, Shard):
                self.check_even(x.shape[source.dim], source.dim)
            x = DTensor.from_local(x, self.axis.mesh, (source,), run_check=False)
        return self.redistributed(x)

    # ------------------------------------------------------------------ the steps

    def run(self, step: Step, x: torch.Tensor, sizes: dict[int, Sizes], *, in_place: bool = False) -> torch.Tensor:
        """Execute one step on a plain tensor, without autograd; a sum in place, if allowed.

        Args:
            step: The step.
            x: The local tensor.
            sizes: Dim -> every rank's shard size, as far as known from other steps; the step adds its own.
                A backward step needs it: a local gradient does not show the size of the other ranks' shards.
            in_place: The tensor's memory may be written to.
        """
        axis = self.axis
        match step.op:
            case "none":
                return x
            case "all_reduce":
                if self.sections is not None:  # gradient of a parameter with the same rows on several ranks
                    return _sum_of_copies(x, axis, self.sections)
                return axis.all_reduce_(x) if in_place else axis.all_reduce(x)
            case "all_gather":
                assert step.dim is not None
                shard_sizes = self._shard_sizes(x, step.dim, sizes)
                if self.sections is not None and self._feature_sizes(x, step.dim) is not None:
                    return replace(self.sections, dim=step.dim).join(axis.gather_parts(x, step.dim, shard_sizes))
                return axis.all_gather(x, step.dim, shard_sizes)
            case "slice":
                assert step.dim is not None
                if self._feature_sizes(x, step.dim) is not None and self.sections is not None:
                    return replace(self.sections, dim=step.dim).take(x, axis.rank, axis.size)
                return axis.slice(x, step.dim, self._sizes_of_full(x, step.dim, sizes))
            case "reduce_scatter":
                assert step.dim is not None
                return axis.reduce_scatter(x, step.dim, self._sizes_of_full(x, step.dim, sizes))
            case "all_to_all":
                assert step.dim is not None
                assert step.source_dim is not None
                source = self._shard_sizes(x, step.source_dim, sizes)
                return axis.all_to_all(x, step.source_dim, step.dim, source, self._sizes_of_full(x, step.dim, sizes))

    def _feature_sizes(self, x: torch.Tensor, dim: int) -> Sizes | None:
        if dim != x.dim() - 1 or self.flow.split is None:
            return None
        return self.flow.split.sizes(self.axis.size)

    def _shard_sizes(self, x: torch.Tensor, dim: int, known: dict[int, Sizes]) -> Sizes:
        """Return the sizes of all ranks' shards of a sharded dim."""
        sizes = self._feature_sizes(x, dim) or known.get(dim)
        if sizes is None:
            self.check_even(x.shape[dim], dim)
            sizes = (x.shape[dim],) * self.axis.size
        known[dim] = sizes
        if x.shape[dim] != sizes[self.axis.rank]:
            raise StyleInputError(
                Problem(
                    "shape-mismatch",
                    self.name,
                    dim=dim,
                    found=f"{x.shape[dim]} on rank {self.axis.rank}",
                    hint=f"this rank's shard of a global size of {sum(sizes)} has {sizes[self.axis.rank]}",
                )
            )
        return sizes

    def check_even(self, size: int, dim: int) -> None:
        """Compare the size of shards between the ranks, once: plain tensors carry no global size.

        Raises:
            StyleInputError: They differ; on every rank.
        """
        if self.is_even or is_compiling():
            return
        sizes = self.axis.all_gather_objects(size, "the first call")
        if len(set(sizes)) > 1:
            raise StyleInputError(
                Problem(
                    "uneven-shards",
                    self.name,
                    dim=dim,
                    found=f"sizes {sizes} on the ranks",
                    hint="pad to a multiple of the tp size, or pass a DTensor, which has a global size",
                )
            )
        self.is_even = True

    def _sizes_of_full(self, x: torch.Tensor, dim: int, known: dict[int, Sizes]) -> Sizes:
        """Return the sizes of all ranks' shards of a dim in full on this rank."""
        sizes = self._feature_sizes(x, dim)
        full = x.shape[dim]
        assert sizes is None or self.sections is None, "plans refuse to cut sections across"
        sizes = sizes or known.get(dim)
        if sizes is None:
            if full % self.axis.size and not self.uneven:
                # Shards of a plain tensor carry no global size: a later gather has to take them as even.
                raise StyleInputError(
                    Problem(
                        "uneven-shards",
                        self.name,
                        dim=dim,
                        found=f"size {full} over {self.axis.size} ranks",
                        hint="pad it to a multiple of the tp size, or pass a DTensor, which has a global size",
                    )
                )
            sizes = Split.along(dim, full).sizes(self.axis.size)
        known[dim] = sizes
        if sum(sizes) != full:
            raise StyleInputError(
                Problem("shape-mismatch", self.name, dim=dim, found=f"{full}", hint=f"the module takes {sum(sizes)}")
            )
        return sizes


class BlockInput(Redistribute):
    """Brings in the input of column-wise layers, once for all that read one tensor. `last` lets go of it.

    They stand behind one node of autograd: their gradients are summed on this rank, then once over the ranks.
    """

    def __init__(self, flow: Redistribution, axis: TPGroup, name: str, last: Redistribute) -> None:
        super().__init__(flow, axis, name)
        self.last = last
        self.source: torch.Tensor | None = None  # held, so that no other tensor can take its identity
        self.entered: torch.Tensor | None = None
        self.versions = 0

    def __getstate__(self) -> dict[str, Any]:  # a forward that an error has ended leaves a tensor of its graph
        return {**vars(self), "source": None, "entered": None}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor as another layer has brought it in, unless it was written to since."""
        in_graph, entered = is_compiling(), self.entered
        if (
            entered is not None
            and self.source is x
            and self.versions == (-1 if in_graph else x._version + entered._version)
            and entered.requires_grad == (x.requires_grad and torch.is_grad_enabled())
        ):
            return entered
        entered = super().__call__(x)
        if entered is x:
            return x
        if in_graph:  # writes cannot be seen there; of a view, which comes of equal layouts, torch refuses them
            if self.flow.src == self.flow.dst and not isinstance(x, DTensor):
                self.source, self.entered, self.versions = x, entered, -1
        elif not (x.is_inference() or entered.is_inference()):  # these have no versions
            self.source, self.entered, self.versions = x, entered, x._version + entered._version
        return entered


def moved_back(x: torch.Tensor, move: Redistribute, sizes: Sequence[int]) -> torch.Tensor:
    """Return the full tensor of shards along dim 0 whose sizes this rank knows; backward takes its shard again."""
    moved: torch.Tensor = _Moved.apply(  # type: ignore[no-untyped-call]  # torch's Function
        x, move.flow.transfer(x.dim()), move, {0: tuple(sizes)}
    )
    return moved


def refuse_transforms(name: str) -> None:
    """Refuse transforms of `torch.func` and forward-mode differentiation: collectives have no rule for them.

    Raises:
        StyleInputError: One is active.
    """
    if not is_compiling() and is_transformed():
        raise StyleInputError(
            Problem(
                "unsupported-option",
                name,
                found="a transform of torch.func, or forward mode",
                hint="torch.autograd.grad outside of transforms, and functional_call on shards, are right; undo() gives"
                " the"
                " full model",
            )
        )


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, transfer: Transfer, move: Redistribute, known: dict[int, Sizes] | None
    ) -> torch.Tensor:
        sizes: dict[int, Sizes] = dict(known or {})
        ctx.transfer, ctx.move, ctx.sizes = transfer, move, sizes
        if transfer.forward.op == "none":
            return x.view_as(x)  # only backward communicates
        # A gradient that is moved again, with known sizes, is not ours to write to.
        moved = move.run(transfer.forward, x, sizes, in_place=move.inplace_ok and known is None)
        if moved is x:  # reduced in place
            ctx.mark_dirty(x)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if isinstance(ctx.move, BlockInput) and not is_compiling():  # a checkpoint of one layer has brought it in again
            ctx.move.source = ctx.move.entered = None
        # Recorded (`create_graph=True`): the two steps are each other's transpose, and none works in place.
        if torch.is_grad_enabled() and not is_compiling():
            again = Transfer(ctx.transfer.backward, ctx.transfer.forward)
            return _Moved.apply(gradient, again, ctx.move, ctx.sizes), None, None, None  # type: ignore[no-untyped-call]
        return ctx.move.run(ctx.transfer.backward, gradient, dict(ctx.sizes)), None, None, None


def _sum_of_copies(gradient: torch.Tensor, axis: TPGroup, split: Split) -> torch.Tensor:
    """Sum only sections with copies, in a buffer of their global size. It has few rows, and no new group is made."""
    assert split.dim is not None
    dim = split.dim
    pieces = list(torch.split(gradient, [stop - start for start, stop in split.ranges(axis.rank, axis.size)], dim=dim))
    for index, section in enumerate(split.sections):
        if section.copies == 1:
            continue
        start, stop = section.bounds(axis.rank, axis.size)
        shape = list(gradient.shape)
        shape[dim] = section.size
        buffer = gradient.new_zeros(shape)  # zeros where other ranks have rows
        buffer.narrow(dim, start, stop - start).copy_(pieces[index])
        pieces[index] = axis.all_reduce_(buffer).narrow(dim, start, stop - start)
    return torch.cat(pieces, dim=dim) if len(pieces) > 1 else pieces[0].contiguous()
