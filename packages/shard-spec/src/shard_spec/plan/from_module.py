"""The plan that a live model already follows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shard_spec.layout import Layout
from shard_spec.mesh import MeshSpec
from shard_spec.problems import PlanError, Problem, raise_problems

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shard_spec.plan.sharding_plan import ShardingPlan


def plan_of_module(module: nn.Module, mesh: MeshSpec | None = None) -> ShardingPlan:
    """One exact rule for each parameter and buffer; see ``ShardingPlan.from_module``."""
    from shard_spec.plan.sharding_plan import ShardingPlan

    problems: list[Problem] = []
    layouts: dict[str, Layout] = {}
    plain: list[str] = []
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        try:
            layout = layout_of_tensor(tensor)
        except PlanError as error:
            problems += [Problem(p.code, name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
            continue
        if layout is None:
            plain.append(name)
        else:
            layouts[name] = layout
    raise_problems(problems, "the model holds tensors that a plan cannot describe")
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts.values()))
    if plain:
        mesh = mesh or _widest(meshes)
        if mesh is None:
            raise PlanError(
                Problem("no-mesh", found="no tensor of the model says which ranks there are", hint="pass mesh=")
            )
        layouts.update({name: Layout.replicated(mesh) for name in plain})
    in_order = {name: layouts[name] for name, _ in named}
    return ShardingPlan.from_layouts(in_order)


def layout_of_tensor(tensor: torch.Tensor) -> Layout | None:
    """The layout of a DTensor, or of a local shard that remembers its own; None of a plain tensor.

    Raises:
        PlanError: When a placement cannot be said.
    """
    info: Any = getattr(tensor, "_sharding_info", None)
    if info is not None:
        return _layout_of_info(info)
    tensor_module: Any = sys.modules.get("torch.distributed.tensor")
    if tensor_module is None or not isinstance(tensor, tensor_module.DTensor):
        return None
    shown: Any = tensor
    mesh = MeshSpec.from_device_mesh(shown.device_mesh)
    return _with_order(Layout(mesh, shown.placements), shown.placements, tuple(shown.shape))


def _layout_of_info(info: tuple[Any, ...]) -> Layout:
    device_mesh, placements = info[0], list(info[1])
    mesh = MeshSpec.from_device_mesh(device_mesh)
    layout = Layout(mesh, placements)
    sections = info[4] if len(info) > 4 else None
    if sections:
        from shard_spec.terms import Term

        terms = [
            Term("I", term.dim, tuple(int(size) for size in sections)) if term.kind == "S" else term
            for term in layout.terms
        ]
        layout = Layout(mesh, terms, layout.order)
    return layout


def _with_order(layout: Layout, placements: object, shape: tuple[int, ...]) -> Layout:
    """DTensor says "tp cuts first, then dp" by a strided shard; say it by an order where that is the same."""
    interleaved = [at for at, term in enumerate(layout.terms) if term.kind == "I"]
    if not interleaved:
        return layout
    from shard_spec.terms import Term

    names = layout.mesh.axis_names
    terms = [Term("S", term.dim) if term.kind == "I" else term for term in layout.terms]
    later = [names[at] for at, term in enumerate(terms) if term.dim is not None and at not in interleaved]
    order = [*later, *(names[at] for at in interleaved)]
    plain = Layout(layout.mesh, terms, order)
    return plain if plain.equivalent_to(layout, shape) else layout


def _widest(meshes: list[MeshSpec]) -> MeshSpec | None:
    """The mesh with the most axes, where one mesh holds the ranks of all others."""
    if not meshes:
        return None
    widest = max(meshes, key=lambda mesh: (mesh.world_size, mesh.ndim))
    ranks = set(widest.ranks)
    return widest if all(ranks.issuperset(mesh.ranks) for mesh in meshes) else None
