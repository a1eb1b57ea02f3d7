"""Sections of a local shard, and the tuple that describes it."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from ranktest import Ranks
from shared.sharding_info import Section, ShardingInfo, sharding_info_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard


def test_sections_cover_every_row_as_often_as_they_are_copied() -> None:
    compared = 0
    for unit, units, copies, ranks in itertools.product((1, 2, 3), range(6), (1, 2, 4), (1, 2, 4, 8)):
        section = Section(unit * units, unit, copies)
        if ranks % copies:
            with pytest.raises(ValueError, match="copies"):
                section.bounds(0, ranks)
            continue
        rows = [row for rank in range(ranks) for row in range(*section.bounds(rank, ranks))]
        assert sorted(rows) == sorted(list(range(section.size)) * copies)
        if unit == copies == 1:
            chunks = torch.arange(section.size).chunk(ranks)
            lengths = [stop - start for start, stop in (section.bounds(rank, ranks) for rank in range(ranks))]
            assert lengths[: len(chunks)] == [len(chunk) for chunk in chunks] or not section.size
        compared += 1
    assert compared == 162


@pytest.mark.ranks(2)
def test_sharding_info_reads_any_tuple_and_travels_as_one(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = torch.nn.Parameter(torch.zeros(6, 4))
    assert sharding_info_of(local) is None
    local._sharding_info = (mesh, (Shard(0),), (12, 4), (4, 1), ((8, 2, 1), 4))  # type: ignore[attr-defined]  # ours
    info = sharding_info_of(local)
    assert info == ShardingInfo(mesh, (Shard(0),), torch.Size((12, 4)), (4, 1), (Section(8, 2), Section(4)))
    assert info is not None
    assert info.needs_sections
    assert info.section_axis() == (0, 0)
    assert [info.ranges(rank) for rank in range(2)] == [((0, 4), (8, 10)), ((4, 8), (10, 12))]
    assert type(pickle.loads(pickle.dumps(info._replace(mesh=None)))) is tuple  # type: ignore[arg-type]  # no mesh in a pickle here
    assert not ShardingInfo(mesh, (Replicate(),), torch.Size((2,)), (1,)).needs_sections
    local._sharding_info = (mesh,)  # type: ignore[attr-defined]  # ours
    with pytest.raises(ValueError, match="has to be"):
        sharding_info_of(local)
