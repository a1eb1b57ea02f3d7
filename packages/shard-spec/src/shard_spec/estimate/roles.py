"""Roles of sharded weights: their effect on activations.

A plan fixes layouts, not their use. These rules cover the two common uses: along a *data* axis ranks see different
samples (weights are gathered before use, gradients are reduced); along a *model* axis they see the same samples
(weights stay, activations are gathered or reduced). Along an *expert* axis (a data axis) experts stay and tokens travel
to them. Along a *context* axis ranks see other tokens of the same samples, along a *pipeline* axis they hold other
layers.

A batch is given as a shape of token ids, or the arguments of forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.metadata import TensorMetadata

EXPERT_AXIS_NAMES = frozenset({"ep", "expert", "experts"})
CONTEXT_AXIS_NAMES = frozenset({"cp", "context"})
PIPELINE_AXIS_NAMES = frozenset({"pp", "pipeline", "stage"})
DATA_AXIS_NAMES = EXPERT_AXIS_NAMES | CONTEXT_AXIS_NAMES | {"dp", "data", "ddp", "fsdp", "efsdp", "hsdp", "batch"}
DATA_AXIS_NAMES |= {"replicate", "shard", "dp_replicate", "dp_shard", "dp_shard_cp"}

# Class of module -> (output dim of its weight, input dim).
_LINEAR = {"Linear": (0, 1), "Conv1D": (1, 0)}
_EMBEDDING = {"Embedding": (1, 0)}


def data_axes_of(mesh: MeshSpec, data_axes: Iterable[str] | None) -> tuple[str, ...]:
    """Return the axes of different samples: the given ones, or those with the name of a data axis."""
    if data_axes is None:
        return tuple(axis for axis in mesh.axis_names if axis in DATA_AXIS_NAMES)
    axes = tuple(dict.fromkeys([data_axes] if isinstance(data_axes, str) else data_axes))
    for axis in axes:
        mesh.axis_index(axis)  # raises for an unknown axis
    return axes


def uncounted_axes(mesh: MeshSpec) -> list[str]:
    """Return remarks on uncounted costs along axes of several ranks, judged by name."""
    remarks = (
        (EXPERT_AXIS_NAMES, "experts stay where they are; the exchange of tokens for them is not counted"),
        (CONTEXT_AXIS_NAMES, "tokens of one sample lie on several ranks; what attention exchanges is not counted"),
        (PIPELINE_AXIS_NAMES, "every stage counts as planned; what stages send each other is not counted"),
    )
    axes = [axis for axis, size in mesh.axes.items() if size > 1]
    return [f"{axis}: {text}" for names, text in remarks for axis in axes if axis in names]


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
    if spec.dim is None or layout.mesh.axis_size(axis) == 1:  # one rank holds all
        return "whole"
    dims = _LINEAR.get(tensor.module_type) or _EMBEDDING.get(tensor.module_type)
    is_weight = len(tensor.shape) == 2 and tensor.name.rsplit(".", 1)[-1].startswith("weight")
    if dims is None or not is_weight:
        return "cut"
    return "column" if spec.dim % len(tensor.shape) == dims[0] else "row"


Batch: TypeAlias = Sequence[int] | Any
"""Numbers count the step of all ranks: ``(sequences, length)`` of token ids. Tensors are what one rank passes to
forward: one tensor, a tuple of arguments, or a mapping of keyword arguments."""


def forward_inputs(module: nn.Module, batch: Batch, data_ranks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return one rank's arguments of ``module.forward``; token ids are zeros on the meta device."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not is_token_batch(batch):
        return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
    if isinstance(batch, int) or len(batch) != 2 or min(batch) < 1:  # tokens alone have no shape
        hint = "give (sequences, length), or what one rank passes to forward"
        raise PlanError(Problem("invalid-argument", "batch", found=f"{batch!r:.100}", hint=hint))
    sequences = -(-batch[0] // data_ranks)  # rounded up: the fullest rank
    tokens = torch.zeros(sequences, batch[1], dtype=torch.long, device="meta")
    if "input_ids" in inspect.signature(module.forward).parameters:  # transformers
        return (), {"input_ids": tokens}
    return (tokens,), {}


def is_token_batch(batch: Batch) -> bool:
    """Return True if ``batch`` is made of numbers: ``(sequences, length)`` of token ids, or wrong."""
    return isinstance(batch, int) or (isinstance(batch, Sequence) and all(isinstance(each, int) for each in batch))


def local_numels(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """Return each rank's number of local elements, in mesh order."""
    cutting = [spec.dim is not None for spec in layout.specs]
    numel_by_shape: dict[tuple[int, ...], int] = {}
    numels = []
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank)
        assert coordinate is not None
        # Only coordinates on sharding axes matter, so ranks that differ elsewhere share one result.
        place = tuple(at for at, cuts in zip(coordinate, cutting, strict=True) if cuts)
        if place not in numel_by_shape:
            numel_by_shape[place] = prod(layout.local_shape(rank, shape))
        numels.append(numel_by_shape[place])
    return numels
