"""Ranks that should hold the same: replicated tensors, and copies of key-value heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranktest import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tp_ddp_bridge import PlanError, check_replicas
from tp_ddp_bridge._shared.sharding_info import Section, ShardingInfo


def sectioned(mesh: Any, full: torch.Tensor, sections: tuple[Section, ...]) -> nn.Parameter:
    """A parameter with this rank's rows of each section."""
    info = ShardingInfo(mesh, (Shard(0),), full.shape, tuple(full.stride()), sections)
    rows = [full[start:stop] for start, stop in info.ranges(mesh.get_local_rank())]
    parameter = nn.Parameter(torch.cat(rows).clone())
    parameter._sharding_info = info  # type: ignore[attr-defined]
    return parameter


@pytest.mark.ranks(4)
def test_copies_of_a_shard_are_compared_and_different_shards_are_not(ranks: Ranks) -> None:
    mesh = ranks.mesh((4,), ("tp",))
    full = torch.arange(24.0).view(12, 2)
    module = nn.ParameterDict(
        {
            "fused": sectioned(mesh, full, (Section(8), Section(4, 2, 2))),  # a row pair on ranks 0-1, one on 2-3
            "sharded": nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])),
            "replicated": nn.Parameter(distribute_tensor(full, mesh, [Replicate()])),
        }
    )
    assert module["fused"].shape == (4, 2)
    assert check_replicas(module) == 2  # the second section, and the replicated one
    with torch.no_grad():
        module["fused"][0] += ranks.rank  # the first section has no copies
    assert check_replicas(module) == 2
    with torch.no_grad():
        module["fused"][3] += ranks.rank == 3
    with pytest.raises(PlanError, match=r"replicas-differ\] fused section 1") as caught:
        check_replicas(module)
    assert len(caught.value.problems) == 1
