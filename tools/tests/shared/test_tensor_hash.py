"""Laws of the hash of a tensor: equal bits in equal places, and no others, give equal hashes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.consensus import tensor_hash, tensor_hashes

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
MANY = (1 << 20) + 24  # bytes: more than the hash mixes at a time


def hashed(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor_hashes({"": tensor})[""]


@given(st.binary(min_size=1, max_size=40), st.integers(0, 319), st.integers(0, 7))
def test_one_changed_bit_changes_the_hash(data: bytes, bit: int, offset: int) -> None:
    one = torch.tensor(list(bytes(offset) + data), dtype=torch.uint8)[offset:]  # at any place of its storage
    other = one.clone()
    other[bit // 8 % len(data)] ^= 1 << bit % 8
    assert hashed(one) == hashed(one.clone()) != hashed(other)


@given(st.binary(max_size=24), st.binary(max_size=24))
def test_other_bytes_have_other_hashes(one: bytes, other: bytes) -> None:
    hashes = {hashed(torch.tensor(list(data), dtype=torch.uint8)) for data in (one, other)}
    assert len(hashes) == len({one, other})


@settings(deadline=None)
@given(st.permutations(range(9)), st.integers(1, 255))
def test_the_order_of_elements_counts(order: list[int], top: int) -> None:
    values = torch.arange(top, top + 9).to(torch.float64)
    assert (hashed(values[order]) == hashed(values)) == (order == sorted(order))


@pytest.mark.parametrize("size", [2, 4, 8, 40, 64, MANY // 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128])
def test_other_signs_and_other_places_have_other_hashes(dtype: torch.dtype, size: int) -> None:
    """Sums of words, even weighted ones, do not see swapped signs: 2**63 times an even number is 0."""
    values, ones = torch.arange(1, size + 1).to(dtype), torch.ones(size, dtype=dtype)
    values = values if size < 256 else torch.rand(size).add(1).mul(99).to(dtype)
    signs = ones.where(torch.arange(size) % 4 % 3 == 0, -ones)  # + - - +
    first, last = ones.clone(), ones.clone()
    first[0] = last[-1] = -1
    for one, other in ((values, -values), (signs, -signs), (first, last), (values, values.roll(1)), (ones, -ones)):
        assert hashed(one) == hashed(one.clone()) != hashed(other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_count(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (6, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = bits.view(dtype)
    views = [tensor.t().contiguous().t(), torch.stack([tensor, tensor], 1)[:, 1], tensor.repeat(1, 2)[:, 5:]]
    assert {hashed(view) for view in views} == {hashed(tensor)} == {hashed(tensor.reshape(-1))}
    assert hashed(tensor[:1].expand(3, -1)) == hashed(torch.cat([tensor[:1]] * 3)) != hashed(tensor[:1])
    scalar = tensor.reshape(-1)[2::2][:1]  # contiguous to torch, which refuses to view it as bytes
    assert hashed(scalar) == hashed(scalar.clone()) == hashed(scalar[0])
    assert hashed(tensor[:0]) == hashed(bits[:0]) != hashed(tensor[:1])


def test_views_that_conjugate_or_negate_count_by_their_values() -> None:
    tensor = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert hashed(tensor.conj()) == hashed(tensor.conj().resolve_conj()) != hashed(tensor)
    assert hashed(tensor.conj().imag) == hashed(-tensor.imag) != hashed(tensor.imag)


def test_nan_payloads_and_signs_of_zero_count() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000, 0, -0x80000000], dtype=torch.int32)
    assert bits.view(torch.float32)[:3].isnan().all()
    assert len({hashed(value) for value in bits.view(torch.float32)}) == 5


@pytest.mark.parametrize("size", [MANY - 3, MANY])
def test_long_tensors_are_hashed_to_their_last_bit(size: int) -> None:
    data = torch.zeros(size, dtype=torch.uint8)
    hashes = {hashed(data), hashed(data[:-1])}
    for place in (0, (1 << 20) - 8, 1 << 20, size - 1):  # before and behind the end of a chunk, and the ends
        data[place] = 128
        hashes.add(hashed(data))
        data[place] = 0
    assert len(hashes) == 6


def test_nothing_is_read_before_the_hash_is_complete() -> None:
    assert tensor_hash(torch.empty(MANY, device="meta", dtype=torch.uint8)).is_meta
    assert tensor_hash(torch.ones(3, requires_grad=True)).shape == (2,)


def test_hashes_of_many_tensors_keep_their_keys() -> None:
    tensors = {3: torch.ones(2), "b": torch.zeros(2), 1: torch.ones(2)}
    hashes = tensor_hashes(tensors)
    assert list(hashes) == [3, "b", 1]
    assert hashes[3] == hashes[1] == tuple(tensor_hash(tensors[3]).tolist()) != hashes["b"]
    assert tensor_hashes({}) == {}
