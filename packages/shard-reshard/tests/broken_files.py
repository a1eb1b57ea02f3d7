"""Safetensors files broken on purpose, for hypothesis."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import strategies as st
from shard_reshard._shared.dtypes import SAFETENSORS
from shard_reshard.checkpoint.safetensors import file_table
from stored_files import file_bytes

_GOOD = file_bytes(
    {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": torch.zeros(()), "c": torch.zeros(0, 4)}, {"format": "pt"}
)
_WORDS = ["F32", "I16", "BOOL", "F12", 3, None]
_NUMBERS = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**63, 2**64, 10**30, True, 1.0, float("inf"), None, "4"])
)
_ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(_WORDS),
            "shape": st.lists(_NUMBERS, max_size=4),
            "data_offsets": st.lists(_NUMBERS, min_size=1, max_size=3),
        }
    ),
    st.recursive(st.none() | st.booleans() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)),
)
_NAMES = st.one_of(st.sampled_from(["a", "b", "__metadata__"]), st.text(max_size=4), st.just("\ud800"))


@st.composite
def broken_files(draw: st.DrawFn) -> bytes:
    """A good file with some bytes changed, cut off or put in; or a made-up header, of an honest length or not."""
    if draw(st.booleans()):
        data = bytearray(_GOOD)
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(data) - 1))
            change = draw(st.sampled_from(["set", "cut", "insert", "digit"]))
            if change == "set":
                data[at] = draw(st.integers(0, 255))
            elif change == "digit":
                digits = [i for i, byte in enumerate(data[8:], 8) if chr(byte).isdigit()] or [at]
                data[draw(st.sampled_from(digits))] = ord(draw(st.sampled_from("0123456789-")))
            elif change == "cut":
                del data[at : at + draw(st.integers(1, len(data)))]
            else:
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            if not data:
                break
        return bytes(data)
    pairs = draw(st.lists(st.tuples(_NAMES, _ENTRIES), max_size=3))
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(about)}" for name, about in pairs) + "}"
    if draw(st.integers(0, 9)) == 0:
        text = draw(st.sampled_from(["[" * 5000, "[]", "3", "", '{"a": NaN}', "{" * 2000 + '"a'])) + text
    header = text.encode()
    length = draw(st.one_of(st.just(len(header)), st.integers(0, 200), st.sampled_from([2**27, 2**63, 2**64 - 1])))
    return length.to_bytes(8, "little") + header + draw(st.binary(max_size=48))


def check_one(data: bytes, path: Path) -> bool:
    """Whether the file is accepted; then the format's own library accepts it too, and finds the same in it.

    Anything but an answer or a `PlanError` is an error here.
    """
    from safetensors import deserialize
    from shard_reshard import PlanError

    path.write_bytes(data)
    try:
        table = file_table(path)
    except PlanError as error:
        if [problem.code for problem in error.problems] != ["invalid-file"]:
            raise
        return False
    assert all(0 <= e.begin <= e.end <= len(data) for e in table.entries.values())
    if any(entry.dtype not in SAFETENSORS for entry in table.entries.values()):
        return True  # the library knows no such dtype either; ours says so when the tensor is asked for
    entries = deserialize(data)  # type: ignore[no-untyped-call]  # the library leaves it untyped
    theirs = {name: (tuple(about["shape"]), bytes(about["data"])) for name, about in entries}
    assert theirs == {name: (e.shape, data[e.begin : e.end]) for name, e in table.entries.items()}
    return True
