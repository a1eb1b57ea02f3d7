"""A sectioned tensor gathers to the global one, bit for bit, and meets torch.distributed.checkpoint in chunks."""

from __future__ import annotations

import pickle

import pytest
import torch
from ranktest import Ranks
from shared.sectioned_tensor import SectionedTensor
from shared.sharding_info import Section, ShardingInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def local_of(full: torch.Tensor, info: ShardingInfo, dim: int) -> torch.Tensor:
    rows = info.ranges(info.mesh.get_local_rank(info.section_axis()[0]))
    return torch.cat([full.narrow(dim, start, stop - start) for start, stop in rows], dim)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_any_dtype_dim_and_order_of_ranks_gathers_to_the_global_tensor(ranks: Ranks, order: list[int]) -> None:
    mesh, compared = DeviceMesh("cpu", order), 0
    generator = torch.Generator().manual_seed(0)
    for sections in ((Section(10), Section(4, 2, 2)), (Section(3),), (Section(2), Section(0), Section(5))):
        for dim in (0, 1):
            rows = sum(section.size for section in sections)
            shape = (rows, 3) if dim == 0 else (3, rows)
            bits = torch.randint(0, 2, (*shape, 16), generator=generator, dtype=torch.uint8)
            for dtype in DTYPES:
                full = bits[..., : dtype.itemsize].contiguous().view(dtype).squeeze(-1)
                info = ShardingInfo(mesh, (Shard(dim),), full.shape, full.stride(), sections)
                local = local_of(full, info, dim)
                tensor = SectionedTensor.of(local, info)
                gathered = tensor.full_tensor()
                assert type(gathered) is torch.Tensor and gathered.dtype == dtype
                assert torch.equal(gathered.view(torch.uint8), full.view(torch.uint8)), (sections, dim, dtype)
                compared += gathered.numel()
                for chunk, (offsets, view) in zip(tensor.__create_chunk_list__(), tensor.chunks(), strict=True):
                    assert chunk.offsets == torch.Size(offsets) and chunk.sizes == view.shape != (0, 3)
                    place = tuple(slice(start, start + size) for start, size in zip(offsets, view.shape, strict=True))
                    shard = tensor.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
                    assert torch.equal(shard.view(torch.uint8), full[place].contiguous().view(torch.uint8))
                    assert shard.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert compared == 2 * 3 * (14 + 3 + 7) * len(DTYPES)


@pytest.mark.ranks(2)
def test_it_has_the_global_shape_and_its_results_are_plain(ranks: Ranks) -> None:
    mesh = ranks.mesh((1, 2), ("dp", "tp"))
    info = ShardingInfo(mesh, (Replicate(), Shard(0)), torch.Size([6, 2]), (2, 1), (Section(2), Section(4)))
    full = torch.arange(12.0).view(6, 2)
    tensor = SectionedTensor.of(local_of(full, info, 0), info)
    assert tensor.shape == tensor.size() == (6, 2) and tensor.size(0) == 6
    assert type(tensor + 1) is torch.Tensor and (tensor + 1).shape == (3, 2)
    assert torch.equal(tensor.full_tensor(), full)
    make, arguments = tensor.__reduce_ex__(4)
    assert make(arguments[0], tuple(arguments[1]))._sharding_info == info
    assert torch.equal(pickle.loads(pickle.dumps(arguments[0])), tensor.plain())
    assert SectionedTensor.of(torch.empty(3, 2, device="meta"), info).full_tensor().shape == (6, 2)
    with pytest.raises(ValueError, match=r"w: this rank holds no chunk at .*5, 0.*, only at \[\("):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([5, 0])))
