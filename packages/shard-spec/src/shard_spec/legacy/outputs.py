"""Hooks on outputs: ``output_plan`` lays them out, ``return_local_tensor`` gives this rank's rows back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.distributed.mesh_cache import MeshCache
from shard_spec.distributed.parameter_format import choose_format
from shard_spec.layout.layout import Layout
from shard_spec.legacy.rows import BatchRows, on_mesh
from shard_spec.legacy.wrapping import unwrap
from shard_spec.specs import ShardingSpec


class ReshardOutput:
    """Forward hook: the output of the concatenated batch, in the layout of ``output_plan``.

    A plain output counts as this rank's rows of it.
    """

    def __init__(self, name: str, wanted: ShardingSpec | Layout, rows: BatchRows, meshes: MeshCache) -> None:
        self.name = name
        self.wanted = wanted
        self.rows = rows
        self.meshes = meshes

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


class LocalRows:
    """Forward hook: a plain tensor in place of a DTensor output.

    This rank's rows, the ones it passed, with all columns. Where ``output_plan`` asked for a layout that does not cut
    rows, it is this rank's part in that layout. A plain output is this rank's rows already.
    """

    def __init__(self, name: str, rows: BatchRows, laid_out: bool) -> None:
        self.name = name
        self.rows = rows
        self.laid_out = laid_out

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
    hint = f"name a module that returns one tensor in {what}"
    raise PlanError(Problem("wrong-type", name, found=f"an output of type {type(output).__name__}", hint=hint))
