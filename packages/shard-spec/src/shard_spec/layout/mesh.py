"""MeshSpec: named axes of ranks, without a process group; and the roles of its axes in a training step.

Roles are the meaning of a layout's axes, on which every number of a step depends.

Along a *data* axis ranks see different samples: sharded weights are gathered before use, gradients are reduced. Along a
*model* axis ranks see the same samples: weights stay, activations are gathered or reduced. An *expert* axis is a data
axis on which experts stay and tokens travel; along a *context* axis ranks see other tokens of the same samples; along
a *stage* axis (pipeline parallelism) they hold other layers.

A role comes from the caller of the step (``data_axes=``), from the plan (``axis_roles=``, which planners fill), or from
a conventional name such as ``dp``. Only the last one is an assumption, which every number repeats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

from shard_spec._shared.problems import PlanError, Problem, raise_problems

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MAX_RANKS = 1 << 24
MeshLike: TypeAlias = "MeshSpec | Mapping[str, int] | str | DeviceMesh"

_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*\Z")


@dataclass(frozen=True, init=False, repr=False)
class MeshSpec:
    """Named axes of ranks: the value of a ``DeviceMesh``, without a process group.

    Ranks are placed on the axes row-major: the last axis varies fastest.

    Args:
        axes: Size of each axis by name, outermost first, for example ``{"dp": 128, "tp": 8}``.
        ranks: Global ranks of the mesh, row-major, each once, in any order. None means ``0 .. world_size - 1``.

    Raises:
        PlanError: With every wrong axis name, size and rank at once.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    rank_list: tuple[int, ...] | None

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        sizes: Any = axes  # callers are untyped
        if not isinstance(sizes, Mapping) or not sizes:
            raise PlanError(
                Problem("invalid-mesh", "axes", found=repr(axes), hint="give a mapping such as {'dp': 2, 'tp': 4}")
            )
        problems = []
        for name, size in sizes.items():
            if not isinstance(name, str) or not _AXIS_NAME.match(name):
                problems.append(
                    Problem("invalid-mesh", "axes", found=repr(name), hint="a name of letters, digits, '_', '-' or '.'")
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                problems.append(
                    Problem("invalid-mesh", "axes", axis=str(name), found=repr(size), hint="sizes are integers >= 1")
                )
        listed: Sequence[Any] = () if ranks is None else ranks
        wrong = [rank for rank in listed if isinstance(rank, bool) or not hasattr(rank, "__index__")]
        if wrong:
            problems.append(Problem("invalid-mesh", "ranks", found=f"{wrong[0]!r:.100}", hint="give integers"))
        raise_problems(problems)
        shape = tuple(int(size) for size in axes.values())
        world, rank_list = prod(shape), None
        if world > MAX_RANKS:
            raise PlanError(
                Problem("mesh-too-large", "axes", found=f"{world} ranks", hint=f"at most {MAX_RANKS} ranks")
            )
        if ranks is not None:
            rank_list = tuple(map(index, ranks))  # index(): numpy and torch integers become int
            twice = sorted(rank for rank, count in Counter(rank_list).items() if count > 1)
            rules = (
                (len(rank_list) != world, f"{len(rank_list)} ranks for {world} places on the axes", ""),
                (twice, f"duplicate ranks {twice}", ""),
                (min(rank_list, default=0) < 0, f"{min(rank_list, default=0)}", "ranks are at least 0"),
            )
            raise_problems(
                Problem("invalid-mesh", "ranks", found=found, hint=hint) for wrong, found, hint in rules if wrong
            )
        vars(self).update(
            axis_names=tuple(axes),
            shape=shape,
            # None for 0 .. world_size - 1, in one spelling: equal meshes compare equal.
            rank_list=None if rank_list == tuple(range(world)) else rank_list,
        )

    def __repr__(self) -> str:
        ranks = "" if self.rank_list is None else f", ranks={self.rank_list!r}"
        return f"MeshSpec({self.axes!r}{ranks})"

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.axes, self.rank_list)

    @property
    def axes(self) -> dict[str, int]:
        """Map axis name to size, outermost first; a new dict each time."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks on the mesh."""
        return prod(self.shape)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks on the mesh, row-major."""
        return range(self.world_size) if self.rank_list is None else self.rank_list  # a range: no list for large worlds

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.rank_list or ())}

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[at + 1 :]) for at in range(self.ndim))

    def axis_index(self, name: str) -> int:
        """Return the position of the axis called ``name``.

        Raises:
            PlanError: ``unknown-axis`` if the mesh has no such axis.
        """
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise PlanError(unknown_axis(name, self)) from None

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along the axis called ``name``."""
        return self.shape[self.axis_index(name)]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of ``rank`` on each axis; None outside of the mesh."""
        if self.rank_list is None:
            position: int | None = rank if 0 <= rank < self.world_size else None  # no table for the identity
        else:
            position = self._position.get(rank)
        if position is None:
            return None
        return tuple((position // stride) % size for stride, size in zip(self._strides, self.shape, strict=True))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at ``coordinate``, one number for each axis."""
        places = zip(coordinate, self.shape, strict=False)  # the lengths are compared first
        if len(coordinate) != self.ndim or any(not 0 <= at < size for at, size in places):
            raise PlanError(
                Problem(
                    "index-out-of-range",
                    found=f"coordinate {tuple(coordinate)} on a mesh of shape {self.shape}",
                    hint="give one number for each axis, from 0 to the axis size - 1",
                )
            )
        return self.ranks[sum(at * stride for at, stride in zip(coordinate, self._strides, strict=True))]

    def axis_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks along ``axis``, in the mesh order of their first members."""
        at = self.axis_index(axis)
        size, stride = self.shape[at], self._strides[at]
        ranks = self.ranks
        return tuple(
            tuple(ranks[start + inner + step * stride] for step in range(size))
            for start in range(0, self.world_size, size * stride)
            for inner in range(stride)
        )

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Parse ``"dp=128, tp=8"``, or ``"128x8"`` for axes called ``axis0``, ``axis1``, ...

        ``str(mesh)`` writes the first form; it does not hold ``ranks``.
        """
        if re.fullmatch(r"\s*\d+(\s*x\s*\d+)*\s*", text):
            return cls({f"axis{at}": int(size) for at, size in enumerate(text.split("x"))})
        axes: dict[str, int] = {}
        for item in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_][A-Za-z0-9_.\-]*)\s*[=:]\s*(\d+)\s*", item)
            if match is None or match[1] in axes:
                raise PlanError(
                    Problem("invalid-mesh", found=repr(text), hint="write each axis once, as in 'dp=128, tp=8'")
                )
            axes[match[1]] = int(match[2])
        return cls(axes)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> MeshSpec:
        """Convert a torch ``DeviceMesh``; nameless axes are called ``axis0``, ``axis1``, ..."""
        names = device_mesh.mesh_dim_names or tuple(f"axis{at}" for at in range(device_mesh.ndim))
        shape = tuple(device_mesh.mesh.shape)
        return cls(dict(zip(names, shape, strict=True)), device_mesh.mesh.flatten().tolist())

    def to_device_mesh(self, device_type: str) -> DeviceMesh:
        """Create a torch ``DeviceMesh`` with these axes and ranks; a collective of the default group.

        Torch creates the process groups of a mesh in ascending order of ranks, and gathers shards in that order without
        an error. If the ranks along an axis do not ascend, the groups are created in mesh order here.

        Raises:
            PlanError: ``no-process-group`` if torch.distributed is not initialized, ``mesh-too-large`` if a rank of the
                mesh is not in the default group, ``missing-dependency`` if this torch cannot order groups as needed.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        from shard_spec._torch_compat import can_order_groups, mesh_without_groups

        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise PlanError(
                Problem(
                    "no-process-group",
                    found="torch.distributed is not initialized",
                    hint="call torch.distributed.init_process_group first; planning needs no process group",
                )
            )
        world = torch.distributed.get_world_size()
        if max(self.ranks) >= world:
            raise PlanError(
                Problem(
                    "mesh-too-large",
                    found=f"the mesh names rank {max(self.ranks)}, the default group has {world} ranks",
                    hint="start more processes or use a smaller mesh",
                )
            )
        ranks = torch.tensor(self.ranks, dtype=torch.int, device="cpu").view(self.shape)
        groups = [self.axis_groups(axis) for axis in self.axis_names]
        # torch would sort them
        unsorted = [members for along in groups for members in along if list(members) != sorted(members)]
        if not unsorted:
            return DeviceMesh(device_type, ranks, mesh_dim_names=self.axis_names)
        if not can_order_groups():
            raise PlanError(
                Problem(
                    "missing-dependency",
                    "ranks",
                    found=f"ranks in the order {list(unsorted[0])}; this torch makes groups in ascending order only",
                    hint=(
                        "name the ranks along each axis in ascending order, or use a torch whose "
                        "new_group has sort_ranks"
                    ),
                )
            )
        # Collective: every rank creates all groups, in the same order.
        own = []
        for members in (members for along in groups for members in along):
            # torch would sort the ranks; on a rank outside of it it returns no group.
            ordered: dict[str, Any] = {} if list(members) == sorted(members) else {"sort_ranks": False}
            group = torch.distributed.new_group(list(members), **ordered)
            own += [group] if isinstance(group, torch.distributed.ProcessGroup) else []
        # from_group() needs a group of this rank.
        if torch.distributed.get_rank() not in self.ranks:  # it took part in the groups above
            return mesh_without_groups(device_type, ranks, self.axis_names)  # type: ignore[no-any-return]  # a DeviceMesh
        if self.ndim == 1:
            return DeviceMesh.from_group(own[0], device_type, mesh_dim_names=self.axis_names)
        return DeviceMesh.from_group(own, device_type, mesh=ranks, mesh_dim_names=self.axis_names)


def unknown_axis(name: object, mesh: MeshSpec, fqn: str = "") -> Problem:
    """Return the problem of an axis name that ``mesh`` does not have."""
    return Problem(
        "unknown-axis",
        name=fqn,
        axis=str(name),
        found=f"the mesh has the axes {', '.join(mesh.axis_names)}",
        hint="use one of them, or add the axis to the mesh",
    )


def as_mesh(mesh: MeshLike | None) -> MeshSpec | None:
    """Convert any value of a ``mesh=`` argument to a ``MeshSpec``."""
    if mesh is None or isinstance(mesh, MeshSpec):
        return mesh
    if isinstance(mesh, str):
        return MeshSpec.parse(mesh)
    if isinstance(mesh, Mapping):
        return MeshSpec(mesh)
    if hasattr(mesh, "mesh_dim_names"):  # DeviceMesh, without an import of torch
        return MeshSpec.from_device_mesh(mesh)
    raise TypeError(f"mesh is a MeshSpec, a mapping from axis to size, text or a DeviceMesh, not {mesh!r}")


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
