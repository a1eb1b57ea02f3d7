"""Roles of mesh axes in a training step: the meaning of a layout's axes, on which every number of a step depends.

Along a *data* axis ranks see different samples: sharded weights are gathered before use, gradients are reduced. Along a
*model* axis ranks see the same samples: weights stay, activations are gathered or reduced. An *expert* axis is a data
axis on which experts stay and tokens travel; along a *context* axis ranks see other tokens of the same samples; along
a *stage* axis (pipeline parallelism) they hold other layers.

A role comes from the caller of the step (``data_axes=``), from the plan (``axis_roles=``, which planners fill), or from
a conventional name such as ``dp``. Only the last one is an assumption, which every number repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shard_spec._shared.problems import Problem, raise_problems
from shard_spec.layout.mesh import MeshSpec, unknown_axis

ROLES = ("data", "model", "expert", "context", "stage")
DATA_ROLES = frozenset({"data", "expert", "context"})  # a batch is divided along these axes

ROLE_BY_NAME = {
    **dict.fromkeys(("dp", "data", "ddp", "fsdp", "efsdp", "hsdp", "batch", "replicate", "shard"), "data"),
    **dict.fromkeys(("dp_replicate", "dp_shard", "dp_shard_cp"), "data"),
    **dict.fromkeys(("tp", "mp", "model", "tensor", "tensor_parallel"), "model"),
    **dict.fromkeys(("ep", "expert", "experts"), "expert"),
    **dict.fromkeys(("cp", "context"), "context"),
    **dict.fromkeys(("pp", "pipeline", "stage"), "stage"),
}


@dataclass(frozen=True)
class AxisRoles:
    """Role of each axis of a mesh in one step.

    Attributes:
        by_axis: Axis name to role, in mesh order; an axis of one rank without a role is left out.
        by_name: Axes whose role is only assumed from their name.
    """

    by_axis: Mapping[str, str]
    by_name: tuple[str, ...] = ()

    def axes(self, *roles: str) -> tuple[str, ...]:
        """Return the axes of these roles, in mesh order."""
        return tuple(axis for axis, role in self.by_axis.items() if role in roles)

    @property
    def data(self) -> tuple[str, ...]:
        """Axes along which a batch is divided."""
        return self.axes(*DATA_ROLES)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """One line for all axes whose role follows from the name alone; empty if there is none."""
        named = ", ".join(f"{axis} is a {self.by_axis[axis]} axis" for axis in self.by_name)
        return (f"assumed from the name: {named} (data_axes= declares it)",) if named else ()


def role_problems(roles: Mapping[str, str], mesh: MeshSpec | None) -> list[Problem]:
    """Return the problems of a plan's ``axis_roles``: unknown roles, and axes that the mesh lacks."""
    return [
        *(
            Problem(
                "invalid-argument", "axis_roles", axis=axis, found=repr(role)[:100], hint=f"one of {', '.join(ROLES)}"
            )
            for axis, role in roles.items()
            if role not in ROLES
        ),
        *(unknown_axis(axis, mesh, "axis_roles") for axis in roles if mesh is not None and axis not in mesh.axis_names),
    ]


def roles_of(mesh: MeshSpec, plan_roles: Mapping[str, str], data_axes: Iterable[str] | None = None) -> AxisRoles:
    """Return the role of each axis of ``mesh``.

    Args:
        mesh: The mesh of all layouts.
        plan_roles: Axis to role, as known to the plan.
        data_axes: The caller's data axes; every other axis is then a model axis, or a stage.

    Raises:
        PlanError: ``unknown-axis``; ``undeclared-axis`` for each axis of several ranks without a role;
            ``conflicting-arguments`` for each axis that the plan knows otherwise.
    """
    declared = [data_axes] if isinstance(data_axes, str) else None if data_axes is None else list(data_axes)
    raise_problems(unknown_axis(axis, mesh) for axis in declared or () if axis not in mesh.axis_names)
    by_axis: dict[str, str] = {}
    by_name, problems = [], []
    data = [axis for axis in mesh.axis_names if (plan_roles.get(axis) or ROLE_BY_NAME.get(axis)) in DATA_ROLES]
    for axis, size in mesh.axes.items():
        role = plan_roles.get(axis) or ROLE_BY_NAME.get(axis)
        is_data = declared is not None and axis in declared
        if declared is not None and axis in plan_roles and is_data != (role in DATA_ROLES):
            problems.append(
                Problem(
                    "conflicting-arguments",
                    "data_axes",
                    axis=axis,
                    found=f"data_axes={declared}, and the plan knows {axis} as a {role} axis",
                    hint=(
                        "name the plan's own data axes too, or plan | ShardingPlan({}, axis_roles=...) to change a role"
                    ),
                )
            )
        elif declared is not None:
            # The declaration decides between data and model; the plan or the name may say which kind of it.
            by_axis[axis] = role if role and (role in DATA_ROLES) == is_data else "data" if is_data else "model"
        elif role is not None:
            by_axis[axis] = role
            by_name += [axis] if axis not in plan_roles and size > 1 else []
        elif size > 1:
            problems.append(
                Problem(
                    "undeclared-axis",
                    axis=axis,
                    found=f"nothing says whether its {size} ranks see different samples or the same",
                    hint=f"pass data_axes={[*data, axis]} if different, data_axes={data} if the same",
                )
            )
    raise_problems(problems)
    return AxisRoles(by_axis, tuple(by_name))
