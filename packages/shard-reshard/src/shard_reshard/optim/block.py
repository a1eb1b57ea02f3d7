"""State of a rank between steps: masters of its matrices, and the parameters that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.execution.exchange import INTEGERS
from shard_reshard.group import GroupInfo
from shard_reshard.layout.shard_map import torch_dtype
from shard_reshard.optim.exchange import Exchange, declared_local, in_turn
from shard_reshard.optim.families import Family, Make
from shard_reshard.optim.plan import Matrix, OwnerPlan
from shard_reshard.state_dict.agreement import local_tensor


class Guard(NamedTuple):
    """State of a parameter on this rank after a step, to see what others write to it.

    Attributes:
        versions: Versions of the parameter and of its local tensor, that one's address and shape.
        sums: What follows from the local tensor's bits, see `_sums_of`.
    """

    versions: tuple[int, int, int, torch.Size]
    sums: torch.Tensor


class Block:
    """Parameters of one plan: all groups of the constructor, or a group that was added later.

    Attributes:
        exchange: Owners, and moves between them and the parameters.
        order: Names of all parameters in the caller's order.
        parameters: The model's parameters whose matrices have owners.
        rest: Those that stay in their shards.
        plain: Names of full tensors without a declared layout.
        families: The optimizers of matrices.
        in_shards: The optimizer of parameters that stay in their shards, or None.
        make_in_shards: The caller's function for it.
        masters: Matrices that this rank owns, by name. They come into being with the first gradient.
        guards: By parameter with masters, its local tensor after the last step or fetch. Equal on all ranks in its
            names.
        stepped: Names of matrices that were updated, equal on all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        order: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        rest: Mapping[str, nn.Parameter],
        plain: Iterable[str],
    ) -> None:
        self.exchange, self.order = exchange, list(order)
        self.parameters, self.rest, self.plain = parameters, rest, frozenset(plain)
        self.families: list[Family] = []
        self.in_shards: Optimizer | None = None
        self.make_in_shards: Make | None = None
        self.masters: dict[str, nn.Parameter] = {}
        self.guards: dict[str, Guard] = {}
        self.stepped: set[str] = set()

    @property
    def outer(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, with the model's parameters."""
        own = [group for family in self.families for group in family.outer]
        return own if self.in_shards is None else [*own, *self.in_shards.param_groups]

    @property
    def owners(self) -> OwnerPlan:
        """The plan of owners."""
        return self.exchange.planned.owners

    def owned(self, chunk: int) -> Iterator[tuple[int, Matrix]]:
        """Yield position and matrix of those in a chunk that this rank owns."""
        owners, rank = self.owners, self.exchange.members.rank
        return ((at, owners.matrices[at]) for at in owners.chunks[chunk] if owners.owners[at] == rank)

    def family_of(self, chunk: int) -> Family:
        """Return the family of a chunk: the matrices of a chunk are of one."""
        first = self.owners.chunks[chunk][0]
        return next(family for family in self.families if any(first in own for _, own in family.groups))

    def beside(self, chunks: Iterable[int]) -> set[str]:
        """Return the parameters of all matrices in some chunks."""
        return {self.owners.matrices[at].parameter for chunk in chunks for at in self.owners.chunks[chunk]}

    # ---- tensors of this rank ---------------------------------------------------------------------------------

    def locals_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the local tensors of parameters."""
        return {name: local_tensor(self.parameters[name]) for name in names}

    def gradients(self, problems: list[Problem]) -> Gradients:
        """Return this rank's gradients; what cannot be moved is added to ``problems``."""
        gradients = Gradients()
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            declared: Any = declared_local(name, gradient, parameter)
            like: Any = parameter
            own, expected = local_tensor(declared), local_tensor(parameter)
            mesh = getattr(like, "device_mesh", None)
            differs = mesh is not None and (mesh != declared.device_mesh or like.placements != declared.placements)
            gradients.declared[name], gradients.local[name] = declared, own
            if differs:
                gradients.unlike[name] = str(declared.placements)
            elif (own.shape, own.dtype, own.device) != (expected.shape, expected.dtype, expected.device):
                problems.append(
                    Problem(
                        "shape-mismatch",
                        name,
                        found=f"a gradient of {own.dtype} {tuple(own.shape)} on {own.device}",
                        hint=f"the local parameter is of {expected.dtype} {tuple(expected.shape)} on {expected.device}",
                    )
                )
        return gradients

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return parameters that were written since this rank's last step: their masters are out of date."""
        held = [name for name in names if name in self.guards]
        written = [name for name in held if versions_of(self.parameters[name]) != self.guards[name].versions]
        others = [name for name in held if name not in written]
        if others:  # one comparison, and on a GPU one wait, for all of them
            now = {name: _sums_of(local_tensor(self.parameters[name])) for name in others}
            if not torch.equal(torch.cat([*now.values()]), torch.cat([self.guards[name].sums for name in others])):
                written += [name for name in others if not torch.equal(now[name], self.guards[name].sums)]
        return written

    def fetch(self, names: Iterable[str]) -> None:
        """Copy the values of parameters to their owners; a collective."""
        names = sorted(names)
        device_of = self.locals_of(names)
        chunks = self.exchange.chunks_of(names)

        def starts() -> Iterator[Any]:
            for chunk, moving in chunks.items():
                arriving = {}
                for _, matrix in self.owned(chunk):
                    if matrix.name not in moving:
                        continue
                    if matrix.name not in self.masters:
                        device = device_of[matrix.parameter].device
                        value = torch.empty(matrix.shape, dtype=torch_dtype(matrix.dtype), device=device)
                        differentiable = value.is_floating_point() or value.is_complex()
                        self.masters[matrix.name] = nn.Parameter(value, requires_grad=differentiable)
                    arriving[matrix.name] = self.masters[matrix.name].detach()
                yield chunk, self.exchange.there.start(chunk, moving, device_of, arriving)

        for _ in in_turn(starts()):
            pass
        self.guards |= {name: guard_of(self.parameters[name]) for name in names}

    def reset(self, names: Iterable[str]) -> None:
        """Drop all masters and state, and fetch the parameters of matrices that get state; a collective."""
        self.masters, self.guards = {}, {}
        for family in self.families:
            family.optimizers = {}
        self.stepped = {matrix.name for matrix in self.owners.matrices}.intersection(names)
        parameters = {m.parameter for m in self.owners.matrices if m.name in self.stepped}
        if parameters:
            self.fetch(self.beside(self.exchange.chunks_of(parameters)))

    def optimizer_of(self, chunk: int) -> Optimizer | None:
        """Return this rank's optimizer of a chunk, made with its masters; None if it owns none of them."""
        family = self.family_of(chunk)
        if chunk not in family.optimizers:
            tensors = {at: self.masters[matrix.name] for at, matrix in self.owned(chunk)}
            if not tensors:
                return None
            family.optimizers[chunk] = family.made(tensors)
        return family.optimizers[chunk]


@dataclass
class Gradients:
    """Gradients of a block on this rank.

    Attributes:
        local: Local tensors by parameter.
        declared: The same with their layouts.
        unlike: Placements of those that differ from their parameter's, such as partial sums.
    """

    local: dict[str, torch.Tensor] = field(default_factory=dict)
    declared: dict[str, torch.Tensor] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)


def guard_of(parameter: torch.Tensor) -> Guard:
    """Return what changes when a parameter is written in place, or gets other memory."""
    return Guard(versions_of(parameter), _sums_of(local_tensor(parameter)))


def versions_of(parameter: torch.Tensor) -> tuple[int, int, int, torch.Size]:
    """Return the versions of a parameter and of its local tensor, that one's address and shape."""
    local = local_tensor(parameter)
    # An operation on a DTensor counts as a version of that alone, one on its local tensor as a version of this alone.
    return parameter._version, local._version, local.data_ptr(), local.shape


def _sums_of(local: torch.Tensor) -> torch.Tensor:
    """Return sums of a tensor's bits over rows and over columns, as 64-bit integers; of a small tensor its bits.

    A write through ``parameter.data`` has no version. It does change a sum, unless it moves elements about so that all
    sums of rows and columns stay. Rows of numbers are added up too: modulo 2**64 an even number of changed signs of
    float64 comes to nothing.
    """
    rows = local.shape[0] if local.dim() > 1 else 1
    if not local.numel():
        return torch.empty(0, dtype=torch.int64, device=local.device)
    values = local.contiguous().view(rows, -1)
    wide = values.size(1) * values.element_size() % 8 == values.storage_offset() * values.element_size() % 8 == 0
    words = values.view(torch.int64 if wide else INTEGERS[min(8, values.element_size())])
    if words.numel() <= _FEW_WORDS:
        return words.flatten().to(torch.int64, copy=True)
    sums = [words.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    if values.is_floating_point() or values.is_complex():
        numbers = values.sum(1)
        sums.append(numbers.view(INTEGERS[min(8, numbers.element_size())]).to(torch.int64))
    return torch.cat(sums)


_FEW_WORDS = 1024


@dataclass
class Engine:
    """All that a `WholeMatrices` acts on.

    Attributes:
        members: The group.
        blocks: The constructor's parameters, and each added group.
        num_steps: Steps so far.
        broken: Why a failed step forbids the next one; empty if it does not.
        compared: Names of plain parameters whose gradients were compared between ranks.
    """

    members: GroupInfo
    blocks: list[Block] = field(default_factory=list)
    num_steps: int = 0
    broken: str = ""
    compared: set[str] = field(default_factory=set)

    def raise_broken(self, where: str) -> None:
        """Raise if a step failed on the way, on every rank."""
        if self.broken:
            raise PlanError(
                Problem(
                    "partly-updated",
                    where,
                    found=self.broken,
                    hint="load_state_dict() a file or a deepcopy of an earlier state_dict(); "
                    "parameters have their old values",
                )
            )

    @property
    def names(self) -> dict[int, str]:
        """Name of every parameter by its identity."""
        return {id(p): name for block in self.blocks for name, p in (*block.parameters.items(), *block.rest.items())}
