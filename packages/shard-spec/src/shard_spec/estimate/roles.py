"""Roles of sharded weights: their effect on activations.

A plan fixes layouts, not their use. Roles of axes say it (:mod:`shard_spec.plan.axis_roles`); here a layout becomes the
role of one weight along a model axis.

A batch is given as a shape of token ids, or the arguments of forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.layout.placements import StageShard
from shard_spec.plan.axis_roles import AxisRoles
from shard_spec.plan.metadata import TensorMetadata

# Class of module -> (output dim of its weight, input dim).
_LINEAR = {"Linear": (0, 1), "Conv1D": (1, 0)}
_EMBEDDING = {"Embedding": (1, 0)}


def uncounted_axes(mesh: MeshSpec, roles: AxisRoles, counted: Iterable[str] = ()) -> list[str]:
    """Return remarks on uncounted costs along axes of several ranks, but those of ``counted`` activations."""
    remarks = (
        ("expert", "experts stay where they are; the exchange of tokens for them is not counted"),
        ("context", "tokens of one sample lie on several ranks; what attention exchanges is not counted"),
        ("stage", "every stage counts as planned; what stages send each other is not counted"),
    )
    axes = ((axis, text) for role, text in remarks for axis in roles.axes(role) if mesh.axis_size(axis) > 1)
    return [f"{axis}: {text}" for axis, text in axes if axis not in counted]


def expert_modules(parameters: Iterable[TensorMetadata]) -> frozenset[str]:
    """Return FQNs of modules with several experts in one parameter, counted by dim 0."""
    stacked = (tensor for tensor in parameters if len(tensor.shape) == 3 and tensor.shape[0] > 1)
    return frozenset(t.name.rpartition(".")[0] for t in stacked if not t.module_type.startswith("Conv"))


def is_embedding(tensor: TensorMetadata) -> bool:
    """Return True if the tensor is a lookup table, not a factor of a product."""
    return tensor.module_type in _EMBEDDING


def role(tensor: TensorMetadata, layout: Layout, axis: str) -> str:
    """Return the role along ``axis``: ``"column"`` (outputs), ``"row"`` (inputs), ``"cut"`` (else) or ``"whole"``."""
    spec = layout.specs[layout.mesh.axis_index(axis)]
    if spec.dim is None or layout.mesh.axis_size(axis) == 1 or isinstance(spec, StageShard):  # one rank holds all
        return "whole"
    dims = _LINEAR.get(tensor.module_type) or _EMBEDDING.get(tensor.module_type)
    is_weight = len(tensor.shape) == 2 and tensor.name.rsplit(".", 1)[-1].startswith("weight")
    if dims is None or not is_weight:
        return "cut"
    return "column" if spec.dim % len(tensor.shape) == dims[0] else "row"


Batch: TypeAlias = Sequence[int] | Any
"""Numbers count the step of all ranks: ``(sequences, length)`` of token ids. Tensors are what one rank passes to
forward: one tensor, a tuple of arguments, or a mapping of keyword arguments."""


def forward_inputs(
    module: nn.Module, batch: Batch, mesh: MeshSpec, roles: AxisRoles
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return one rank's arguments of ``module.forward``; token ids are zeros on the meta device.

    Sequences are divided along data axes, the tokens of each sequence along context axes.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not is_token_batch(batch):
        return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
    if isinstance(batch, int) or len(batch) != 2 or min(batch) < 1:  # tokens alone have no shape
        raise PlanError(
            Problem(
                "invalid-argument",
                "batch",
                found=f"{batch!r:.100}",
                hint="give (sequences, length), or what one rank passes to forward",
            )
        )
    local, problems = [], []
    context = roles.axes("context")
    sides = ("sequences", [axis for axis in roles.data if axis not in context]), ("tokens of a sequence", context)
    for size, (what, axes) in zip(batch, sides, strict=True):
        ranks = prod(map(mesh.axis_size, axes))
        local.append(size // ranks)
        if size % ranks:
            problems.append(
                Problem(
                    "does-not-divide",
                    "batch",
                    axis=axes[0],
                    found=f"{size} {what} over {ranks} ranks of {', '.join(axes)}",
                    hint=f"give a multiple of {ranks}",
                )
            )
    raise_problems(problems)
    tokens = torch.zeros(*local, dtype=torch.long, device="meta")
    if "input_ids" in inspect.signature(module.forward).parameters:  # transformers
        return (), {"input_ids": tokens}
    return (tokens,), {}


def is_token_batch(batch: Batch) -> bool:
    """Return True if ``batch`` is made of numbers: ``(sequences, length)`` of token ids, or wrong."""
    return isinstance(batch, int) or (isinstance(batch, Sequence) and all(isinstance(each, int) for each in batch))


def local_shapes(layout: Layout, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return each rank's local shape, in mesh order."""
    cutting = [spec.dim is not None for spec in layout.specs]
    by_place: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes = []
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank)
        assert coordinate is not None
        # Only coordinates on sharding axes matter, so ranks that differ elsewhere share one result.
        place = tuple(at for at, cuts in zip(coordinate, cutting, strict=True) if cuts)
        if place not in by_place:
            by_place[place] = layout.local_shape(rank, shape)
        shapes.append(by_place[place])
    return shapes
