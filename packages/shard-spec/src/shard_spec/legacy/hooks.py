"""Forwards and hooks of a module that `shard_module` sharded: rows of batches, and the root's comparison.

Local batches enter, the full batch is a DTensor, and this rank's rows come out again. Torch's ``from_local`` and
``to_local`` do not tell what the gradient of a gradient is: a second derivative through a partial sum comes out wrong,
without an error. Here it is refused.

Hooks of the root sum gradients of full parameters, and compare what came after the call. What was added after
`shard_module` was not compared: its values may differ between the ranks. It is adopted once all ranks have the same;
without that its gradients would stay each rank's own, and the ranks would drift apart silently.

Forwards compute on DTensors, with local batches at both ends.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from shard_spec import _torch_compat
from shard_spec._shared.consensus import all_gather_header, assert_consistent, raise_joined, tensor_hash
from shard_spec._shared.dtensor import as_dtensor
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.apply.handle import (
    LayGradient,
    SumGradient,
    counted_on,
    is_sharded,
    refuse_second_derivative,
    replica_problems,
    summed_over,
)
from shard_spec.distributed import GroupRef, MeshCache, choose_format
from shard_spec.layout import Layout, MeshSpec, chunk
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
        return mesh if (mesh.ndim == 1 and tuple(mesh.mesh.tolist()) == self.group.ranks) else self.mesh

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
            lines = [
                f"input: {rows.dtype} [rows, {', '.join(map(str, rows.shape[1:]))}]",
                f"grad mode: {torch.is_grad_enabled()}",
                f"autocast: {cast}",
            ]
            count, requires_grad = rows.shape[0], rows.requires_grad
        digest = bytes([bool(problem)]) + hashlib.sha256("\n".join((subject, *lines)).encode()).digest()
        mine = digest + count.to_bytes(8, "big") + bytes([requires_grad])
        headers = all_gather_header(self.group.group, mine, subject, NOT_RUN)
        if problem or len({header[: len(digest)] for header in headers}) > 1:
            raise_joined(
                self.group.group,
                subject,
                lines,
                error,
                hint="pass local batches that can be concatenated, in one grad mode and autocast",
                state=NOT_RUN,
            )
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
class ModuleOutput:
    """Forward hook of a module that ``output_plan`` or ``return_local_tensor`` names.

    With ``wanted`` the output of the concatenated batch, in this layout; a plain output counts as this rank's rows of
    it. With ``local`` a plain tensor in place of a DTensor: this rank's rows, the ones it passed, with all columns, or
    its part in a wanted layout that does not cut rows. A plain output is this rank's rows already.
    """

    name: str
    rows: BatchRows
    meshes: MeshCache
    wanted: ShardingSpec | Layout | None  # of ``output_plan``
    local: bool  # named in ``return_local_tensor``

    @eager_only
    def __call__(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        """Redistribute, or give rows back; a collective where the layout differs or another rank has parts of them."""
        if not isinstance(output, torch.Tensor):
            what = "return_local_tensor" if self.wanted is None else "output_plan"
            raise PlanError(
                Problem(
                    "wrong-type",
                    self.name,
                    found=f"an output of type {type(output).__name__}",
                    hint=f"name a module that returns one tensor in {what}",
                )
            )
        value = output if self.wanted is None else self._laid_out(output, self.wanted)
        if not (self.local and isinstance(value, DTensor)):
            return value
        cut = {each.dim for each in value.placements if isinstance(each, Shard)}
        keeps_rows = self.wanted is not None and cut and 0 not in cut
        return unwrap(value) if keeps_rows else self.rows.leave(value, self.name)

    def _laid_out(self, value: torch.Tensor, wanted: ShardingSpec | Layout) -> DTensor:
        if not isinstance(value, DTensor):
            value = self.rows.enter(value, self.name, self.rows.mesh, "" if value.dim() else "a scalar, without rows")
        layout = wanted if isinstance(wanted, Layout) else wanted.to_layout(value.shape)
        expression = choose_format(layout, tuple(value.shape), self.name)
        if isinstance(expression, Problem):
            raise PlanError(expression)
        return on_mesh(value, self.meshes.mesh_of(layout), self.name).redistribute(placements=expression.placements)


class CompareAndHook:
    """Forward pre-hook of the root: compares the module with the other ranks' and hooks what lacks its hook.

    Copies of a module and parameters that start to need a gradient later get their hooks at the next forward. So do
    parameters that were swapped with others, as ``module.to()`` does under
    ``torch.__future__.set_swap_module_params_on_conversion``: their hooks are listed still and run no more.
    """

    def __init__(self, rows: BatchRows, *, everything: bool, others: Sequence[nn.Module]) -> None:
        """Take the module as it is for compared, from the first `adopt` on.

        The call decided about ``everything`` in it, or only about what runs sharded. ``others`` are modules that a
        Sharder decides about.
        """
        self.rows = rows
        self.everything = everything
        self.others = list(others)
        self._known: dict[str, object] = {}  # FQN to the parameter, or to the module that has the buffer
        self._summed = 0  # checksum of the names of summed gradients since the last forward, in their order
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy has parameters of its own, which no rank has compared and which have lost their hooks.
        return {**vars(self), "_known": {}, "_summed": 0, "_handles": []}

    @eager_only
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Compare; a collective of 64 bytes where the ranks agree."""
        self.rows.totals.clear()
        # Sums of gradients that are not of one parameter, where ranks took other branches, mix them without an error.
        lines = [f"gradients summed since the last forward: {self._summed:08x}"]
        problems: list[Problem] = []
        self._summed = 0
        for fqn, owner, tensor in self._tensors(module):
            forward, name = owner.__dict__.get("forward"), fqn.rpartition(".")[2]
            plain = not is_sharded(tensor)
            if plain and isinstance(forward, ShardedForward) and name in forward.sharded:
                problems.append(
                    Problem(
                        "not-sharded",
                        fqn,
                        found="it was sharded, and is full now",
                        hint="undo() first, or put the sharded parameter back",
                    )
                )
            frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
            line = f"{fqn}: {str(tensor.dtype).removeprefix('torch.')}, {'whole' if plain else 'a shard'}{frozen}"
            # Ranks never compared a new tensor; a buffer may be replaced in its module.
            is_new = self._known.get(fqn) is not (tensor if isinstance(tensor, nn.Parameter) else owner)
            if plain and self.everything and is_new:
                problems += replica_problems([owner], fqn)
                line += f", new, with values {tensor_hash(tensor).tolist()}"
            lines.append(line)
        error = PlanError(problems) if problems else None
        hint = "change the module alike on every rank; shard_module(new, ShardingPlan({})) gives all rank 0's values"
        subject = "the forward of a module that shard_module sharded"
        assert_consistent(self.rows.group.group, subject, lines, error, hint=hint, state=NOT_RUN)
        self.adopt(module)

    def adopt(self, module: nn.Module) -> None:
        """Take the module for compared, and hook its parameters; sends nothing."""
        tensors: dict[str, object] = {}
        for fqn, owner, tensor in self._tensors(module):
            tensors[fqn] = tensor if isinstance(tensor, nn.Parameter) else owner
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
                continue
            hook: SumGradient | LayGradient
            if isinstance(tensor, DTensor):
                hook = LayGradient(tuple(tensor.placements))
                ours = any(isinstance(each, LayGradient) for each in _torch_compat.tensor_hooks(tensor))
            else:
                hook = SumGradient(self.rows.group, partial(self._note, fqn))
                ours = any(each.group is self.rows.group.group for each in summed_over(tensor))
            if ours:
                tensor._backward_hooks = tensor._backward_hooks  # registers them again: swap_tensors stops them
            elif not is_sharded(tensor) or _runs_sharded(owner):
                self._handles.append(tensor.register_hook(hook))
        self._known = tensors

    def remove(self) -> None:
        """Take the hooks of parameters away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, name: str) -> None:
        self._summed = zlib.crc32(name.encode(), self._summed)

    def _tensors(self, root: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
        """Each parameter and saved buffer that the call decides about: FQN, the module that has it, the tensor."""
        stack, seen = [("", root)], {id(root), *map(id, self.others)}
        while stack:
            path, module = stack.pop()
            if self.everything or _runs_sharded(module):
                for name, parameter in module._parameters.items():
                    elsewhere = parameter is not None and any(
                        each.group is not self.rows.group.group for each in summed_over(parameter)
                    )
                    if parameter is not None and not elsewhere:
                        yield path + name, module, parameter
            for name, buffer in module._buffers.items() if self.everything else ():
                # Others are what a forward keeps for itself.
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield path + name, module, buffer
            for name, child in reversed(module._modules.items()):
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    stack.append((f"{path}{name}.", child))


def _runs_sharded(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), ShardedForward)


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
            wrong = (
                f"an input of shape {list(rows.shape)}: a local batch has rows in dim 0"
                f" and at least {least_dims} dim(s)"
            )
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
