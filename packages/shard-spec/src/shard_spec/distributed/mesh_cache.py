"""DeviceMeshes over the ranks of a group, and how its ranks compare what they are about to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_spec import _torch_compat
from shard_spec._shared.consensus import assert_consistent, problems_of
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.layout.layout import Layout
from shard_spec.layout.mesh import MeshSpec


class GroupRef:
    """A process group that survives ``copy.deepcopy`` and, within one job, pickling, by its name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, in group order."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    def __getstate__(self) -> dict[str, str]:
        return {"name": self.group.group_name}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.group = _torch_compat.group_of_name(state["name"])


class MeshCache:
    """Meshes of one call: one for each shape, order of ranks and axis names."""

    def __init__(self, group: GroupRef, device_type: str) -> None:
        self.group = group
        self.device_type = device_type
        self._meshes: dict[MeshSpec, DeviceMesh] = {}

    def prepare(self, layouts: Iterable[Layout]) -> None:
        """Create the meshes of ``layouts``, and the 1-D one in the order of the group; a collective of the group.

        Raises:
            PlanError: On every rank, before anything else: ``no-process-group``.
        """
        keys = list(dict.fromkeys([self._flat_key(), *map(_key_of, layouts)]))
        wanted = [members for key in keys if not self._is_flat(key) for groups in _groups(key) for members in groups]
        if wanted:  # new groups are needed
            self._check(wanted)
        for key in keys:
            self._meshes[key] = self._make(key)

    def mesh_of(self, layout: Layout) -> DeviceMesh:
        """Return the mesh of ``layout``.

        Raises:
            PlanError: ``mesh-mismatch`` for an output with a spec that fixes its layout at run time only.
        """
        key = _key_of(layout)
        if key not in self._meshes:
            reason = f"a mesh of shape {key.shape} over ranks {list(key.ranks)}, which was not known before the forward"
            hint = "shard outputs with a ChunkShardingSpec, an EnumerableShardingSpec or a Layout"
            raise PlanError(Problem("mesh-mismatch", found=reason, hint=hint))
        return self._meshes[key]

    def flat_mesh(self) -> DeviceMesh:
        """Return the 1-D mesh in the order of the group."""
        return self._meshes[self._flat_key()]

    def _flat_key(self) -> MeshSpec:
        return MeshSpec({"shard": self.group.size}, self.group.ranks)

    def _is_flat(self, key: MeshSpec) -> bool:
        return key.ndim == 1 and tuple(key.ranks) == self.group.ranks

    def _check(self, wanted: list[tuple[int, ...]]) -> None:
        if self.group.size == dist.get_world_size():  # all ranks of the job take part
            return
        counts: list[int] = [0] * self.group.size
        dist.all_gather_object(counts, _torch_compat.num_groups(), group=self.group.group)
        if len(set(counts)) > 1:
            # Torch names a group created by its members only after their number of groups.
            reason = f"new groups are needed, {list(wanted[0])} first, and the ranks know {counts} groups"
            hint = "make the group in the order of the specs (new_group(ranks, sort_ranks=False)) and pass it"
            raise PlanError(Problem("no-process-group", "process_group", found=reason, hint=hint))

    def _make(self, key: MeshSpec) -> DeviceMesh:
        if self._is_flat(key):
            return DeviceMesh.from_group(self.group.group, self.device_type, mesh_dim_names=key.axis_names)
        own = [self._own_group(groups) for groups in _groups(key)]
        if len(own) == 1:  # no grid of ranks needed
            return DeviceMesh.from_group(own[0], self.device_type, mesh_dim_names=key.axis_names)
        grid = torch.tensor(list(key.ranks), dtype=torch.int, device="cpu").view(key.shape)
        return DeviceMesh.from_group(own, self.device_type, mesh=grid, mesh_dim_names=key.axis_names)

    def _own_group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
        """Return this rank's group of one axis; every rank creates the groups in one order."""
        everybody, me = self.group.size == dist.get_world_size(), dist.get_rank()
        mine = [_torch_compat.new_ordered_group(list(each), everybody) for each in groups if everybody or me in each]
        (own,) = [each for each in mine if each is not None]
        assert isinstance(own, dist.ProcessGroup)
        return own


def _groups(mesh: MeshSpec) -> list[tuple[tuple[int, ...], ...]]:
    return [mesh.axis_groups(axis) for axis in mesh.axis_names]


def _key_of(layout: Layout) -> MeshSpec:
    """Return a mesh key; made-up axis names (``shard0``, ``shard1``) share their meshes."""
    names = tuple("shard" if re.fullmatch(r"shard\d+", name) else name for name in layout.mesh.axis_names)
    if len(set(names)) < len(names):
        names = tuple(f"{name}{at}" for at, name in enumerate(names))
    return MeshSpec(dict(zip(names, layout.mesh.shape, strict=True)), layout.mesh.ranks)


T = TypeVar("T")


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the given group, or the default group.

    Raises:
        PlanError: ``no-process-group`` or ``rank-outside-mesh``, on this rank only.
    """
    if not (dist.is_available() and dist.is_initialized()):
        reason = "torch.distributed is not initialized"
        hint = "call torch.distributed.init_process_group first; planning needs no process group"
        raise PlanError(Problem("no-process-group", found=reason, hint=hint))
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        reason = f"rank {dist.get_rank()} is not in the process group it passed"
        raise PlanError(Problem("rank-outside-mesh", "process_group", found=reason, hint="call it on members only"))
    return group


def on_all_ranks(
    group: dist.ProcessGroup, subject: str, work: Callable[[], T], lines: Callable[[T], Sequence[str]] = lambda _: ()
) -> T:
    """The value of ``work`` once it succeeded on every rank of the group, with equal lines; a collective.

    Args:
        group: The ranks; all of them call this.
        subject: The call, for messages.
        work: Sends nothing; what it raises on one rank, all ranks raise.
        lines: Facts about the value that have to be equal on every rank.

    Raises:
        PlanError: The same on every rank: the problems of all ranks, or ``ranks-disagree`` with the different lines.
    """
    facts: Sequence[str] = ()
    error = None
    try:
        value = work()
        facts = lines(value)
    except Exception as failure:  # this rank still meets its peers
        error = PlanError(problems_of(failure))
    assert_consistent(group, subject, facts, error, hint="pass the same to every rank of the group")
    return value
