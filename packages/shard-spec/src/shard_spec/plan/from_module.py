"""Derive a plan from the layouts of a live model."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shard_spec._shared.problems import PlanError, Problem, raise_problems
from shard_spec._shared.sharding_info import Section, sharding_info_of
from shard_spec.layout import REPLICATE, BlockShard, InterleavedShard, Layout, MeshSpec, PlacementSpec, ShardSpec

_FORM = "(device_mesh, placements, global_shape, global_stride[, sections])"


def layouts_of_module(module: nn.Module, mesh: MeshSpec | None = None) -> dict[str, Layout]:
    """Return the layout of each parameter and buffer by FQN; see ``ShardingPlan.from_module``."""
    problems: list[Problem] = []
    layouts: dict[str, Layout] = {}
    plain: list[str] = []
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        try:
            layout = layout_of_tensor(tensor)
        except PlanError as error:
            problems += [replace(problem, name=name) for problem in error.problems]
            continue  # collect all before raising
        if layout is None:
            plain.append(name)
        else:
            layouts[name] = layout
    raise_problems(problems, "the model holds tensors that a plan cannot describe")
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts.values()))
    if plain:
        # Plain tensors replicate on the mesh of most ranks, then axes, if it covers all others.
        widest = max(meshes, key=lambda each: (each.world_size, each.ndim), default=None)
        covered = widest is not None and all(set(widest.ranks).issuperset(each.ranks) for each in meshes)
        mesh = mesh or (widest if covered else None)
        if mesh is None:
            raise PlanError(Problem("missing-mesh", found="no tensor of the model carries a mesh", hint="pass mesh="))
        layouts.update({name: Layout.replicated(mesh) for name in plain})
    return {name: layouts[name] for name, _ in named}


def layout_of_tensor(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor or of a local shard with `_sharding_info`. None for a plain tensor."""
    try:
        info = sharding_info_of(tensor)
        if info is not None:
            layout = Layout(MeshSpec.from_device_mesh(info.mesh), list(info.placements))
            for each in info.sections:
                if each.size < 0 or each.unit < 1 or each.copies < 1 or each.size % each.unit:
                    raise ValueError(f"{each}: units have to fill it")
            return _with_sections(layout, tuple(info.shape), list(info.sections)) if info.sections else layout
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(Problem("invalid-sections", found=str(error)[:300], hint=_FORM)) from None
    tensor_module: Any = sys.modules.get("torch.distributed.tensor")  # not imported: no DTensor exists
    if tensor_module is None or not isinstance(tensor, tensor_module.DTensor):
        return None
    shown: Any = tensor
    mesh = MeshSpec.from_device_mesh(shown.device_mesh)
    layout, names, shape = Layout(mesh, shown.placements), mesh.axis_names, tuple(shown.shape)
    interleaved = [at for at, spec in enumerate(layout.specs) if isinstance(spec, InterleavedShard)]
    if not interleaved:  # plain shards apply in mesh order
        return layout
    # DTensor's strided shard is an explicit order of axes, where both are equivalent for this shape.
    specs = [ShardSpec(spec.dim) if isinstance(spec, InterleavedShard) else spec for spec in layout.specs]
    later = [names[at] for at, spec in enumerate(specs) if spec.dim is not None and at not in interleaved]
    plain = Layout(mesh, specs, [*later, *(names[at] for at in interleaved)])
    return plain if plain.equivalent_to(layout, shape) else layout


def _with_sections(layout: Layout, shape: tuple[int, ...], sections: list[Section]) -> Layout:
    """Apply sections of the one sharded dim: each is sharded by itself, between units, in ``copies`` copies."""
    cutting = [at for at, spec in enumerate(layout.specs) if spec.dim is not None]
    if len(cutting) != 1:
        raise _not_said(
            f"sections {[tuple(each) for each in sections]}, and {len(cutting)} axes that shard ({layout})",
            "sections are of the dim that one axis cuts",
        )
    (at,) = cutting  # one sharding axis
    dim = layout.specs[at].dim
    assert dim is not None
    if not -len(shape) <= dim < len(shape) or sum(each.size for each in sections) != shape[dim]:
        raise _not_said(
            f"sections {[tuple(each) for each in sections]} of dim {dim} of a tensor of shape {shape}",
            "the sizes of the sections have to add up to the length of the dim",
        )
    if any(each.first for each in sections):
        raise _not_said(
            f"sections {[tuple(each) for each in sections]}: rows whose first unit is not on the first rank",
            "stack such rows (numbered experts) in one tensor that is sharded along the new dim",
        )
    copies = {each.copies for each in sections}  # one axis has one number of copies
    if len(copies) > 1:
        raise _not_said(
            f"sections {[tuple(each) for each in sections]}: some rows on more ranks than others",
            "keep sections with other copies in a weight of their own",
        )
    # Every shard lies on so many neighbouring ranks: the axis splits into a sharding and a replicating one.
    mesh, size, num_copies = layout.mesh, layout.mesh.shape[at], copies.pop()
    if size % num_copies:
        raise _not_said(f"{num_copies} copies over {size} ranks", "copies have to divide the ranks of the axis")
    if num_copies == size > 1:  # every rank holds all
        return Layout(mesh, [REPLICATE if place == at else each for place, each in enumerate(layout.specs)])
    if num_copies > 1:
        axes: dict[str, int] = {}
        for axis, length in mesh.axes.items():
            parts = {f"{axis}.part": size // num_copies, f"{axis}.copy": num_copies}
            axes |= parts if axis == mesh.axis_names[at] else {axis: length}
        layout = Layout(MeshSpec(axes, mesh.ranks), [*layout.specs[: at + 1], REPLICATE, *layout.specs[at + 1 :]])
    # The axis shards each section between units.
    count = layout.mesh.shape[at]
    even = all(each.unit == 1 or each.size // each.unit % count == 0 for each in sections)
    if len(sections) > 1 and not even:
        raise _not_said(
            f"sections {[tuple(each) for each in sections]} over {count} ranks: units that do not divide",
            "a number of units in each section that the ranks divide",
        )
    spec: PlacementSpec = InterleavedShard(dim, tuple(each.size for each in sections))
    if len(sections) == 1:
        spec = ShardSpec(dim) if even else BlockShard(dim, sections[0].unit)
    return Layout(layout.mesh, [spec if place == at else other for place, other in enumerate(layout.specs)])


def _not_said(found: str, hint: str) -> PlanError:
    return PlanError(Problem("not-expressible", found=found, hint=hint))
