"""Move tensors from one layout to another with the fewest bytes, in one all-to-all.

Names are loaded when they are first used, so that ``shard-reshard --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shard_reshard.__about__ import __version__

if TYPE_CHECKING:
    from shard_reshard.bind import LayoutLike, OnRank
    from shard_reshard.bound import BoundLayout
    from shard_reshard.box_bound import BoxBound
    from shard_reshard.checkpoints import StoredTensor, layouts_from_dcp, layouts_from_safetensors
    from shard_reshard.copies import Copy
    from shard_reshard.dtensors import redistribute
    from shard_reshard.load_plan import LoadPlan
    from shard_reshard.loading import LoadedStateDict, load_safetensors
    from shard_reshard.local_shards import (
        LocalShard,
        build_reshard_metadata,
        get_idx_from_placements,
        reshard_local_shard,
        reshuffle_local_shard,
    )
    from shard_reshard.mesh_bound import MeshBound
    from shard_reshard.mover import ReshardWork
    from shard_reshard.plan import ReshardPlan
    from shard_reshard.planner import plan_reshard
    from shard_reshard.problems import PlanError, Problem
    from shard_reshard.resharder import Resharder, reshard
    from shard_reshard.safetensors_files import read_safetensors_header
    from shard_reshard.sharded_tensors import reshard_sharded_tensor
    from shard_reshard.simulation import simulate
    from shard_reshard.state_dict_moves import MovedStateDict, Progress
    from shard_reshard.state_dict_plan import Part, StateDictPlan
    from shard_reshard.state_dicts import StateDictResharder, reshard_state_dict, state_version

# Public name -> module that has it. One line for each name that `__all__` lists.
_HOME = {
    "plan_reshard": "shard_reshard.planner",
    "ReshardPlan": "shard_reshard.plan",
    "Copy": "shard_reshard.copies",
    "OnRank": "shard_reshard.bind",
    "LayoutLike": "shard_reshard.bind",
    "BoundLayout": "shard_reshard.bound",
    "MeshBound": "shard_reshard.mesh_bound",
    "BoxBound": "shard_reshard.box_bound",
    "simulate": "shard_reshard.simulation",
    "reshard": "shard_reshard.resharder",
    "Resharder": "shard_reshard.resharder",
    "ReshardWork": "shard_reshard.mover",
    "redistribute": "shard_reshard.dtensors",
    "reshard_sharded_tensor": "shard_reshard.sharded_tensors",
    "reshard_state_dict": "shard_reshard.state_dicts",
    "StateDictResharder": "shard_reshard.state_dicts",
    "state_version": "shard_reshard.state_dicts",
    "MovedStateDict": "shard_reshard.state_dict_moves",
    "Progress": "shard_reshard.state_dict_moves",
    "Part": "shard_reshard.state_dict_plan",
    "StateDictPlan": "shard_reshard.state_dict_plan",
    "get_idx_from_placements": "shard_reshard.local_shards",
    "build_reshard_metadata": "shard_reshard.local_shards",
    "reshuffle_local_shard": "shard_reshard.local_shards",
    "reshard_local_shard": "shard_reshard.local_shards",
    "LocalShard": "shard_reshard.local_shards",
    "load_safetensors": "shard_reshard.loading",
    "LoadedStateDict": "shard_reshard.loading",
    "LoadPlan": "shard_reshard.load_plan",
    "layouts_from_dcp": "shard_reshard.checkpoints",
    "layouts_from_safetensors": "shard_reshard.checkpoints",
    "read_safetensors_header": "shard_reshard.safetensors_files",
    "StoredTensor": "shard_reshard.checkpoints",
    "PlanError": "shard_reshard.problems",
    "Problem": "shard_reshard.problems",
}

__all__ = [
    "plan_reshard",
    "ReshardPlan",
    "Copy",
    "OnRank",
    "LayoutLike",
    "BoundLayout",
    "MeshBound",
    "BoxBound",
    "simulate",
    "reshard",
    "Resharder",
    "ReshardWork",
    "redistribute",
    "reshard_sharded_tensor",
    "reshard_state_dict",
    "StateDictResharder",
    "state_version",
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


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'shard_reshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
