"""Hooks on outputs: ``output_plan`` lays them out, ``return_local_tensor`` gives this rank's rows back."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.distributed.exchange import RowExchange, gather_rows, scatter_rows
from shard_spec.distributed.mesh_cache import MeshCache, raise_on_all_ranks
from shard_spec.distributed.parameter_format import choose_format
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec
from shard_spec.legacy.input_metadata import all_gather_input_metadata
from shard_spec.legacy.module_tracker import ForwardContext, ModuleTracker
from shard_spec.legacy.wrapping import unwrap, whole, wrap
from shard_spec.specs import ShardingSpec


class PreForwardHook:
    """Forward pre-hook of the root."""

    def __init__(self, context: ForwardContext, tracker: ModuleTracker) -> None:
        self.context = context
        self.tracker = tracker

    @eager_only
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin a frame; parameters that lack their gradient hook get it."""
        self.context.open(self.tracker, self.tracker.scan(module))


class PostForwardHook:
    """Forward hook of the root, called also when its forward raises."""

    def __init__(self, context: ForwardContext, *, is_laid_out: bool) -> None:
        self.context = context
        self.warns = not is_laid_out  # a plan that says what becomes of the output needs no hint

    @eager_only
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the frame; what no exchange has compared is compared now."""
        self.context.close()
        scan = self.context.scan
        if scan is not None and scan.open and sys.exception() is None:
            raise_on_all_ranks(self.context.group.group, scan.outcome, "the module changed after shard_module")
            self.context.agreed()
        if self.warns and isinstance(output, DTensor):
            self.warns = False
            warnings.warn(
                "shard_module: the module returns a DTensor of the full batch, which plain targets cannot be compared "
                "with; name it in return_local_tensor for this rank's rows, or in output_plan for another layout",
                stacklevel=2,
            )


class ReshardOutput:
    """Forward hook: the output of the concatenated batch, in the layout of ``output_plan``.

    A plain output counts as this rank's rows of it.
    """

    def __init__(self, name: str, wanted: ShardingSpec | Layout, context: ForwardContext, meshes: MeshCache) -> None:
        self.name = name
        self.wanted = wanted
        self.context = context
        self.meshes = meshes

    @eager_only
    def __call__(self, module: nn.Module, args: Any, output: Any) -> DTensor:
        """Redistribute; a collective where the layout differs."""
        value = _one_tensor(output, self.name, "output_plan")
        if not isinstance(value, DTensor):
            value = self._from_rows(value)
        layout = self.wanted if isinstance(self.wanted, Layout) else self.wanted.to_layout(value.shape)
        placements = _placements(layout, tuple(value.shape), self.name)
        mesh = self.meshes.mesh_of(layout)
        if mesh != value.device_mesh:
            value = wrap(whole(value, parts=False), mesh, [Replicate()] * mesh.ndim, value.shape)
        return value.redistribute(placements=placements)

    def _from_rows(self, rows: torch.Tensor) -> DTensor:
        """All ranks' rows, whole on every rank."""
        problem = "" if rows.dim() else "a scalar, which has no rows"
        group = self.context.group
        metadata = all_gather_input_metadata(rows, self.context, self.name, problem)
        self.context.note(metadata.rows)
        if metadata.any_requires_grad and not rows.requires_grad:
            rows = rows.detach().requires_grad_()  # its backward communicates: all ranks have to run it
        flat = rows.unsqueeze(-1)
        exchange = RowExchange(group.group, metadata.rows, ((0, 1),) * group.size, 1, _only_first(group.size))
        mesh = self.meshes.flat_mesh()
        everything = gather_rows(flat, exchange).squeeze(-1)
        return wrap(everything, mesh, [Replicate()], everything.shape)


class LocalRows:
    """Forward hook: a plain tensor in place of a DTensor output.

    This rank's rows, the ones it passed, with all columns. Where ``output_plan`` asked for a layout that does not cut
    rows, it is this rank's part in that layout. A plain output is this rank's rows already.
    """

    def __init__(self, name: str, context: ForwardContext, laid_out: bool) -> None:
        self.name = name
        self.context = context
        self.laid_out = laid_out

    @eager_only
    def __call__(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        """Give the rows back; a collective where another rank has parts of them."""
        value = _one_tensor(output, self.name, "return_local_tensor")
        if not isinstance(value, DTensor):
            return value
        cut = {spec.dim % value.dim() for spec in _layout_of(value).specs if spec.dim is not None}
        if self.laid_out and cut and 0 not in cut:
            return unwrap(value)
        group = self.context.group
        if not value.dim():
            hint = "name a module whose output has one row for each row of the batch"
            raise PlanError(Problem("invalid-layout", self.name, found="a scalar output", hint=hint))
        rows = self.context.rows(value.shape[0], self.name)
        if self._lies_in_rows(value, rows):
            return unwrap(value)
        columns = _columns(value, group.ranks)
        if columns is not None:
            intervals, primary = columns
            exchange = RowExchange(group.group, rows, intervals, value.shape[-1], primary)
            return scatter_rows(unwrap(value), exchange)
        start = sum(rows[: group.rank])
        return whole(value, parts=True).narrow(0, start, rows[group.rank])

    def _lies_in_rows(self, value: DTensor, rows: tuple[int, ...]) -> bool:
        """Return whether every rank has exactly the rows it passed; all ranks come to the same answer."""
        layout = _layout_of(value)
        if layout.partial or any(spec.dim is not None and spec.dim % value.dim() for spec in layout.specs):
            return False
        starts = [sum(rows[:at]) for at in range(len(rows))]
        intervals = [layout.intervals(rank, tuple(value.shape))[0] for rank in self.context.group.ranks]
        wanted = [((start, size),) for start, size in zip(starts, rows, strict=True)]
        return all(
            have == want or (have[0][1] == want[0][1] == 0) for have, want in zip(intervals, wanted, strict=True)
        )


def _one_tensor(output: Any, name: str, what: str) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    hint = f"name a module that returns one tensor in {what}"
    raise PlanError(Problem("wrong-type", name, found=f"an output of type {type(output).__name__}", hint=hint))


def _layout_of(value: DTensor) -> Layout:
    return Layout(MeshSpec.from_device_mesh(value.device_mesh), value.placements)


def _placements(layout: Layout, shape: tuple[int, ...], name: str) -> list[Placement]:
    found = choose_format(layout, shape, name)
    if isinstance(found, Problem):
        raise PlanError(found)
    return list(found.placements)


def _columns(value: DTensor, ranks: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], tuple[bool, ...]] | None:
    """Return each rank's columns and which ranks count, where only the last dim is sharded; else None.

    Partial sums over ``sum`` count as they are: every rank has a part.
    """
    last = value.dim() - 1
    layout = _layout_of(value)
    cut = {spec.dim % value.dim() for spec in layout.specs if spec.dim is not None}
    if last == 0 or not cut <= {last} or set(layout.partial.values()) - {"sum"} or layout.order:
        return None
    intervals = [layout.intervals(rank, tuple(value.shape))[last] for rank in ranks]
    if any(len(shards) > 1 for shards in intervals):
        return None
    return tuple(shards[0] for shards in intervals), tuple(layout.is_primary(rank) for rank in ranks)


def _only_first(size: int) -> tuple[bool, ...]:
    return (True,) + (False,) * (size - 1)
