"""Roles: what a sharded weight does to the activations that pass through it.

A plan says where weights lie, not how they are used. These rules hold for how the two common ways of use work: along a
*data* axis ranks see different samples (weights are gathered before use, gradients are reduced); along a *model* axis
they see the same samples (weights stay where they are, activations are gathered or reduced).
"""

from __future__ import annotations

from collections.abc import Iterable

from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.plan.metadata import TensorMetadata

DATA_AXIS_NAMES = frozenset(
    {"dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "dp_replicate", "dp_shard", "dp_shard_cp", "batch"}
)

# Class of module -> (dim of its weight that counts output features, dim that counts input features).
_LINEAR = {"Linear": (0, 1), "NonDynamicallyQuantizableLinear": (0, 1), "Conv1D": (1, 0)}
_EMBEDDING = {"Embedding": (1, 0)}


def data_axes_of(mesh: MeshSpec, data_axes: Iterable[str] | None) -> tuple[str, ...]:
    """The axes along which ranks see different samples: those given, else those with a name that says so."""
    if data_axes is None:
        return tuple(axis for axis in mesh.axis_names if axis in DATA_AXIS_NAMES)
    given = tuple(data_axes)
    for axis in given:
        mesh.axis_index(axis)
    return given


def weight_dims(tensor: TensorMetadata) -> tuple[int, int] | None:
    """(output dim, input dim) of a weight that multiplies activations, or None for every other tensor."""
    if len(tensor.shape) != 2 or not tensor.name.rsplit(".", 1)[-1].startswith("weight"):
        return None
    return _LINEAR.get(tensor.module_type) or _EMBEDDING.get(tensor.module_type)


def is_embedding(tensor: TensorMetadata) -> bool:
    """Return whether the tensor is looked up in, not multiplied with."""
    return tensor.module_type in _EMBEDDING


def role(tensor: TensorMetadata, layout: Layout, axis: str) -> str:
    """Return what ``axis`` shards: ``"column"`` (outputs), ``"row"`` (inputs), ``"cut"`` (else) or ``"whole"``."""
    spec = layout.specs[layout.mesh.axis_index(axis)]
    if spec.dim is None or layout.mesh.axis_size(axis) == 1:
        return "whole"
    dims = weight_dims(tensor)
    if dims is None:
        return "cut"
    return "column" if spec.dim % len(tensor.shape) == dims[0] else "row"
