"""The table of dtypes is torch's."""

from __future__ import annotations

import torch
from shared.dtypes import FLOATING, ITEM_BYTES, SAFETENSORS

NARROW = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}


def test_the_table_is_torchs() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}
    wide = {
        name
        for name in names
        if name in ITEM_BYTES or (name not in NARROW and not name.startswith(("bits", "q", "float4")))
    }
    assert wide == set(ITEM_BYTES)  # a dtype that a new torch brings is missed here
    for name, num_bytes in ITEM_BYTES.items():
        assert names[name].itemsize == num_bytes, name
        assert (name in FLOATING) == (names[name].is_floating_point or names[name].is_complex), name


def test_words_of_files_name_different_dtypes() -> None:
    assert len(SAFETENSORS) == len(set(SAFETENSORS.values())) == len(ITEM_BYTES) - 2  # no complex32, no complex128
    assert set(SAFETENSORS.values()) < set(ITEM_BYTES)
