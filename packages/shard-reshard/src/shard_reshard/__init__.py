"""Move tensors from one layout to another with the fewest bytes, in one all-to-all.

`plan_reshard` builds a plan, without a process group. `reshard`, `Resharder`, `redistribute` and `reshard_state_dict`
execute plans on ranks, `load_safetensors` from files. Names are imported on first use, so that
``shard-reshard --help`` need not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_reshard.__about__ import __version__ as __version__
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
    from shard_reshard.checkpoint.hf_names import hf_key_map
    from shard_reshard.checkpoint.load import load_safetensors
    from shard_reshard.checkpoint.save import save_safetensors
    from shard_reshard.engines.record import record_layouts
    from shard_reshard.execution.mover import ReshardWork
    from shard_reshard.optim.optimizer import WholeMatrices
    from shard_reshard.optim.plan import plan_owners
    from shard_reshard.planning import ReshardPlan, plan_reshard
    from shard_reshard.state_dict.outputs import Progress
    from shard_reshard.state_dict.pairs import Pair
    from shard_reshard.state_dict.plan import Part
    from shard_reshard.state_dict.resharder import StateDictResharder, reshard_state_dict
    from shard_reshard.state_dict.work import BucketWork, StateDictWork
    from shard_reshard.testing import simulate

__all__ = [
    "plan_reshard",
    "ReshardPlan",
    "simulate",
    "reshard",
    "Resharder",
    "ReshardWork",
    "redistribute",
    "reshard_sharded_tensor",
    "reshard_state_dict",
    "StateDictResharder",
    "StateDictWork",
    "BucketWork",
    "Part",
    "Pair",
    "record_layouts",
    "load_safetensors",
    "save_safetensors",
    "hf_key_map",
    "WholeMatrices",
    "plan_owners",
    "Progress",
    "get_idx_from_placements",
    "build_reshard_metadata",
    "reshuffle_local_shard",
    "reshard_local_shard",
    "LocalShard",
    "PlanError",
    "Problem",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "planning": ("plan_reshard", "ReshardPlan"),
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
        "state_dict.resharder": ("reshard_state_dict", "StateDictResharder"),
        "state_dict.outputs": ("Progress",),
        "state_dict.work": ("StateDictWork", "BucketWork"),
        "state_dict.plan": ("Part",),
        "state_dict.pairs": ("Pair",),
        "optim.optimizer": ("WholeMatrices",),
        "optim.plan": ("plan_owners",),
        "engines.record": ("record_layouts",),
        "checkpoint.load": ("load_safetensors",),
        "checkpoint.hf_names": ("hf_key_map",),
        "checkpoint.save": ("save_safetensors",),
        "_shared.problems": ("PlanError", "Problem"),
    },
)
