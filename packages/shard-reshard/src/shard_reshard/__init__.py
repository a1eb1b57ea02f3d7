"""Move tensors from one layout to another with the fewest bytes, in one all-to-all.

`plan_reshard` makes a plan, without a process group. `reshard`, `Resharder`, `redistribute` and `reshard_state_dict`
carry plans out on ranks, `load_safetensors` from files. Names are imported when they are first used, so that
``shard-reshard --help`` need not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_reshard.__about__ import __version__
from shard_reshard._shared.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shard_reshard._shared.problems import PlanError, Problem
    from shard_reshard.api.dtensor import redistribute
    from shard_reshard.api.reshard import Resharder, reshard
    from shard_reshard.api.sharded_tensor import (
        LocalShard,
        build_reshard_metadata,
        get_idx_from_placements,
        reshard_local_shard,
        reshard_sharded_tensor,
        reshuffle_local_shard,
    )
    from shard_reshard.checkpoint.load import LoadedStateDict, load_safetensors
    from shard_reshard.checkpoint.plan import LoadPlan
    from shard_reshard.checkpoint.safetensors import read_safetensors_header
    from shard_reshard.checkpoint.stored import StoredTensor, layouts_from_dcp, layouts_from_safetensors
    from shard_reshard.execution.mover import ReshardWork
    from shard_reshard.layout.base import ShardMap
    from shard_reshard.layout.boxes import BoxShardMap
    from shard_reshard.layout.mesh import MeshShardMap
    from shard_reshard.layout.parse import LayoutLike, OnRank
    from shard_reshard.plan.copies import Copy
    from shard_reshard.planning.analyze import ReshardPlan
    from shard_reshard.planning.planner import plan_reshard
    from shard_reshard.state_dict.outputs import MovedStateDict, Progress
    from shard_reshard.state_dict.plan import Part, StateDictPlan
    from shard_reshard.state_dict.record import RecordedLayouts, record_layouts
    from shard_reshard.state_dict.resharder import StateDictResharder, reshard_state_dict, state_version
    from shard_reshard.testing import simulate

__all__ = [
    "plan_reshard",
    "ReshardPlan",
    "Copy",
    "OnRank",
    "LayoutLike",
    "ShardMap",
    "MeshShardMap",
    "BoxShardMap",
    "simulate",
    "reshard",
    "Resharder",
    "ReshardWork",
    "redistribute",
    "reshard_sharded_tensor",
    "reshard_state_dict",
    "StateDictResharder",
    "state_version",
    "record_layouts",
    "RecordedLayouts",
    "MovedStateDict",
    "Progress",
    "Part",
    "StateDictPlan",
    "get_idx_from_placements",
    "build_reshard_metadata",
    "reshuffle_local_shard",
    "reshard_local_shard",
    "LocalShard",
    "load_safetensors",
    "LoadedStateDict",
    "LoadPlan",
    "layouts_from_dcp",
    "layouts_from_safetensors",
    "read_safetensors_header",
    "StoredTensor",
    "PlanError",
    "Problem",
    "__version__",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "planning.planner": ("plan_reshard",),
        "planning.analyze": ("ReshardPlan",),
        "plan.copies": ("Copy",),
        "layout.parse": ("OnRank", "LayoutLike"),
        "layout.base": ("ShardMap",),
        "layout.mesh": ("MeshShardMap",),
        "layout.boxes": ("BoxShardMap",),
        "testing": ("simulate",),
        "api.reshard": ("reshard", "Resharder"),
        "execution.mover": ("ReshardWork",),
        "api.dtensor": ("redistribute",),
        "api.sharded_tensor": (
            "LocalShard",
            "build_reshard_metadata",
            "get_idx_from_placements",
            "reshard_local_shard",
            "reshard_sharded_tensor",
            "reshuffle_local_shard",
        ),
        "state_dict.resharder": ("reshard_state_dict", "StateDictResharder", "state_version"),
        "state_dict.outputs": ("MovedStateDict", "Progress"),
        "state_dict.plan": ("Part", "StateDictPlan"),
        "state_dict.record": ("record_layouts", "RecordedLayouts"),
        "checkpoint.load": ("load_safetensors", "LoadedStateDict"),
        "checkpoint.plan": ("LoadPlan",),
        "checkpoint.stored": ("layouts_from_dcp", "layouts_from_safetensors", "StoredTensor"),
        "checkpoint.safetensors": ("read_safetensors_header",),
        "_shared.problems": ("PlanError", "Problem"),
    },
)
