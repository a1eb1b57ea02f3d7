"""FullyShardPlanner: every parameter sharded along dim 0 over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from shard_spec.layout.layout import Layout
from shard_spec.planners.base import Decisions, LayoutPlanner, MeshLike

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FullyShardPlanner(LayoutPlanner):
    """ZeRO-3, as in ``torch.distributed.fsdp.fully_shard``: dim 0 sharded over one or several axes.

    After another planner (``compose(MegatronPlanner(mesh), FullyShardPlanner(mesh))``) it shards the local shards
    of that planner. Where rows do not divide, the last ranks hold fewer or none, as with FSDP2. An exact rule keeps a
    parameter replicated: ``planner.build_plan(model) | ShardingPlan({"norm.weight": "dp:R"}, mesh=mesh)``.

    Args:
        mesh: the axes of the plan.
        axis: one sharding axis or several, outermost first. Other axes replicate (a replica axis beside
            ``axis="dp_shard"`` gives hybrid sharding).

    Raises:
        PlanError: an axis is not in the mesh.
    """

    def __init__(self, mesh: MeshLike | DeviceMesh, axis: str | Sequence[str] = "dp") -> None:
        super().__init__(mesh)
        self.axes = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in self.axes:
            self.mesh.axis_size(name)

    def decide(self, module: nn.Module, given: Mapping[str, Layout]) -> Decisions:
        cut = Layout(self.mesh, dict.fromkeys(self.axes, "S(0)"), self.axes if len(self.axes) > 1 else None)
        return Decisions({name: cut for name, parameter in module.named_parameters() if parameter.dim() > 0})
