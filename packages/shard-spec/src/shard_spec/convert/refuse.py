"""Common parts of all conversions: their mesh axis, and refusals."""

from __future__ import annotations

from collections.abc import Iterable

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.plan.resolve import Resolution


def not_expressible(name: str, found: str, hint: str, dim: int | None = None, axis: str | None = None) -> Problem:
    """The problem of something that the target has no words for."""
    return Problem("not-expressible", name, dim, axis, found, hint)


def the_axis(found: Resolution, axis: str | None) -> str:
    """``axis``, or the only one along which the plan cuts anything.

    Raises:
        PlanError: ``missing-argument`` when that is not one axis.
    """
    meshes = {layout.mesh for layout in found.layouts.values()}
    if len(meshes) != 1:
        raise PlanError(Problem("mesh-mismatch", found=f"{len(meshes)} meshes in one plan", hint="use one mesh"))
    mesh = next(iter(meshes))
    if axis is not None:
        mesh.axis_index(axis)
        return axis
    cutting = cutting_axes(found.layouts.values())
    if len(cutting) == 1:
        return cutting[0]
    if not cutting:
        return "tp" if "tp" in mesh.axis_names else mesh.axis_names[-1]
    raise PlanError(
        Problem(
            "missing-argument",
            "axis",
            found=f"the plan cuts along {', '.join(cutting)}",
            hint="pass axis=, one of them",
        )
    )


def cutting_axes(layouts: Iterable[Layout]) -> list[str]:
    """Axes of more than one rank that cut something, in mesh order."""
    found: dict[str, int] = {}
    for layout in layouts:
        for axis in layout.sharded_axes:
            if layout.mesh.axis_size(axis) > 1:
                found[axis] = layout.mesh.axis_index(axis)
    return sorted(found, key=lambda axis: found[axis])


def cut_elsewhere(found: Resolution, axis: str, target: str) -> list[Problem]:
    """Tensors that axes other than ``axis`` cut: a problem for targets that know one axis."""
    problems = []
    for name, layout in found.layouts.items():
        for other in layout.sharded_axes:
            if other != axis and layout.mesh.axis_size(other) > 1:
                said = f"{layout}: {target} is about one axis, here {axis}"
                hint = f"replicate along {other} here, and cut along it by other means (fully_shard, ...)"
                problems.append(not_expressible(name, said, hint, axis=other))
    return problems


def sharder_problems(found: Resolution, target: str) -> list[Problem]:
    """Modules that a Sharder shards: no target knows what it does."""
    hint = "leave the Sharder out of the plan that you convert"
    return [not_expressible(path, f"a Sharder shards it; {target} cannot say how", hint) for path in found.sharders]
